"""FedMD: what is communicated, how a consensus is digested, and own data revisited."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.core.state import load_state, save_state
from fedstill.data.public import Public
from fedstill.federation import InProcess, partition
from fedstill.methods.fedmd import FedMD
from fedstill.methods.server import Server, ServerSetting
from fedstill.models import build
from fedstill.node import training
from fedstill.node.audit import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.questions import NodeSetting, NodeSide
from fedstill.protocol.schedule import LocalConfig, Span
from fedstill.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, CLASSES, SEED, N = (1, 8, 8), 3, 4, 23
TASK, LOCAL = Classification(CLASSES), LocalConfig(epochs=4, batch=4, lr=1e-2)
MIXED = ("mlp:8", "lenet5:6", "mlp:8", "mlp:4")
ALIKE = ("mlp:8",) * 4
CONFIG = FedMD(first=2, rounds=3, subset=11, digest_batch=4, digest_epochs=2, student_epochs=2)


@dataclass
class World:
    nodes: list[Node]
    side: NodeSide
    public: Public
    federation: InProcess
    server: Server
    audit: AuditLog


def world(
    config: FedMD,
    *,
    specs: Sequence[str] = MIXED,
    stacked: bool = True,
    local: LocalConfig = LOCAL,
    frozen: int | None = None,
) -> World:
    audit, nodes, compute = AuditLog(), [], Compute()
    generator = torch.Generator().manual_seed(99)
    inputs = torch.randn(N, *SHAPE, generator=generator)
    public = Public("made", inputs, torch.randint(CLASSES, (N,), generator=generator))
    for index, spec in enumerate(specs):
        generator = torch.Generator().manual_seed(index)
        size = 6 + 5 * index
        inputs = torch.randn(size, *SHAPE, generator=generator)
        targets = torch.randint(min(index + 1, CLASSES), (size,), generator=generator)
        gate = Gate(f"n{index}", PolicyConfig(), audit)
        model = build(spec, SHAPE, CLASSES, 0, index).eval().requires_grad_(index != frozen)
        nodes.append(Node(f"n{index}", TensorData(inputs, targets), model, gate, SEED))
    side = config.node_side(NodeSetting(TASK, local, compute, public))
    side.prepare(nodes)
    federation = InProcess(nodes, partition(nodes, stacked), side, compute)
    student = build("mlp:8", SHAPE, CLASSES, 0, "student")
    setting = ServerSetting(federation, student, TASK, SHAPE, (0.5,), (0.5,), compute, SEED, local, public)
    return World(nodes, side, public, federation, Server(config, setting), audit)


def run(made: World, turns: int | None = None) -> World:
    for _ in range(made.server.total if turns is None else turns):
        made.server.step()
    return made


def answers(made: World, x: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([node.model.eval()(made.public.inputs if x is None else x) for node in made.nodes])


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, msg=name, **tolerance)


# --- communicate, aggregate ----------------------------------------------------------------------


def asked(made: World, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Questions as the server asks them."""
    log, ask = [], made.federation.ask

    def noted(question: str, **sent: Any) -> Any:
        log.append((question, sent))
        return ask(question, **sent)

    monkeypatch.setattr(made.federation, "ask", noted)
    return log


def test_the_consensus_is_the_mean_of_all_class_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(CONFIG)
    log = asked(made, monkeypatch)
    before = answers(made)
    made.server.step()
    (first, sent), (second, digested) = log
    assert (first, second) == ("communicate", "digest_and_communicate")
    rows = sent["rows"].long()
    assert len(set(rows.tolist())) == 11
    torch.testing.assert_close(digested["consensus"], before[:, rows].mean(0))
    assert torch.equal(digested["rows"], sent["rows"])
    # What came up are the scores on the next subset, from models that have digested and revisited.
    scores = torch.stack([made.server.state.scores[node.name] for node in made.nodes])
    torch.testing.assert_close(scores, answers(made)[:, digested["rows_next"].long()], rtol=1e-4, atol=1e-5)
    made.server.step()
    torch.testing.assert_close(log[2][1]["consensus"], scores.mean(0))


def test_weights_by_label_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(replace(CONFIG, weights="counts"))
    log = asked(made, monkeypatch)
    before = answers(made)
    made.server.step()
    counts = torch.stack([TASK.counts(node.data) for node in made.nodes])
    rows = log[1][1]["rows"].long()
    expected = (counts[:, None] / counts.sum(0) * before[:, rows]).sum(0)
    torch.testing.assert_close(log[2][1]["consensus"], expected)
    assert "count_labels" not in world(CONFIG).federation.questions


