"""Malicious nodes of a simulation: which ones, what the server receives from them, and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.federation.adversaries import ADVERSARIES
from fedstill.federation.federation import SentQuery
from fedstill.federation.inprocess import InProcess
from fedstill.federation.malicious_nodes import Coalition, InProcessWithAdversary, form_coalition
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fediod import FedIOD
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method
from fedstill.protocol.node_side import NodeSetting
from fedstill.runs.simulation import group_nodes
from fedstill.tasks.regression import Regression
from tests.support.errors import raises_invalid
from tests.support.runs import result_of, small_run
from tests.support.small_world import SHAPE, TASK, made, make_nodes

NAMES = [f"node-{index}" for index in range(10)]


def coalition(name: str, *malicious: str) -> Coalition:
    return Coalition(ADVERSARIES[name](), frozenset(malicious), 0)


def engine(method: Method, who: Coalition | None) -> InProcess:
    nodes = make_nodes([made("mlp:8", index) for index in range(4)])
    side = method.node_side(NodeSetting(TASK, LocalConfig(), Compute(), None, None))
    for node in nodes:
        side.prepare(node)
    given = (nodes, group_nodes(nodes, True), side, Compute())
    return InProcess(*given) if who is None else InProcessWithAdversary(who, *given)


def digits_run(out: Path, *words: str) -> int:
    """Run FedKD over five nodes through the command line."""
    local = {"epochs": 10, "lr": 0.02, "batch": 16}
    given = (
        "--split.nodes",
        "5",
        "--split.alpha",
        "5",
        "--method.student.epochs",
        "20",
        "--method.levels",
        "0",
        *words,
    )
    return small_run(out, *given, task="classification", method="fedkd", model="mlp:16", local=local)


def test_malicious_nodes_are_sampled_by_the_seed() -> None:
    adversary = ADVERSARIES["lma"](nodes=3)
    chosen = [form_coalition(adversary, NAMES, TASK, seed, False).names for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(len(names) == 3 and names <= set(NAMES) for names in chosen)
    assert form_coalition(ADVERSARIES["none"](), NAMES, TASK, 0, True).names == frozenset()


def test_unsuitable_adversaries_are_refused() -> None:
    with raises_invalid("adversary.nodes", 10, "fewer than the 10 nodes"):
        form_coalition(ADVERSARIES["lma"](nodes=10), NAMES, TASK, 0, False)
    with raises_invalid("adversary.name", "lma", "number"):
        form_coalition(ADVERSARIES["lma"](), NAMES, Regression(), 0, False)
    with raises_invalid("adversary.name", "garbage", "link.secure_aggregation"):
        form_coalition(ADVERSARIES["garbage"](), NAMES, TASK, 0, True)
    form_coalition(ADVERSARIES["label-flipping"](), NAMES, TASK, 0, True)
    with raises_invalid("adversary.name", "lma", "scores"):
        engine(FedAvg(), coalition("lma", "n1"))


@pytest.mark.parametrize(
    ("name", "factor"), [("logit-flipping", -1.0), ("logit-scaling", 20.0), ("lma", 0.0), ("garbage", 0.0)]
)
def test_responses_and_gradients_of_malicious_nodes(name: str, factor: float) -> None:
    """Gradients are those of what a node responds: of -z they are the negative ones, of a constant 0."""
    method = FedIOD(steps=2, batch=4)
    found: list[Any] = []
    for who in (None, coalition(name, "n1", "n3")):
        federation = engine(method, who)
        x = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0))
        sent = SentQuery("predict_logits", 0, {"x": x}, True)
        names = tuple(federation.nodes)
        responses = federation.collect_responses(names, sent)
        g = {name: {"logits": torch.arange(12.0).view(4, 3)} for name in names}
        gradients = federation.collect_gradients(0, "predict_logits", g)
        z = torch.stack([responses[name]["logits"].detach() for name in names])  # (K, B, C)
        found.append((z, [next(iter(gradients[name].values())) for name in names]))
    (z, gradients), (lied, lied_gradients) = found
    assert torch.equal(lied[::2], z[::2])
    if factor:
        torch.testing.assert_close(lied[1::2], factor * z[1::2])
    else:
        assert not torch.allclose(lied[1::2], z[1::2])
    for k in range(4):
        torch.testing.assert_close(lied_gradients[k], (factor if k % 2 else 1) * gradients[k])


def test_whole_run_with_malicious_nodes(tmp_path: Path) -> None:
    """The mean of logits and its student suffer, the median does not. The result names the nodes."""
    accuracies, students = dict[str, float](), dict[str, float]()
    for name, words in {
        "honest": (),
        "mean": ("--adversary.name", "logit-flipping", "--adversary.nodes", "2"),
        "median": (
            "--adversary.name",
            "logit-flipping",
            "--adversary.nodes",
            "2",
            "--method.ensemble",
            "median",
        ),
    }.items():
        (tmp_path / name).mkdir()
        assert digits_run(tmp_path / name, *words) == 0
        result = result_of(tmp_path / name)
        accuracies[name] = result["ensemble"]["accuracy"]
        students[name] = result["accuracy"]
    assert any("malicious nodes (logit-flipping): node-" in note for note in result["notes"])
    assert accuracies["mean"] < accuracies["honest"] - 20
    assert students["mean"] < students["honest"] - 20
    assert accuracies["median"] > accuracies["mean"] + 15


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--adversary.nodes", "2"), "adversary.nodes"),
        (("--adversary.name", "lmaa"), "lma"),
        (("--adversary.name", "cpa", "--adversary.nodes", "9"), "fewer than the"),
        (("--method.ensemble", "median", "--link.secure_aggregation", "true"), "ensemble"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert digits_run(tmp_path, *words) == 2
    assert message in capsys.readouterr().err
