"""A third-party package with a custom mechanism: chosen by owners, charged, and not trusted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.events import Event, cost_from_dict
from fedstill.privacy.noise import seeded_sampler
from tests.support.my_lab import MY_LAB, SMALL, Lab

TABLES = {
    "public": {"name": "held-out", "share": 0.05},
    "method": {"name": "fedkd", "levels": 0, "gamma": math.inf, "weights": "equal", "student": {"epochs": 2}},
}
PUBLIC = 72  # public rows, for which each node is queried once
MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from fedstill.privacy import PrivacyCost, PrivacyConfig, ReleaseRule
from fedstill.privacy.release_rules import Derived


@dataclass(frozen=True)
class Round(ReleaseRule):
    text: ClassVar[str] = "rounded, which is safe"

    def bound(self, tensor):
        return tensor.round()

    def noise(self, tensor, sampler):
        return tensor

    def cost(self, shape):
        return None


class Free(Round):
    def cost(self, shape):
        return PrivacyCost()


@dataclass(frozen=True, kw_only=True)
class Rounded(PrivacyConfig):
    about: ClassVar[str] = "answers are rounded"
    rounds: ClassVar[type] = Round

    def rule(self, release, levels):
        return self.rounds()


@dataclass(frozen=True, kw_only=True)
class Liar(Rounded):
    rounds: ClassVar[type] = Free


@dataclass(frozen=True, kw_only=True)
class Following(Rounded):
    def rule(self, release, levels):
        return Derived("what is paid for elsewhere")


@dataclass(frozen=True, kw_only=True)
class Learned(Rounded):
    dp_trained: ClassVar[dict] = {"generator": "rounds"}


@dataclass(frozen=True, kw_only=True)
class Silent(PrivacyConfig):
    pass


@dataclass(frozen=True, kw_only=True)
class Sharded(PrivacyConfig):
    about: ClassVar[str] = "copies on parts of the records"

    def shard_indices(self, data):
        return [torch.arange(len(data))]


@dataclass(kw_only=True)
class Thawed:
    about: ClassVar[str] = "anything"
"""


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """Return the lab with a run under the custom mechanism, and a module of incorrect mechanisms."""
    lab.write("small.toml", **TABLES)
    (lab.here / "rounding.py").write_text(MODULE)
    lab.run("flipped", *OWN)
    return lab


def under(mechanism: str, *options: str) -> list[str]:
    given = [f"mechanism={mechanism}", *options]
    return [f"--nodes.privacy.{option}" for option in given]


OWN = ["--task.name", "ordinal", *under("flip", "epsilon=20")]  # the task and the mechanism of the package


def nodes(lab: Lab, out: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = lab.result(out)["privacy"]["nodes"]
    return entries


def test_flip_rate_matches_privacy_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MY_LAB))
    from my_lab.flip import Flipped

    scores = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0))
    best = scores.argmax(1)
    rule = Flipped(1 / 1.5)
    assert rule.cost((7, 4)) == {Event("pure", 1 / 1.5): 7}
    output = rule.noise(rule.bound(scores), seeded_sampler(0, "flip"))
    assert torch.equal(output.sum(1), torch.full((20_000,), 10.0))
    moved = (output.argmax(1) - best) % 4
    shares = torch.bincount(moved, minlength=4) / 20_000
    other = 1 / (math.exp(1.5) + 3)
    assert shares.tolist() == pytest.approx([math.exp(1.5) * other, other, other, other], abs=0.012)
    assert torch.equal(Flipped(0.0).noise(rule.bound(scores), seeded_sampler(0, "flip")).argmax(1), best)
    assert Flipped(0.0).cost((7, 4)) is None


def test_custom_mechanism_reports_epsilon_and_assumptions(lab: Lab) -> None:
    for node in nodes(lab, "flipped"):
        (event,) = cost_from_dict(node["events"])
        assert node["events"] == {str(event): PUBLIC}
        assert event.kind == "pure"
        assert node["noise"] == {"flip": event.noise}
        assert (node["mechanism"], node["guarantee"]) == ("flip", True)
        assert 0.97 * 20 < node["epsilon"] <= 20
        assert node["epsilon"] == compute_epsilon({event: PUBLIC}, 1e-5)
        assert node["epsilon"] <= PUBLIC / event.noise
    assert "noisy-outputs, flip" in lab("list")
    page = lab.text("flipped/report.html")
    for words in (
        "flip: the predicted class is released by randomized response",
        "the best class of each row by randomized response",
        "claims of its own mechanism: nothing here proves its costs",
    ):
        assert words in page


