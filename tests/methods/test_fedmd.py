"""FedMD: communication, digesting the consensus, and revisiting private data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.methods.fedmd import FedMD
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, Span
from tests.support import small_world
from tests.support.small_world import CLASSES, TASK, World, few, made, make_nodes, public_data, run, same

pytestmark = pytest.mark.usefixtures("steady_adam")

N = 23
LOCAL = LocalConfig(epochs=4, batch=4, lr=1e-2)
MIXED = ("mlp:8", "lenet5:6", "mlp:8", "mlp:4")
STUDENT = replace(FedMD().student, epochs=2, batch=4)
CONFIG = FedMD(initial_rounds=2, rounds=3, subset=11, digest_batch=4, digest_epochs=2, student=STUDENT)


def world(
    config: FedMD,
    *,
    specs: Sequence[str] = MIXED,
    stacked: bool = True,
    local: LocalConfig = LOCAL,
    frozen: int | None = None,
) -> World:
    models = [made(spec, index).eval().requires_grad_(index != frozen) for index, spec in enumerate(specs)]
    nodes = make_nodes(models, classes=few, policy=PolicyConfig())
    given: dict[str, Any] = {"stacked": stacked, "public": public_data(N)}
    return small_world.world(config, nodes, made("mlp:8", "student"), local=local, **given)


def responses(here: World, x: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([node.model.eval()(here.public.inputs if x is None else x) for node in here.nodes])


# --- communicate, aggregate ----------------------------------------------------------------------


def record_queries(here: World, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Record the server's queries."""
    log, call = [], here.federation.query

    def noted(query: str, **sent: Any) -> Any:
        log.append((query, sent))
        return call(query, **sent)

    monkeypatch.setattr(here.federation, "query", noted)
    return log


def test_consensus_is_mean_of_class_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(CONFIG)
    log = record_queries(here, monkeypatch)
    before = responses(here)
    here.server.step()
    (first, sent), (second, digested) = log
    assert (first, second) == ("communicate", "digest_and_communicate")
    rows = sent["rows"].long()
    assert len(set(rows.tolist())) == 11
    torch.testing.assert_close(digested["consensus"], before[:, rows].mean(0))
    assert torch.equal(digested["rows"], sent["rows"])
    # The nodes return scores of the next subset, after digesting and revisiting.
    scores = torch.stack([here.server.state.scores[node.name] for node in here.nodes])
    torch.testing.assert_close(scores, responses(here)[:, digested["rows_next"].long()], rtol=1e-4, atol=1e-5)
    here.server.step()
    torch.testing.assert_close(log[2][1]["consensus"], scores.mean(0))


def test_consensus_is_the_chosen_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(replace(CONFIG, ensemble="median"))
    log = record_queries(here, monkeypatch)
    before = responses(here)
    here.server.step()
    p = before[:, log[0][1]["rows"].long()].softmax(2).sort(0).values[1:3].mean(0)  # of four nodes
    torch.testing.assert_close(log[1][1]["consensus"].softmax(1), p / p.sum(1, keepdim=True))


def test_weights_by_label_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(replace(CONFIG, weights="counts"))
    log = record_queries(here, monkeypatch)
    before = responses(here)
    here.server.step()
    counts = torch.stack([TASK.counts(node.data) for node in here.nodes])
    rows = log[1][1]["rows"].long()
    expected = (counts[:, None] / counts.sum(0) * before[:, rows]).sum(0)
    torch.testing.assert_close(log[2][1]["consensus"], expected)
    assert "count_labels" not in world(CONFIG).federation.queries


def test_one_query_per_round_and_its_bytes() -> None:
    here = run(world(CONFIG))
    summary = here.audit.traffic_totals()
    assert summary["queries_by_name"] == {"communicate": 1, "digest": 1, "digest_and_communicate": 2}
    logits = len(MIXED) * 11 * CLASSES * 4 * 3
    assert summary["by_kind"]["logits"] == {"up": logits, "down": logits}
    assert set(summary["by_kind"]) == {"indices", "logits", "schedule"}
    single = run(world(replace(CONFIG, rounds=1)))
    assert single.audit.traffic_totals()["queries_by_name"] == {"communicate": 1, "digest": 1}


# --- digest, revisit -----------------------------------------------------------------------------


