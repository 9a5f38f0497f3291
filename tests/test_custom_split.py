"""A custom split, network and two ensembles in a separate package."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.data import SplitConfig, SplitItems, split
from fedstill.data.partitioners import SPLITS
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.fediod import FedIOD
from fedstill.methods.fedkd import FedKD, StudentTraining
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel
from tests.support import small_world
from tests.support.my_lab import MY_LAB, SMALL, Lab
from tests.support.small_world import World, disagreeing, few, made, make_nodes, public_data


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """Return the folder of the package, next to a package with broken entry points."""
    lab.write(
        "small.toml",
        split={"name": "quantity-skew", "nodes": 3, "power": 1.0},
        nodes={**SMALL["nodes"], "policy": {"outputs_only": False}},
        method={"name": "fedavg", "rounds": 3},
    )
    lab.add_broken_package()
    return lab


@pytest.fixture
def run_with_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the folder of the package to the Python path."""
    monkeypatch.syspath_prepend(MY_LAB)


def node_sizes(lab: Lab, out: str) -> list[int]:
    return [node["examples"] for node in lab.result(out)["nodes"]]


def test_custom_split_from_a_file_by_name(lab: Lab) -> None:
    lab.run("skewed")
    # 1438 examples in shares 6 : 3 : 2; each goes to the node whose share contains its midpoint.
    assert node_sizes(lab, "skewed") == [784, 393, 261]
    record = lab.result("skewed")["split"]
    about = "quantity-skew, power 1.0"
    assert record == {"name": "quantity-skew", "about": about, "power": 1.0, "nodes": 3}
    assert f"Split over the nodes: {about}" in lab.text("skewed/report.html")


def test_custom_split_from_the_command_line_and_in_a_comparison(lab: Lab) -> None:
    chosen = ["--split.name", "my_lab.skew:QuantitySkew", "--split.power", "0", "--split.nodes", "2"]
    lab("compare", "standalone", "fedavg", "--base", "small.toml", *chosen, "--evaluation.every", "0",
        "--out", "both", "--quiet")  # fmt: skip
    rows = list(csv.DictReader(lab.text("both/compare.csv").splitlines()))
    assert [row["method"] for row in rows] == ["standalone", "fedavg"]
    assert all(node_sizes(lab, f"both/{row['folder']}") == [719, 719] for row in rows)
    assert "power 0.0" in lab.text("both/compare.html")


def test_help_shows_only_the_options_of_the_split(lab: Lab) -> None:
    printed = lab("config", "small.toml", "--split.power", "2")
    assert 'name = "quantity-skew"' in printed
    assert "power = 2.0" in printed
    assert "alpha = 0.5" not in printed
    assert "--split.power" in lab("run", "small.toml", "--help-all")


def test_list_shows_installed_plugins(lab: Lab) -> None:
    printed = " ".join(lab("list").split())
    assert "sorted, positives, broken, quantity-skew" in printed
    assert "transformer, bag, broken, convmixer" in printed
    assert "cronus, expguard, broken, log-median, log-trimmed-mean" in printed


def test_custom_network_at_nodes_and_as_student(lab: Lab) -> None:
    chosen = ["--nodes.models", "convmixer:8", "--student.model", "convmixer:8"]
    lab.run("mixed", *chosen)
    result = lab.result("mixed")
    block = (8 * 9 + 8) + (8 * 8 + 8) + 2 * (8 + 8)  # depthwise, pointwise, norms
    parameters = (8 * 4 + 8) + 4 * block + (8 * 10 + 10)
    assert [node["parameters"] for node in result["nodes"]] == [parameters] * 3
    assert result["student"] == {**result["student"], "model": "convmixer:8", "parameters": parameters}


def test_custom_network_in_node_toml(lab: Lab) -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, 1, 8, 8), dtype=np.uint8)
    toml = '[model]\nname = "convmixer:8"\n'
    folder = lab.node("clinic", toml, images, np.arange(40) % 2)
    assert "convmixer:8" in lab("node", "check", str(folder))
    (folder / "node.toml").write_text((folder / "node.toml").read_text().replace("mixer", "mixr"))
    assert "expected one of small-cnn" in lab("node", "check", str(folder), code=2)


def test_custom_ensemble_by_name(lab: Lab) -> None:
    result = []
    for mode in ("log-median", "my_lab.robust:median", "logits"):
        lab.run(f"by {mode}", "--method.name", "ensemble", "--method.ensemble", mode)
        result.append(lab.result(f"by {mode}")["ensemble"])
    assert result[0] == result[1] != result[2]


