"""A package of somebody else's with a mechanism of its own: named by owners, priced, believed no further."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedstill.privacy.accounting import epsilon
from fedstill.privacy.events import Event, from_text
from fedstill.privacy.randomness import seeded
from tests.test_own_method import ROOT, Lab

SMALL = """
[data]
name = "digits"
[public]
name = "held-out"
share = 0.05
[split]
nodes = 2
[nodes]
models = ["mlp:8"]
[nodes.local]
epochs = 2
[student]
model = "mlp:8"
[evaluation]
centralised = false
[engine]
name = "one-by-one"
threads = 1
[method]
name = "fedkd"
levels = 0
gamma = inf
weights = "equal"
epochs = 2
"""
PUBLIC = 72  # rows that each node is asked about, once
MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from fedstill.privacy import Price, PrivacyConfig, Rule
from fedstill.privacy.rules import Derived


@dataclass(frozen=True)
class Round(Rule):
    text: ClassVar[str] = "rounded, which is safe"

    def bound(self, tensor):
        return tensor.round()

    def noise(self, tensor, draws):
        return tensor

    def price(self, shape):
        return None


class Free(Round):
    def price(self, shape):
        return Price()


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
    learns: ClassVar[dict] = {"generator": "rounds"}


@dataclass(frozen=True, kw_only=True)
class Silent(PrivacyConfig):
    pass


@dataclass(kw_only=True)
class Thawed:
    about: ClassVar[str] = "anything"
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "examples" / "my_lab", home / "source")
    how = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(home / "installed")]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, str(home / "source")], check=True)
    made = Lab(home, home / "installed")
    (home / "small.toml").write_text(SMALL)
    (home / "rounding.py").write_text(MODULE)
    made("run", "small.toml", *under("flip", "epsilon=20"), "--quiet", "--out", "flipped")
    return made


def under(mechanism: str, *options: str) -> list[str]:
    given = [f"mechanism={mechanism}", *options]
    return [f"--nodes.privacy.{option}" for option in given]


def nodes(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())["privacy"]["nodes"]
    return found


def test_it_is_one_short_file() -> None:
    assert len((ROOT / "examples/my_lab/my_lab/flip.py").read_text().splitlines()) <= 60


def test_classes_are_flipped_as_often_as_their_price_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "my_lab"))
    from my_lab.flip import Flipped

    scores = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0))
    best = scores.argmax(1)
    rule = Flipped(1 / 1.5)
    assert rule.price((7, 4)) == {Event("pure", 1 / 1.5): 7}
    told = rule.noise(rule.bound(scores), seeded(0, "flip"))
    assert torch.equal(told.sum(1), torch.full((20_000,), 10.0))
    moved = (told.argmax(1) - best) % 4
    shares = torch.bincount(moved, minlength=4) / 20_000
    other = 1 / (math.exp(1.5) + 3)
    assert shares.tolist() == pytest.approx([math.exp(1.5) * other, other, other, other], abs=0.012)
    assert torch.equal(Flipped(0.0).noise(rule.bound(scores), seeded(0, "flip")).argmax(1), best)
    assert Flipped(0.0).price((7, 4)) is None


def test_by_name_it_has_an_epsilon_and_its_own_words(lab: Lab) -> None:
    for node in nodes(lab.here / "flipped"):
        (event,) = from_text(node["events"])
        assert node["events"] == {str(event): PUBLIC}
        assert event.kind == "pure"
        assert node["noise"] == {"flip": event.noise}
        assert (node["mechanism"], node["guarantee"]) == ("flip", True)
        assert 0.97 * 20 < node["epsilon"] <= 20
        assert node["epsilon"] == epsilon({event: PUBLIC}, 1e-5)
        assert node["epsilon"] <= PUBLIC / event.noise
    assert "noisy-outputs, flip" in lab("list")
    page = (lab.here / "flipped" / "report.html").read_text()
    for words in (
        "flip: the class that its network answers is told by randomised response",
        "the best class of each row by randomised response",
        "what my_lab says of its own mechanism: nothing here proves that it keeps to its prices",
    ):
        assert words in page


def test_module_and_name_in_a_file_and_a_plan(lab: Lab) -> None:
    table = '[nodes.privacy]\nmechanism = "my_lab.flip:Flip"\nflip = { noise = 4.0 }\n'
    (lab.here / "given.toml").write_text(SMALL + table)
    plan = lab("privacy", "plan", "given.toml")
    assert f"{PUBLIC} x pure(4)" in plan
    lab("run", "given.toml", "--quiet", "--out", "given")
    for node in nodes(lab.here / "given"):
        assert node["mechanism"] == "flip"
        assert node["events"] == {"pure(4.0)": PUBLIC}
        assert f"{math.ceil(1000 * node['epsilon']) / 1000:g} (PLD)" in plan


def test_in_a_comparison(lab: Lab) -> None:
    setting = '[[settings]]\nname = "{}"\nnodes = {{ privacy = {{ mechanism = "{}", epsilon = 20.0 }} }}\n'
    compared = [setting.format(name, name) for name in ("flip", "dp-sgd")]
    base = SMALL.partition("[method]")[0].replace("\n[", "\n[base.")
    options = '[options.fedkd]\nlevels = 0\ngamma = inf\nweights = "equal"\nepochs = 2\n'
    (lab.here / "both.toml").write_text('methods = ["fedkd"]\n' + base + options + "".join(compared))
    lab("compare", "both.toml", "--out", "both")
    for name in ("flip", "dp-sgd"):
        assert {node["mechanism"] for node in nodes(lab.here / "both" / name / "fedkd-seed0")} == {name}


def test_at_a_node_its_owner_names_it_and_no_server(lab: Lab) -> None:
    lab("node", "init", "clinic")
    digits = load_digits()
    images = (digits.images[:100] * 15).astype(np.uint8)
    np.savez(lab.here / "clinic" / "data.npz", images=images, labels=digits.target[:100])
    toml = 'name = "clinic"\nonline = false\n[data]\npath = "data.npz"\n[model]\nname = "mlp:8"\n'
    toml += '[local]\nepochs = 2\n[privacy]\nmechanism = "flip"\nepsilon = 20.0\n'
    (lab.here / "clinic" / "node.toml").write_text(toml)
    told = lab("node", "check", "clinic", "small.toml")
    assert "flip, secure randomness; for one training record of this node" in told
    assert "It can take part.\nIt would pay epsilon 19.9" in told
    lab("questions", "make", "small.toml", "--out", "questions.safetensors")
    lab("node", "answer", "clinic", "questions.safetensors")
    assert f"{PUBLIC} x pure(" in lab("ledger", "show", "clinic")


@pytest.mark.parametrize(
    ("mechanism", "rule"),
    [
        ("rounding:Rounded", "rounded, which is safe: no guarantee"),
        ("rounding:Liar", "rounded, which is safe: no guarantee"),
        ("rounding:Following", "exact: no guarantee"),
    ],
)
def test_what_claims_no_price_is_never_protected(lab: Lab, mechanism: str, rule: str) -> None:
    """Whatever it says of itself, and though a price of nothing is asked for."""
    out = mechanism.rpartition(":")[2]
    lab("run", "small.toml", *under(mechanism), "--quiet", "--out", out)
    told = json.loads((lab.here / out / "result.json").read_text())["privacy"]
    assert (told["guarantee"], told["text"]) == (None, "no guarantee")
    for node in told["nodes"]:
        assert (node["guarantee"], node["epsilon"], node["releases_without_guarantee"]) == (False, None, 1)
        assert node["rules"] == [f"logits of predict: {rule}"]
    assert "There is no formal guarantee of privacy" in (lab.here / out / "report.html").read_text()
    line = lab("run", "small.toml", *under(mechanism, "epsilon=20"), "--quiet", "--out", "none", code=2)
    assert f"a budget is set, and mechanism {mechanism} gives no guarantee for logits" in line


@pytest.mark.parametrize(
    ("mechanism", "said"),
    [
        ("flop", "unknown mechanism 'flop': did you mean 'flip'?"),
        ("rounding:Silent", "allowed is one that protects, with about"),
        ("rounding:Learned", "model or critic learns as a StepsConfig says, and not generator as rounds"),
        ("rounding:Thawed", "a subclass of PrivacyConfig"),
        ("rounding:Missing", "has no 'Missing'"),
    ],
)
def test_an_unknown_or_broken_one_is_one_line(lab: Lab, mechanism: str, said: str) -> None:
    printed = lab("run", "small.toml", *under(mechanism), "--quiet", "--out", "none", code=2)
    assert said in printed
    assert printed.count("\n") == 1
    assert not (lab.here / "none").exists()


def test_under_it_what_it_does_not_know_is_refused(lab: Lab) -> None:
    trained = ["--method.name", "fedavg", "--nodes.policy.outputs_only", "false"]
    line = lab(
        "run", "small.toml", *trained, *under("flip", "epsilon=20"), "--quiet", "--out", "none", code=2
    )
    assert "mechanism flip gives no guarantee for parameters" in line