def test_distances_by_hand() -> None:
    z, consensus = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[0.0, 0.0, 2.0]])
    assert replace(CONFIG, distance="l1").digest_loss(TASK, z, consensus).item() == pytest.approx(4 / 3)
    # 0.5 times the mean of squares after subtracting means: differences 5/3, 2/3, -7/3
    expected = 0.5 * (25 + 4 + 49) / 9 / 3
    assert replace(CONFIG, distance="l2").digest_loss(TASK, z, consensus).item() == pytest.approx(expected)
    p, q = (consensus / 2).softmax(1), (z / 2).softmax(1)
    kl = 4 * (p * (p / q).log()).sum()  # KL from the consensus to the node, times tau^2
    config = replace(CONFIG, distance="kl", tau=2.0)
    assert config.digest_loss(TASK, z, consensus).item() == pytest.approx(kl.item(), rel=1e-5)


def test_digest_and_revisit_by_hand() -> None:
    """One node: Adam on the consensus in the node's order, then the last part of its local training."""
    config = replace(CONFIG, rounds=1, distance="l1")
    here = world(config, specs=("mlp:8",))
    node = here.nodes[0]
    model = copy.deepcopy(node.model)
    consensus = responses(here)[0] + 1.0  # differs from its own scores, so that there is something to learn
    rows = torch.arange(N, dtype=torch.int32)
    here.federation.query("digest", rows=rows, consensus=consensus, round=torch.tensor(0))

    optimizer = torch.optim.Adam(model.parameters(), config.digest_lr)
    for epoch in range(config.digest_epochs):
        order = torch.randperm(N, generator=node.random_generator("digest", 0, epoch))
        for part in torch.tensor_split(order, 6):  # 23 examples, at most 4 at once
            loss = (model(here.public.inputs[part]) - consensus[part]).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    alone = Node(node.name, node.data, model, node.gate, node.seed)
    local_training.attach_optimizers([alone], LOCAL)
    local_training.train([alone], TASK, LOCAL, Compute(), span=Span(2, 3, 3))
    same(node.model, model, rtol=1e-3, atol=1e-5)


def test_rounds_use_exactly_the_local_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = []
    train = local_training.train

    def noted(nodes: Any, task: Any, config: Any, compute: Any, **rest: Any) -> int:
        spans.append((nodes[0].name, *rest["span"]))
        return train(nodes, task, config, compute, **rest)

    monkeypatch.setattr(local_training, "train", noted)
    here = run(world(CONFIG, stacked=False))
    assert here.side.initial_training == Span(0, 2, 5)  # before the first query
    assert [span[1:] for span in spans if span[0] == "n0"] == [(2, 3, 5), (3, 4, 5), (4, 5, 5)]


# --- transfer learning ---------------------------------------------------------------------------


def test_transfer_learning_on_public_data_is_first() -> None:
    config = replace(CONFIG, public_epochs=20, initial_rounds=0, digest_lr=1e-2)
    here = world(config)
    assert here.side.initial_training is None
    assert config.needs().public_labels
    assert not CONFIG.needs().public_labels
    here.federation.query("transfer")
    labels = here.public.labels
    assert labels is not None
    assert (responses(here).argmax(2) == labels).float().mean() > 0.9
    whole = run(world(replace(CONFIG, public_epochs=1)))
    assert whole.audit.traffic_totals()["queries_by_name"]["transfer"] == 1
    assert whole.side.initial_training is None  # this query also runs the first part of local training


def test_transfer_includes_the_first_part_of_local_training() -> None:
    config = replace(CONFIG, public_epochs=1)
    here, only = world(config, specs=("mlp:8",)), world(replace(config, initial_rounds=0), specs=("mlp:8",))
    for one in (here, only):
        one.federation.query("transfer")
    node = only.nodes[0]
    local_training.attach_optimizers([node], LOCAL)
    local_training.train([node], TASK, LOCAL, Compute(), span=Span(0, 2, 5))
    same(here.nodes[0].model, node.model, rtol=1e-4, atol=1e-6)


# --- the student -----------------------------------------------------------------


def test_frozen_model_only_responds() -> None:
    here = world(replace(CONFIG, public_epochs=1), frozen=1)
    before = copy.deepcopy(here.nodes[1].model)
    other = copy.deepcopy(here.nodes[0].model)
    run(here)
    same(here.nodes[1].model, before)
    assert not torch.equal(here.nodes[0].model[1].weight, other[1].weight)  # type: ignore[index]
