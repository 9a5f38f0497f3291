"""A federation is a differentiable function of the inputs of its queries."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, QueryMismatch, QueryRefused
from fedstill.federation.inprocess import InProcess
from fedstill.models import PatchCritic, build
from fedstill.node.audit_entries import ALL_RUNS
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.node.release_ledger import Release, ReleaseLedger
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting, NodeSide
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors
from fedstill.runs.simulation import group_nodes
from fedstill.tasks.classification import Classification
from tests.support.errors import raises_invalid, raises_refused

SHAPE, B = (1, 8, 8), 3
SETTING = NodeSetting(Classification(3), LocalConfig(), Compute())
ALIKE = ("small-cnn:4",) * 3
MIXED = ("small-cnn:4", "resnet8:4", "small-cnn:4", "mlp:8", "resnet8:4")  # groups interleave
ENGINES = pytest.mark.parametrize("stacked", [True, False])


class World:
    """Nodes n0, n1, ... with the given networks, and a federation over them."""

    def __init__(
        self,
        specs: tuple[str, ...] = MIXED,
        *,
        stacked: bool = True,
        policies: Mapping[str, PolicyConfig] | None = None,
    ) -> None:
        self.audit, self.calls = AuditLog(), 0
        self.nodes = []
        for index, spec in enumerate(specs):
            name = f"n{index}"
            generator = torch.Generator().manual_seed(index)
            data = TensorData(torch.randn(6, *SHAPE, generator=generator), torch.zeros(6, dtype=torch.int64))
            gate = Gate(name, (policies or {}).get(name, PolicyConfig()), self.audit)
            node = Node(name, data, build(spec, SHAPE, 3, 0, index).eval(), gate, 0)
            torch.manual_seed(index)
            node.add_module("critic", PatchCritic(1, 4), lambda m: torch.optim.Adam(m.parameters(), 0.01))
            self.nodes.append(node)
        queries = (
            Query(
                self._examine,
                sends={"x": "inputs"},
                releases={"logits": "logits", "critic": "critic"},
                differentiable=("x",),
                stackable=True,
                name="predict_logits",
            ),
            Query(self._tell, releases={"size": "data sizes"}, name="tell"),
        )
        side = NodeSide(
            {query.name: query for query in queries},
            setting=SETTING,
        )
        self.groups = group_nodes(self.nodes, stacked)
        self.federation = InProcess(self.nodes, self.groups, side, Compute())

    def _examine(self, node: NodeView, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        self.calls += 1
        self.keeps_graph = torch.is_grad_enabled()
        critic, model = node.module("critic"), node.model
        with torch.enable_grad():
            critic.train(True)
            node.step("critic", critic(x.detach()).sigmoid().flatten().mean())
            critic.train(False)
            model.train(False)
        return {"logits": model(x), "critic": critic(x)}

    def _tell(self, node: NodeView) -> Mapping[str, torch.Tensor]:
        return {"size": torch.tensor([float(node.name[1:])])}

    def plain(self, x: torch.Tensor, names: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
        """Return the outputs of the nodes' current networks for x, with gradients by plain autograd."""
        modules = [copy.deepcopy(node.modules) for node in self.nodes if names is None or node.name in names]
        return {
            "logits": torch.stack([own["model"](x) for own in modules]),
            "critic": torch.stack([own["critic"](x) for own in modules]),
        }

    def critics(self) -> list[torch.Tensor]:
        return [p.detach().clone() for node in self.nodes for p in node.modules["critic"].parameters()]


def image(seed: int = 0, **how: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, *SHAPE, generator=generator).requires_grad_(how.get("grad", True))


def loss_of(responses: Any) -> torch.Tensor:
    """Return a loss that couples nodes, inputs and both parts of the response."""
    z, d = responses["logits"], responses["critic"]
    loss: torch.Tensor = z.softmax(2).mean(0).square().sum() + (z.sum(0).sin() * d.sigmoid().mean()).sum()
    return loss


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- gradients -----------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("specs", [ALIKE, MIXED, ("mlp:8",)])
def test_federated_gradient_equals_plain_autograd(specs: tuple[str, ...], stacked: bool) -> None:
    world, w = World(specs, stacked=stacked), image()
    x = w.tanh()  # like a generator's output
    responses = world.federation.query("predict_logits", x=x)
    (grad,) = torch.autograd.grad(loss_of(responses) + x.square().sum(), w)
    v = image()
    y = v.tanh()
    expected = world.plain(y)
    close(responses["logits"], expected["logits"])
    close(responses["critic"], expected["critic"])
    close(grad, torch.autograd.grad(loss_of(expected) + y.square().sum(), v)[0])