def test_mechanism_by_module_and_name_in_file_and_plan(lab: Lab) -> None:
    privacy = {"mechanism": "my_lab.flip:Flip", "flip": {"noise": 4.0}}
    lab.write("given.toml", **TABLES, nodes={**SMALL["nodes"], "privacy": privacy})
    plan = lab("privacy", "plan", "given.toml")
    assert f"{PUBLIC} x pure(4)" in plan
    lab.run("given", file="given.toml")
    for node in nodes(lab, "given"):
        assert node["mechanism"] == "flip"
        assert node["events"] == {"pure(4.0)": PUBLIC}
        assert f"{math.ceil(1000 * node['epsilon']) / 1000:g} (PLD)" in plan


def test_only_the_owner_chooses_the_mechanism(lab: Lab) -> None:
    digits = load_digits()
    toml = '[data]\npath = "data.npz"\n[model]\nname = "mlp:8"\n[local]\nepochs = 2\n'
    toml += '[privacy]\nmechanism = "flip"\nepsilon = 20.0\n'
    lab.node("clinic", toml, (digits.images[:100] * 15).astype(np.uint8), digits.target[:100])
    output = lab("node", "check", "clinic", "small.toml")
    assert "flip, secure randomness; for one training record of this node" in output
    assert "It can take part.\nPrivacy cost: epsilon 19.9" in output
    lab("offline", "make", "small.toml", "--out", "queries.safetensors")
    lab("offline", "answer", "clinic", "queries.safetensors")
    assert f"{PUBLIC} x pure(" in lab("audit", "show", "clinic")


@pytest.mark.parametrize(
    ("mechanism", "rule"),
    [
        ("rounding:Rounded", "rounded, which is safe: no guarantee"),
        ("rounding:Liar", "rounded, which is safe: no guarantee"),
        ("rounding:Following", "exact: no guarantee"),
    ],
)
def test_rule_without_cost_gives_no_guarantee(lab: Lab, mechanism: str, rule: str) -> None:
    """Neither claims of the mechanism nor an empty cost give a guarantee."""
    out = mechanism.rpartition(":")[2]
    lab.run(out, *under(mechanism))
    output = lab.result(out)["privacy"]
    assert (output["guarantee"], output["text"]) == (None, "no guarantee")
    for node in output["nodes"]:
        assert (node["guarantee"], node["epsilon"], node["releases_without_guarantee"]) == (False, None, 1)
        assert node["rules"] == [f"logits of predict: {rule}"]
    assert "There is no formal privacy guarantee" in lab.text(f"{out}/report.html")
    line = lab.refused(*under(mechanism, "epsilon=20"))
    assert f"a budget is set, and mechanism {mechanism} gives no guarantee for logits" in line


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ("flop", "unknown mechanism 'flop': did you mean 'flip'?"),
        ("rounding:Silent", "expected a class with about: ClassVar[str]"),
        (
            "rounding:Learned",
            "model or critic learns as a DPTrainingConfig says, and not generator as rounds",
        ),
        ("rounding:Sharded", "a method ensemble, because it has shards"),
        ("rounding:Thawed", "a subclass of PrivacyConfig"),
    ],
)
def test_rejects_broken_mechanism_in_one_line(lab: Lab, mechanism: str, message: str) -> None:
    assert message in lab.refused(*under(mechanism))


def test_mechanism_refuses_unsupported_query(lab: Lab) -> None:
    trained = ["--method.name", "fedavg", "--nodes.policy.outputs_only", "false"]
    line = lab.refused(*trained, *under("flip", "epsilon=20"))
    assert "mechanism flip gives no guarantee for parameters" in line


@pytest.mark.slow
def test_flare_nodes_use_their_own_mechanism_options(lab: Lab) -> None:
    """The nodes also use the custom task that the owner allows."""
    pytest.importorskip("nvflare")
    lab.run("flare", *OWN, "--engine.backend", "flare")
    for name in ("node-0", "node-1"):
        file = lab.text(f"flare/federation/nodes/{name}/node.toml")
        assert 'mechanism = "flip"' in file
        assert 'plugins = [\n    "ordinal",\n]' in file
    assert nodes(lab, "flare") == nodes(lab, "flipped")
    page, noise = lab.text("flare/report.html"), nodes(lab, "flare")[0]["noise"]["flip"]
    assert 'data-label="Epsilon spent"><div>20</div>' in page
    assert f"<dd>flip {noise:.4g}" in page
    lab.run("exact", "--task.name", "ordinal", *under("flip", "flip.noise=0"))
    flare, flipped, exact = map(lab.result, ("flare", "flipped", "exact"))
    for name in ("accuracy", "mae"):
        assert flare[name] == flipped[name] != exact[name], name
