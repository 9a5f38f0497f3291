"""DS-FL: aggregation, transfer and caching of labels for public data, and training with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.methods.dsfl import DSFL
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from tests.support import small_world
from tests.support.small_world import (
    CLASSES,
    TASK,
    World,
    change_responses,
    made,
    make_nodes,
    public_data,
    run,
    same,
)

pytestmark = pytest.mark.usefixtures("steady_adam")

N = 23
LOCAL = LocalConfig(epochs=4, batch=4, lr=1e-2)
MIXED = ("mlp:8", "lenet5:6", "mlp:8", "mlp:4")
CONFIG = DSFL(rounds=3, subset=11, distill_batch=4, distill_epochs=2, student_epochs=2)
ALL = replace(CONFIG, subset=N)


def world(config: DSFL, *, specs: Sequence[str] = MIXED) -> World:
    models = [made(spec, index).eval() for index, spec in enumerate(specs)]
    nodes = make_nodes(models, policy=PolicyConfig())
    given: dict[str, Any] = {"public": public_data(N)}
    return small_world.world(config, nodes, made("mlp:8", "student"), local=LOCAL, **given)


def record_queries(here: World) -> list[tuple[str, dict[str, torch.Tensor], Any]]:
    """Record all further queries and responses."""
    log = []

    def record(query: str, nodes: Any, sent: Any, response: Any) -> Any:
        result = response()
        log.append((query, dict(sent), result))
        return result

    change_responses(here, record)
    return log


# --- aggregation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "beta"), [(0.1, 0.0), (0.5, 0.0), (0.1, 1.0), (0.1, 2.5)])
def test_labels_are_sharpened_mean_of_node_distributions(T: float, beta: float) -> None:
    """The mean of softmaxes, then a softmax at temperature T or a power of beta, one number at a time."""
    here = world(replace(CONFIG, T=T, beta=beta))
    log = record_queries(here)
    here.server.step()
    (_, request, responses), (_, sent, _) = log
    z = torch.stack([response["logits"] for response in responses.values()])
    labels = sent["t_g"].softmax(1)
    for row in range(11):
        p = [sum(z[k, row].softmax(0)[c].item() for k in range(4)) / 4 for c in range(CLASSES)]
        sharp = [each**beta for each in p] if beta else torch.tensor([each / T for each in p]).exp().tolist()
        expected = torch.tensor([each / sum(sharp) for each in sharp])
        torch.testing.assert_close(labels[row], expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(sent["rows"], request["rows"])
    assert len(set(request["rows"].tolist())) == 11


def test_weights_by_class_counts() -> None:
    here = world(replace(CONFIG, weights="counts", beta=1.0))
    log = record_queries(here)
    here.server.step()
    counts = torch.stack([TASK.counts(node.data) for node in here.nodes])  # (K, C)
    z = torch.stack([response["logits"] for response in log[1][2].values()])
    mixed = ((counts / counts.sum(0)).unsqueeze(1) * z.softmax(2)).sum(0)
    torch.testing.assert_close(log[2][1]["t_g"].softmax(1), mixed / mixed.sum(1, keepdim=True))


def test_distillation_at_a_node_by_hand() -> None:
    """Cross-entropy with the labels, in the node's own order, with a new Adam."""
    here = world(replace(CONFIG, rounds=1), specs=("mlp:8",))
    node = here.nodes[0]
    rows = torch.arange(N, dtype=torch.int32)
    here.federation.query("predict", rows=rows, round=torch.tensor(0))
    model = copy.deepcopy(node.model).requires_grad_()
    t_g = torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0))
    here.federation.query("distill", rows=rows, t_g=t_g, round=torch.tensor(0))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(2):
        order = torch.randperm(N, generator=node.random_generator("distil", 0, epoch))
        for part in torch.tensor_split(order, 6):  # 23 examples, at most 4 at once
            log_q = model(here.public.inputs[part]).log_softmax(1)
            loss = -(t_g[part].softmax(1) * log_q).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    same(node.model, model, rtol=1e-3, atol=1e-5)


# --- the cache -------------------------------------------------------------------------------------


def test_label_is_queried_again_only_after_cache_rounds() -> None:
    here = world(replace(CONFIG, rounds=6, cache_rounds=2))
    log = record_queries(here)
    run(here)
    since: dict[int, int] = {}
    for query, sent, _ in log:
        if query != "distill":
            continue
        t, new, cached = int(sent["round"]), sent["rows"].tolist(), sent["kept"].tolist()
        assert len({*new, *cached}) == 11
        assert all(row not in since or since[row] + 2 < t for row in new)
        assert all(since[row] + 2 >= t for row in cached)
        since |= dict.fromkeys(new, t)
    assert here.server.state.since.tolist() == [since.get(row, -1) for row in range(N)]
    for node in here.nodes:  # all nodes have the same labels
        assert torch.equal(node.buffers("labels")["t_g"], here.server.state.t_g)


def test_cached_labels_are_free_and_unchanged() -> None:
    """With all public data in each round, nodes are not queried for labels after the first."""
    cached, plain = run(world(replace(ALL, cache_rounds=3))), world(ALL)
    first = record_queries(plain)
    run(plain)
    t_g = next(sent["t_g"] for query, sent, _ in first if query == "distill")
    labels = {int(row): t_g[at] for at, row in enumerate(first[0][1]["rows"])}
    for row, label in labels.items():
        assert torch.equal(cached.nodes[0].buffers("labels")["t_g"][row], label)
    size = len(MIXED) * N * CLASSES * 4
    assert cached.audit.traffic_totals()["by_kind"]["logits"] == {"up": size, "down": size}
    assert plain.audit.traffic_totals()["by_kind"]["logits"] == {"up": 3 * size, "down": 3 * size}
    assert cached.audit.traffic_totals()["queries_by_name"] == {"predict": 3, "distill": 3}


def test_returning_node_gets_all_labels() -> None:
    here = run(world(replace(ALL, cache_rounds=3)), 1)
    here.server.state.nodes_with_labels = here.server.state.nodes_with_labels[1:]
    log = record_queries(here)
    here.server.step()
    assert sorted(log[0][1]["rows"].tolist()) == list(range(N))
    here.server.step()
    assert not len(log[2][1]["rows"])