def test_one_question_a_round_and_what_it_weighs() -> None:
    made = run(world(CONFIG))
    told = made.audit.summary()
    assert told["questions_by_name"] == {"communicate": 1, "digest": 1, "digest_and_communicate": 2}
    logits = len(MIXED) * 11 * CLASSES * 4 * 3
    assert told["by_kind"]["logits"] == {"up": logits, "down": logits}
    assert set(told["by_kind"]) == {"indices", "logits", "schedule"}
    single = run(world(replace(CONFIG, rounds=1)))
    assert single.audit.summary()["questions_by_name"] == {"communicate": 1, "digest": 1}


# --- digest, revisit -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["l1", "l2", "kl"])
def test_digesting_moves_every_node_towards_the_consensus(how: Any) -> None:
    config = replace(CONFIG, distance=how, digest_epochs=10, digest_lr=1e-2, rounds=1, first=1)
    # Revisiting is all but switched off, to see digesting alone.
    made = world(config, local=replace(LOCAL, lr=1e-9, lr_end=0.0))
    rows = config.draw(made.server, 0).long()
    before = answers(made)[:, rows]
    consensus = before.mean(0)
    run(made)
    after = answers(made)[:, rows]
    for k in range(len(MIXED)):
        assert (
            config.mismatch(TASK, after[k], consensus).mean()
            < 0.5 * config.mismatch(TASK, before[k], consensus).mean()
        )


def test_distances_by_hand() -> None:
    z, consensus = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[0.0, 0.0, 2.0]])
    assert replace(CONFIG, distance="l1").mismatch(TASK, z, consensus).item() == pytest.approx(4 / 3)
    # 0.5 times the mean of squares once each mean is taken away: (4/3... - ) differences 5/3, 2/3, -7/3
    expected = 0.5 * (25 + 4 + 49) / 9 / 3
    assert replace(CONFIG, distance="l2").mismatch(TASK, z, consensus).item() == pytest.approx(expected)
    p, q = (consensus / 2).softmax(1), (z / 2).softmax(1)
    kl = 4 * (p * (p / q).log()).sum()  # from the consensus to the node, times tau^2
    config = replace(CONFIG, distance="kl", tau=2.0)
    assert config.mismatch(TASK, z, consensus).item() == pytest.approx(kl.item(), rel=1e-5)


def test_digest_and_revisit_by_hand() -> None:
    """One node: Adam on the consensus in its own order, then the last part of its local training."""
    config = replace(CONFIG, rounds=1, distance="l1")
    made = world(config, specs=("mlp:8",))
    node = made.nodes[0]
    model = copy.deepcopy(node.model)
    consensus = answers(made)[0] + 1.0  # not what it says itself, or there would be nothing to learn
    rows = torch.arange(N, dtype=torch.int32)
    made.federation.ask("digest", rows=rows, consensus=consensus, round=torch.tensor(0))

    optimiser = torch.optim.Adam(model.parameters(), config.digest_lr)
    for epoch in range(config.digest_epochs):
        order = torch.randperm(N, generator=node.draw("digest", 0, epoch))
        for part in torch.tensor_split(order, 6):  # 23 examples, at most 4 at once
            loss = (model(made.public.inputs[part]) - consensus[part]).abs().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    alone = Node(node.name, node.data, model, node.gate, node.seed)
    training.prepare([alone], LOCAL)
    training.train([alone], TASK, LOCAL, Compute(), span=Span(2, 3, 3))
    same(node.model, model, rtol=1e-3, atol=1e-5)


def test_the_whole_local_budget_is_used_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = []
    train = training.train

    def noted(nodes: Any, task: Any, config: Any, compute: Any, **rest: Any) -> int:
        spans.append((nodes[0].name, *rest["span"]))
        return train(nodes, task, config, compute, **rest)

    monkeypatch.setattr(training, "train", noted)
    made = run(world(CONFIG, stacked=False))
    assert made.side.first == Span(0, 2, 5)  # done before the first question
    assert [span[1:] for span in spans if span[0] == "n0"] == [(2, 3, 5), (3, 4, 5), (4, 5, 5)]