@ENGINES
def test_second_backward_is_equal_and_not_counted(stacked: bool) -> None:
    world, x = World(stacked=stacked), image()
    loss = loss_of(world.federation.query("predict_logits", x=x))
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    audit = world.audit.traffic_totals()
    (second,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(first, second)
    assert world.audit.traffic_totals() == audit
    with pytest.raises(QueryMismatch):
        torch.autograd.grad(2 * loss, x)


@ENGINES
def test_outputs_outside_the_loss_get_no_gradient(stacked: bool) -> None:
    world, x = World(stacked=stacked), image()
    logits = world.federation.query("predict_logits", x=x)["logits"]
    before = world.audit.traffic_totals()["down"]
    (grad,) = torch.autograd.grad(logits.square().sum(), x)
    sent = world.audit.traffic_totals()["down"] - before
    assert sent == len(MIXED) * 4 * B * 3  # float32 for each logit, and nothing for the critic
    v = image()
    close(grad, torch.autograd.grad(world.plain(v)["logits"].square().sum(), v)[0])


def test_responses_require_grad_only_with_grad_inputs() -> None:
    world = World(ALIKE)
    call = world.federation.query
    assert call("predict_logits", x=image())["logits"].requires_grad
    assert not call("predict_logits", x=image(grad=False))["logits"].requires_grad
    with torch.no_grad():
        assert not call("predict_logits", x=image())["logits"].requires_grad
        assert not world.keeps_graph
    assert not call("tell")["size"].requires_grad


@ENGINES
def test_non_finite_loss_is_no_node_fault(stacked: bool) -> None:
    world = World(ALIKE, stacked=stacked)
    logits = world.federation.query("predict_logits", x=image())["logits"]
    with pytest.raises(DataError, match=r"gradients .*logits .*NaN"):
        (logits.sum() * torch.nan).backward()
    assert world.federation.excluded == {}


# --- selection of nodes --------------------------------------------------------------------------


@ENGINES
def test_responses_keep_node_order_across_groups(stacked: bool) -> None:
    world = World(stacked=stacked)
    if stacked:
        assert [[node.name for node in group] for group in world.groups] == [
            ["n0", "n2"],
            ["n1", "n4"],
            ["n3"],
        ]
    responses = world.federation.query("tell")
    assert responses.nodes == ("n0", "n1", "n2", "n3", "n4")
    assert responses["size"].flatten().tolist() == [0, 1, 2, 3, 4]


@ENGINES
def test_query_of_some_nodes_keeps_node_order(stacked: bool) -> None:
    world = World(stacked=stacked)
    responses = world.federation.query("tell", nodes=["n4", "n0"])
    assert responses.nodes == ("n0", "n4")
    assert responses["size"].flatten().tolist() == [0, 4]
    assert set(world.audit.traffic_totals()["by_node"]) == {"n0", "n4"}


@ENGINES
def test_query_of_some_nodes_trains_only_them(stacked: bool) -> None:
    world, reference = World(ALIKE, stacked=stacked), World(ALIKE, stacked=False)
    metrics = []
    for one in (world, reference):
        call = one.federation.query
        call("predict_logits", x=image(0))
        before = one.critics()
        x = image(1)
        few = call("predict_logits", nodes=["n0", "n2"], x=x)  # splits a stacked group
        per_node = len(before) // 3
        moved = [(p != q).any().item() for p, q in zip(before, one.critics(), strict=True)]
        assert not any(moved[per_node : 2 * per_node]), "n1 was not queried"
        assert any(moved[:per_node])
        assert any(moved[2 * per_node :])
        (grad,) = torch.autograd.grad(loss_of(few), x)
        everyone = call("predict_logits", x=image(2))
        metrics.append([few["logits"], few["critic"], grad, everyone["logits"], everyone["critic"]])
    for mine, expected in zip(*metrics, strict=True):
        close(mine, expected)


def test_repeats_query_after_group_was_split() -> None:
    world = World(ALIKE)
    first = world.federation.query("predict_logits", x=image())
    world.federation.query("predict_logits", nodes=["n1"], x=image(1))
    calls, critics = world.calls, world.critics()
    again = world.federation.query("predict_logits", number=first.number, x=image())
    assert torch.equal(again["critic"], first["critic"])
    assert world.calls == calls
    assert all(torch.equal(p, q) for p, q in zip(critics, world.critics(), strict=True))


@pytest.mark.parametrize(
    ("of", "named"),
    [(["n9"], r"\['n9'\]"), (["n0", "clinic"], r"\['clinic'\]"), ([], r"\[\]"), ("n0", r"\['n', '0'\]")],
)
def test_rejects_unknown_nodes(of: Any, named: str) -> None:
    with pytest.raises(ArgumentError, match=rf"invalid nodes = {named} \(expected some of n0, n1, n2"):
        World(ALIKE).federation.query("tell", nodes=of)


def test_rejects_unknown_queries_inputs_and_outputs() -> None:
    federation = World(ALIKE).federation
    with raises_invalid("query", "gossip", "one of predict_logits, tell"):
        federation.query("gossip")
    with raises_invalid("tensors of query predict_logits", ["y"]):
        federation.query("predict_logits", y=image())
    with raises_invalid("tensors of query predict_logits", []):
        federation.query("predict_logits")
    with raises_invalid("response", "sizes", "one of size"):
        federation.query("tell")["sizes"]


# --- repeated and refused queries ----------------------------------------------------------------


@ENGINES
def test_repeated_query_number_returns_stored_response(stacked: bool) -> None:
    world = World(stacked=stacked)
    first = world.federation.query("predict_logits", x=image())
    calls, critics, audit = world.calls, world.critics(), world.audit.traffic_totals()
    again = world.federation.query("predict_logits", number=first.number, x=image())
    assert all(torch.equal(first[name], again[name]) for name in ("logits", "critic"))
    assert world.calls == calls
    assert all(torch.equal(p, q) for p, q in zip(critics, world.critics(), strict=True))
    assert world.audit.traffic_totals() == audit
    x = image()
    responses = world.federation.query("predict_logits", number=first.number, x=x)
    (grad,) = torch.autograd.grad(loss_of(responses), x)  # and gradients still pass through it
    y = image()
    close(grad, torch.autograd.grad(loss_of(world.plain(y)), y)[0])
    with pytest.raises(QueryMismatch):
        world.federation.query("predict_logits", number=first.number, x=image(1))


@ENGINES
@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (PolicyConfig(queries=("tell",)), "queries: tell"),
        (PolicyConfig(max_queries=1), "max_queries: 1"),
        (PolicyConfig(max_bytes=4), "max_bytes: 4 bytes"),
        (PolicyConfig(max_rows=B - 1), f"max_rows: {B - 1}, and x has {B}"),
    ],
)
def test_refusal_names_node_query_and_rule(policy: PolicyConfig, rule: str, stacked: bool) -> None:
    world = World(ALIKE, stacked=stacked, policies={"n0": policy})
    world.federation.query("tell")
    before, audit = world.critics(), world.audit.traffic_totals()
    with pytest.raises(QueryRefused) as caught:
        world.federation.query("predict_logits", x=image())
    error = caught.value
    assert (error.node, error.query, error.rule) == ("n0", "predict_logits", rule)
    assert world.calls == 0
    assert all(torch.equal(p, q) for p, q in zip(before, world.critics(), strict=True))
    assert world.audit.traffic_totals() == audit