# --- reference values ------------------------------------------------------------------------------------


def reference(responses: torch.Tensor) -> torch.Tensor:
    """Return the median over nodes of log-probabilities ``(K, B, C)``, computed by numpy."""
    return torch.from_numpy(np.median(responses.log_softmax(2).numpy(), 0))


def make_world(method: FedKD | FedIOD, **setting: Any) -> World:
    """Return three untrained nodes with different responses, and a server."""
    specs = ("small-cnn:4", "resnet8:4", "mlp:8")  # different architectures
    nodes = make_nodes([disagreeing(made(spec, index)) for index, spec in enumerate(specs)], classes=few)
    return small_world.world(method, nodes, made("mlp:8", "student"), local=LocalConfig(), **setting)


@pytest.mark.usefixtures("run_with_lab")
def test_fedkd_student_learns_from_the_median() -> None:
    student = StudentTraining(epochs=4, batch=6, lr=1e-2, lr_end=1e-3)
    config = FedKD(ensemble="my_lab.robust:median", levels=0, gamma=float("inf"), student=student)
    created = make_world(config, public=public_data(23))
    created.server.step()
    with torch.no_grad():
        responses = torch.stack([node.model(created.public.inputs) for node in created.nodes])
    torch.testing.assert_close(created.server.state.z_hat[0], reference(responses), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("run_with_lab")
def test_fediod_uses_the_median_for_student_and_generator() -> None:
    student = ReplayTraining(steps=2, batch=100, memory=12)  # the memory holds less than a batch
    one = make_world(FedIOD(batch=5, ensemble="my_lab.robust:median", student=student))
    before = [value.clone() for value in one.server.state.generator.G.parameters()]
    one.server.step()
    x, z, _ = one.server.state.student.replay.sample(5, 0, 0)
    with torch.no_grad():
        responses = torch.stack([node.model(x) for node in one.nodes])
    torch.testing.assert_close(z, reference(responses), rtol=1e-4, atol=1e-5)
    after = list(one.server.state.generator.G.parameters())
    assert all(value.isfinite().all() for value in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.usefixtures("run_with_lab")
def test_task_defines_the_compared_outputs() -> None:
    responses = torch.tensor([[[0.0, 9.0]], [[100.0, 101.0]], [[3.0, -3.0]], [[5.0, 5.0]], [[0.0, 1.0]]])
    even = torch.full((5, 1, 2), 0.2)
    log_odds = MultiLabel(2).ensemble(responses, even, "my_lab.robust:median")
    assert log_odds.tolist() == [[3.0, 5.0]]  # separately for each label
    trimmed = MultiLabel(2).ensemble(responses, even, "my_lab.robust:trimmed_mean")
    torch.testing.assert_close(trimmed, torch.tensor([[8 / 3, 5.0]]))  # (0 + 3 + 5) / 3, (1 + 5 + 9) / 3
    # Classes are compared by log-probabilities, so the offset of 100 of a node has no effect.
    classes = Classification(2).ensemble(responses, even, "my_lab.robust:median")
    assert classes[0, 1] - classes[0, 0] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.usefixtures("run_with_lab")
@pytest.mark.parametrize(("nodes", "power"), [(3, 1.0), (4, 0.0), (5, 3.0)])
def test_custom_split_keeps_patients_whole_and_the_minimum(nodes: int, power: float) -> None:
    patient = np.repeat(np.arange(40), 5)
    config = SPLITS["my_lab.skew:QuantitySkew"](nodes=nodes, minimum=15, power=power)  # type: ignore[call-arg]
    parts = split(torch.zeros(200, dtype=torch.int64), 1, config, np.random.default_rng(0), {}, patient)
    assert sorted(torch.cat(parts).tolist()) == list(range(200))
    owners = [set(patient[part.numpy()].tolist()) for part in parts]
    assert sum(map(len, owners)) == 40
    assert min(map(len, parts)) >= 15


@pytest.mark.parametrize("wrong", [np.zeros(3, dtype=np.int64), np.zeros(20), np.arange(20), [0] * 20])
def test_rejects_invalid_custom_splits(wrong: Sequence[int]) -> None:
    class Odd(SplitConfig):
        def divide(self, items: SplitItems, generator: np.random.Generator) -> Any:
            return wrong

    with pytest.raises(
        ValueError, match=r"^invalid split\.name = .*Odd' \(expected one whose divide gives 20"
    ):
        split(torch.zeros(20, dtype=torch.int64), 1, Odd(nodes=2, minimum=1), np.random.default_rng(0))