# --- transfer learning ---------------------------------------------------------------------------


def test_transfer_learning_is_on_labelled_public_data_and_comes_first() -> None:
    config = replace(CONFIG, public_epochs=20, first=0, digest_lr=1e-2)
    made = world(config)
    assert made.side.first is None
    assert config.needs().public_labels
    assert not CONFIG.needs().public_labels
    made.federation.ask("transfer")
    labels = made.public.labels
    assert labels is not None
    assert (answers(made).argmax(2) == labels).float().mean() > 0.9
    whole = run(world(replace(CONFIG, public_epochs=1)))
    assert whole.audit.summary()["questions_by_name"]["transfer"] == 1
    assert whole.side.first is None  # the first part of local training follows in the same question


def test_transfer_goes_on_to_the_first_part_of_local_training() -> None:
    config = replace(CONFIG, public_epochs=1)
    made, only = world(config, specs=("mlp:8",)), world(replace(config, first=0), specs=("mlp:8",))
    for one in (made, only):
        one.federation.ask("transfer")
    node = only.nodes[0]
    training.prepare([node], LOCAL)
    training.train([node], TASK, LOCAL, Compute(), span=Span(0, 2, 5))
    same(made.nodes[0].model, node.model, rtol=1e-4, atol=1e-6)


# --- the student, engines, stops -----------------------------------------------------------------


def test_the_student_learns_from_the_consensus_alone() -> None:
    config = replace(CONFIG, rounds=1, subset=N, student_epochs=60, student_lr=1e-2, distance="l1")
    made = world(config)
    consensus = answers(made).mean(0)
    run(made)
    with torch.no_grad():
        gap = (made.server.student.eval()(made.public.inputs) - consensus).abs().mean()
    assert gap < 0.2 * consensus.abs().mean()


def test_a_model_that_its_owner_froze_only_answers() -> None:
    made = world(replace(CONFIG, public_epochs=1), frozen=1)
    before = copy.deepcopy(made.nodes[1].model)
    other = copy.deepcopy(made.nodes[0].model)
    run(made)
    same(made.nodes[1].model, before)
    assert not torch.equal(made.nodes[0].model[1].weight, other[1].weight)  # type: ignore[index]


@pytest.mark.parametrize("specs", [ALIKE, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize("public_epochs", [0, 1])
def test_stacked_and_one_by_one_give_equal_figures(specs: tuple[str, ...], public_epochs: int) -> None:
    config = replace(CONFIG, public_epochs=public_epochs)
    stacked, alone = (run(world(config, specs=specs, stacked=stacked)) for stacked in (True, False))
    same(stacked.server.student, alone.server.student, rtol=1e-2, atol=1e-4)
    for one, other in zip(stacked.nodes, alone.nodes, strict=True):
        same(one.model, other.model, rtol=1e-2, atol=1e-4)
    assert stacked.audit.summary() == alone.audit.summary()


def test_a_run_goes_on_to_the_same_student(tmp_path: Path) -> None:
    straight, half = run(world(CONFIG)), run(world(CONFIG), 2)
    save_state(tmp_path / "state.st", [half.server.kept(), *(node.state() for node in half.nodes)])
    rest = world(CONFIG)
    server, *nodes = load_state(tmp_path / "state.st")
    for node, state in zip(rest.nodes, nodes, strict=True):
        node.load(state)
    rest.server.take_up(server)
    run(rest, 1)
    same(rest.server.student, straight.server.student)
    for one, other in zip(rest.nodes, straight.nodes, strict=True):
        same(one.model, other.model)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rounds", 0),
        ("first", -1),
        ("subset", 0),
        ("digest_batch", 0),
        ("tau", 0.0),
        ("student_lr", math.inf),
        ("distance", "l3"),
        ("weights", "size"),
    ],
)
def test_an_option_that_is_not_allowed_is_named(option: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"method.{option} is "):
        FedMD(**{option: value})


def test_each_rounds_subset_is_drawn_by_its_number() -> None:
    made = world(CONFIG)
    subsets = [CONFIG.draw(made.server, t) for t in range(3)]
    order = torch.randperm(N, generator=torch_generator(SEED, "subset", 1))[:11]
    assert subsets[1].tolist() == order.tolist()
    assert len({tuple(rows.tolist()) for rows in subsets}) == 3
    assert subsets[0].dtype is torch.int32