@ENGINES
def test_all_releases_of_a_query_are_charged_before_the_first_is_handed_over(
    stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, charged = World(stacked=stacked), []
    hand_over = ReleaseLedger.hand_over

    def watched(ledger: ReleaseLedger, release: Release, tensors: Tensors) -> Tensors:
        charged.append((release.part, sum(1 for _ in world.audit.entries())))
        return hand_over(ledger, release, tensors)

    monkeypatch.setattr(ReleaseLedger, "hand_over", watched)
    loss_of(world.federation.query("predict_logits", x=image())).backward()
    k = len(world.nodes)
    assert charged == [("response", k)] * k + [("gradient", 2 * k)] * k


def test_refused_release_charges_no_node_and_hands_over_none() -> None:
    """The last node is refused, as its limit depends on the response."""
    world = World(ALIKE, policies={"n2": PolicyConfig(max_bytes=20)})
    with raises_refused("max_bytes: 20", query="predict_logits", node="n2"):
        world.federation.query("predict_logits", x=image())
    assert world.calls
    assert list(world.audit.entries()) == []
    assert world.audit.spending("n0", ALL_RUNS).total_bytes == 0


def test_check_policies_reports_later_refusals() -> None:
    world = World(ALIKE, policies={"n1": PolicyConfig(queries=("tell",))})
    world.federation.exclude_refusing_nodes(["tell"])
    with raises_refused("queries: tell", query="predict_logits", node="n1"):
        world.federation.exclude_refusing_nodes(["tell", "predict_logits"])
    assert world.federation.objections(world.federation.queries["predict_logits"]) == {"n1": "queries: tell"}
    policies = {"n0": PolicyConfig(queries=("predict_logits",)), "n1": PolicyConfig(queries=("none",))}
    with pytest.raises(QueryRefused) as caught:
        World(ALIKE, policies=policies).federation.exclude_refusing_nodes(["tell", "predict_logits"])
    assert str(caught.value) == (
        "node 'n0' refuses query 'tell' by rule queries: predict_logits; "
        "node 'n1' refuses queries 'tell', 'predict_logits' by rule queries: none"
    )
    assert world.calls == 0
    assert world.audit.traffic_totals() == AuditLog().traffic_totals()


@pytest.mark.parametrize("limit", [2, 3])
def test_check_policies_reports_query_limits(limit: int) -> None:
    world = World(ALIKE, policies=dict.fromkeys(("n0", "n1"), PolicyConfig(max_queries=limit)))
    queries = {
        name: dataclasses.replace(query, times=times)
        for (name, query), times in zip(world.federation.queries.items(), (2, 1), strict=True)
    }
    side = NodeSide(queries, setting=SETTING)
    federation = InProcess(world.nodes, world.groups, side, Compute())
    assert federation.query_limits() == {"n0": limit, "n1": limit}
    if limit == 3:
        federation.exclude_refusing_nodes(["predict_logits", "tell"])
        return
    rule = f"max_queries: {limit}, and the run asks 3"
    message = f"nodes 'n0', 'n1' refuse query 'predict_logits, tell' by rule {rule}"
    with pytest.raises(QueryRefused, match=message):
        federation.exclude_refusing_nodes(["predict_logits", "tell"])
    assert world.audit.traffic_totals() == AuditLog().traffic_totals()


def test_output_independent_of_input_has_zero_gradient() -> None:
    world = World(ALIKE)

    def rate(node: NodeView, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        own = node.separately(lambda node: torch.tensor(float(node.name[1:])))
        return {"logits": node.model(x), "rate": own}

    query = Query(
        rate,
        sends={"x": "inputs"},
        releases={"logits": "logits", "rate": "critic"},
        differentiable=("x",),
        stackable=True,
        name="rate",
    )
    side = NodeSide({"rate": query}, setting=SETTING)
    federation = InProcess(world.nodes, group_nodes(world.nodes, True), side, Compute())
    x = image()
    responses = federation.query("rate", x=x)
    (grad,) = torch.autograd.grad((responses["logits"] * responses["rate"].view(3, 1, 1)).sum(), x)
    y = image()
    weighted = world.plain(y)["logits"] * torch.arange(3.0).view(3, 1, 1)
    close(grad, torch.autograd.grad(weighted.sum(), y)[0])


def test_custom_module_can_be_node_model() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x.mean((1, 2, 3)), x.amax((1, 2, 3)), x.amin((1, 2, 3))], 1)

    world = World(ALIKE)
    world.nodes[1].modules["model"] = Odd()
    groups = group_nodes(world.nodes, True)
    assert [len(group) for group in groups] == [2, 1]
    federation = InProcess(
        world.nodes, groups, NodeSide(world.federation.queries, setting=SETTING), Compute()
    )  # type: ignore[arg-type,list-item]
    x = image()
    (grad,) = torch.autograd.grad(loss_of(federation.query("predict_logits", x=x)), x)
    y = image()
    close(grad, torch.autograd.grad(loss_of(world.plain(y)), y)[0])
