"""A request handler answers each query once, backpropagates, and releases through the nodes' gates."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import NodeFault, QueryMismatch, QueryRefused
from fedstill.node import exchanges
from fedstill.node.audit_entries import ALL_RUNS, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.node.exchanges import MAX_EXCHANGES
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.node.request_handler import RequestHandler
from fedstill.node.run_budgets import RunBudgets
from fedstill.privacy.dpsgd import DPParameters
from fedstill.privacy.noise import seeded_sampler
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.node_side import NodeSetting, NodeSide
from fedstill.protocol.queries import Query
from fedstill.tasks.classification import Classification
from tests.support.node_services import Journal
from tests.support.request_handlers import backward, respond

Tensors = Mapping[str, torch.Tensor]
B = 2
X = torch.randn(B, 1, 4, 4, generator=torch.Generator().manual_seed(0))


class Office:
    """Three nodes behind one handler; its query trains each node's critic by one step."""

    def __init__(self, policies: Mapping[str, PolicyConfig] | None = None) -> None:
        self.audit, self.calls, self.grad_enabled = AuditLog(), 0, False
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.nodes = [self._node(name, (policies or {}).get(name, PolicyConfig())) for name in "abc"]
        queries = (
            Query(
                self._examine,
                sends={"x": "inputs"},
                releases={"logits": "logits", "score": "critic"},
                differentiable=("x",),
                name="predict_logits",
            ),
            Query(self._leak, releases={"logits": "logits"}, name="leak"),
            Query(
                self._two,
                sends={"x": "inputs", "y": "inputs"},
                releases={"logits": "logits"},
                differentiable=("x", "y"),
                name="two",
            ),
        )
        self.side = NodeSide(
            {query.name: query for query in queries},
            setting=NodeSetting(Classification(3), LocalConfig(), Compute()),
        )
        self.handler = RequestHandler(NodeGroup(self.nodes), self.side, Compute())

    def _node(self, name: str, policy: PolicyConfig) -> Node:
        torch.manual_seed(ord(name))
        model, critic = (nn.Sequential(nn.Flatten(), nn.Linear(16, size)).eval() for size in (3, 1))
        data = TensorData(torch.randn(5, 1, 4, 4), torch.zeros(5, dtype=torch.int64))
        node = Node(name, data, model, Gate(name, policy, self.audit), 0)
        node.add_module("critic", critic, lambda module: torch.optim.SGD(module.parameters(), 0.1))
        return node

    def _examine(self, node: NodeView, x: torch.Tensor) -> Tensors:
        self.calls += 1  # once for each node
        self.grad_enabled = torch.is_grad_enabled()
        critic, (own,) = node.module("critic"), [each for each in self.nodes if each.name == node.name]
        with torch.enable_grad():
            critic.train(True)
            own.optimizers["critic"].zero_grad()
            node.network("critic")(x.detach()).mean().backward()
            own.optimizers["critic"].step()  # stands for a private step
            critic.train(False)
        node.model.train(False)
        z = node.model(x)
        self.outputs = [*self.outputs[1 - len(self.nodes) :], weakref.ref(z)]  # the sine's graph keeps z
        return {"logits": z.sin(), "score": critic(x)}

    def _leak(self, node: NodeView) -> Tensors:
        return {"logits": torch.ones(1), "diary": torch.ones(1)}

    def _two(self, node: NodeView, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return {"logits": node.model(x) + 2 * node.model(x * y)}

    def query(
        self, number: int = 0, x: torch.Tensor = X, *, name: str = "predict_logits", grad: bool = True
    ) -> Any:
        return respond(self.handler, name, number, {"x": x}, grad)

    def node_gradients(self, output_gradients: Sequence[Mapping[str, torch.Tensor]], number: int = 0) -> Any:
        names = [node.name for node in self.nodes]
        return list(backward(self.handler, number, dict(zip(names, output_gradients, strict=True))).values())

    def restart(self) -> None:
        """Expect query 0 next, with a new handler."""
        for node in self.nodes:
            node.gate.ledger.restart()
        self.handler = RequestHandler(self.handler.group, self.side, Compute())

    def critics(self) -> list[torch.Tensor]:
        return [p.detach().clone() for node in self.nodes for p in node.modules["critic"].parameters()]

    def has_changed_since(self, critics: list[torch.Tensor]) -> bool:
        return any((p != q).any() for p, q in zip(critics, self.critics(), strict=True))


def output_gradients(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"logits": torch.randn(B, 3, generator=generator), "score": torch.randn(B, 1, generator=generator)}
        for _ in "abc"
    ]


def same(some: Sequence[Mapping[str, torch.Tensor]], others: Sequence[Mapping[str, torch.Tensor]]) -> bool:
    return all(
        set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(some, others, strict=True)
    )


# --- queries -------------------------------------------------------------------------------------


def test_response_has_one_part_per_node_and_trains_critic() -> None:
    office = Office()
    before = office.critics()
    responses = office.query()
    assert office.has_changed_since(before)
    for node, response in zip(office.nodes, responses, strict=True):
        torch.testing.assert_close(response["logits"], node.model(X).sin())
        torch.testing.assert_close(response["score"], node.modules["critic"](X))
        assert not response["logits"].requires_grad


def failing(office: Office, number: int = 0, **change: Any) -> None:
    """Make a query fail once, after it has trained its networks."""
    queries: Any = office.side.queries
    sound = queries["predict_logits"]

    def function(node: NodeView, **tensors: torch.Tensor) -> Any:
        sound.function(node, **tensors)
        raise RuntimeError("out of memory")

    queries["predict_logits"] = replace(sound, function=function, **change)
    with pytest.raises(RuntimeError, match="out of memory"):
        office.query(number)
    queries["predict_logits"] = replace(sound, **change)


def privately(office: Office) -> None:
    """Make the critic of the second node train with DP-SGD."""
    node, journal = office.nodes[1], Journal()
    node.dp_sgd_parameters = {"critic": DPParameters(1.0, 1.0, lambda *names: seeded_sampler(0, *names))}
    journal.node = node.name
    node.gate.ledger.budgets = RunBudgets(journal, office.audit, "run", node.name)  # type: ignore[arg-type]


def learning_privately() -> Office:
    """Return an office with a handler of the one node whose critic trains with DP-SGD."""
    office = Office()
    privately(office)
    office.handler = RequestHandler(NodeGroup(office.nodes[1:2]), office.side, Compute())
    return office


@pytest.mark.parametrize("change", [{"trains": ("critic",)}, {"span": lambda sent: Span(0, 1, 4)}])
def test_failed_private_training_blocks_handler(change: Any) -> None:
    office = learning_privately()
    office.query(0)
    failing(office, 1, **change)
    calls, critics = office.calls, office.critics()
    for number, name, tensors in (
        (1, "predict_logits", {"x": X}),
        (2, "predict_logits", {"x": X}),
        (3, "leak", {}),
    ):
        with pytest.raises(NodeFault, match=r"query 1 \(predict_logits\)"):
            respond(office.handler, name, number, tensors, True)
    with pytest.raises(NodeFault, match="query 1"):
        backward(office.handler, 0, {"b": output_gradients()[1]})
    assert office.calls == calls
    assert not office.has_changed_since(critics)
    assert office.audit.spending("b", ALL_RUNS).total_queries == 1
    office.restart()  # as after restoring a checkpoint
    assert len(office.query(1)) == 1


@pytest.mark.parametrize(
    ("private", "change"), [(False, {"trains": ("critic",)}), (True, {}), (True, {"trains": ()})]
)
def test_failed_query_without_private_training_can_be_repeated(private: bool, change: Any) -> None:
    office = Office()
    if private:
        privately(office)
    failing(office, **change)
    assert len(office.query()) == 3


def test_response_after_failure_has_another_history() -> None:
    """With an equal history it would be the same release as before, which limits count once."""
    office = Office()
    states = [copy.deepcopy(node.state_dict()) for node in office.nodes]
    first = office.query(1)
    for node, state in zip(office.nodes, states, strict=True):
        node.load_state_dict(state)
    office.restart()
    failing(office)
    assert not same(office.query(1), first)
    assert office.audit.spending("b", ALL_RUNS).total_queries == 2


def test_forgotten_or_skipped_number_is_a_mismatch() -> None:
    office = Office()
    numbers = [0, *range(2, MAX_EXCHANGES + 3)]
    for number in numbers:
        office.query(number)
    critics = office.critics()
    # query 0 is no longer stored, query 1 was never sent; neither may train the critic now
    for number in (0, 1):
        with pytest.raises(QueryMismatch, match=f"number {number}"):
            office.query(number)
    for number in numbers[-MAX_EXCHANGES:]:
        office.query(number)
    assert office.calls == 3 * len(numbers)
    assert not office.has_changed_since(critics)


@pytest.mark.parametrize("refusing", ["a", "c"])
def test_one_refusal_stops_whole_group(refusing: str) -> None:
    office = Office({refusing: PolicyConfig(queries=("count",))})
    before = office.critics()
    with pytest.raises(QueryRefused) as caught:
        office.query()
    error = caught.value
    assert (error.node, error.query, error.rule) == (refusing, "predict_logits", "queries: count")
    assert office.calls == 0
    assert not office.has_changed_since(before)
    assert office.audit.traffic_totals() == AuditLog().traffic_totals()


# --- gradients -----------------------------------------------------------------------------------


def test_gradients_of_several_inputs_have_own_names() -> None:
    office = Office()
    y = X.flip(0)
    respond(office.handler, "two", 0, {"x": X, "y": y}, True)
    given = [{"logits": torch.ones(B, 3)}] * 3
    released = list(backward(office.handler, 0, dict(zip("abc", given, strict=True))).values())
    model = copy.deepcopy(office.nodes[1].model)
    x, y = X.clone().requires_grad_(), y.clone().requires_grad_()
    expected = torch.autograd.grad((model(x) + 2 * model(x * y)).sum(), (x, y))
    torch.testing.assert_close(released[1]["d/dx"], expected[0])
    torch.testing.assert_close(released[1]["d/dy"], expected[1])


def test_node_without_gradient_releases_none() -> None:
    some, whole = Office(), Office()
    some.query()
    whole.query()
    released = backward(some.handler, 0, {"b": output_gradients()[1]})
    assert list(released) == ["b"]
    assert same([released["b"]], [whole.node_gradients(output_gradients())[1]])


def test_repeated_gradients_are_counted_once() -> None:
    office = Office()
    office.query()
    first = office.node_gradients(output_gradients())
    audit = office.audit.traffic_totals()
    assert same(office.node_gradients(output_gradients()), first)
    office.query(1)  # a lost reply may be requested even later
    respond(office.handler, "two", 2, {"x": X, "y": X}, False)
    assert same(office.node_gradients(output_gradients()), first)
    assert office.audit.traffic_totals()["by_kind"]["gradients"] == audit["by_kind"]["gradients"]


@pytest.mark.parametrize("case", ["never asked", "asked without gradients", "the next one has been asked"])
def test_impossible_gradients_are_a_mismatch(case: str) -> None:
    office = Office()
    if case != "never asked":
        office.query(0, grad=case != "asked without gradients")
    if case == "the next one has been asked":
        office.query(1)
    before = office.audit.traffic_totals()
    with pytest.raises(QueryMismatch):
        office.node_gradients(output_gradients())
    assert office.audit.traffic_totals() == before


def alive(office: Office) -> bool:
    gc.collect()
    return any(output() is not None for output in office.outputs)


def test_without_gradients_no_graph_is_kept() -> None:
    office = Office()
    office.query(grad=False)
    assert not office.grad_enabled
    outputs = [output() for output in office.outputs]
    assert all(output is None or output.grad_fn is None for output in outputs)
    office.query(1, grad=False)
    del outputs
    assert office.outputs


def test_graph_is_kept_until_backward_or_next_query() -> None:
    office = Office()
    office.query(0)
    assert office.grad_enabled
    assert alive(office)
    office.node_gradients(output_gradients())
    assert not alive(office)
    office.query(1)
    outputs = office.outputs
    office.query(2)
    office.outputs = outputs
    assert not alive(office)


# --- a gate that fails ---------------------------------------------------------------------------


class Full(AuditLog):
    """A log on a disk that is full for one node and one part, while ``full`` is set."""

    full: tuple[str, str] | None = None

    def _insert_entry(self, entry: Entry) -> int:
        if (entry.node, entry.part) == self.full:
            raise OSError("no space left on device")
        return super()._insert_entry(entry)


def full(office: Office) -> Full:
    audit = Full()
    office.audit = audit
    for node in office.nodes:
        node.gate.ledger.audit = audit
    return audit


def test_response_that_was_not_charged_can_be_repeated() -> None:
    expected = Office().query()
    office = Office()
    audit = full(office)
    audit.full = ("b", "response")
    with pytest.raises(OSError, match="no space"):
        office.query()
    critics = office.critics()
    assert audit.traffic_totals() == AuditLog().traffic_totals(), "nothing was released, nor charged"
    with pytest.raises(OSError, match="no space"):
        office.query()
    audit.full = None
    assert same(office.query(), expected)
    assert office.calls == 3
    assert not office.has_changed_since(critics), "critics were trained once"
    each = {"up": B * 4 * 4, "down": B * 16 * 4}
    assert audit.traffic_totals()["by_node"] == dict.fromkeys("abc", each)
    assert [audit.spending(name, ALL_RUNS).total_queries for name in "abc"] == [1, 1, 1]
    with pytest.raises(QueryMismatch):
        office.query(0, X + 1)


def test_response_that_was_not_charged_is_lost_after_next_query() -> None:
    """It is not released as an empty response without a charge."""
    office = Office()
    audit = full(office)
    audit.full = ("b", "response")
    with pytest.raises(OSError, match="no space"):
        office.query(0)
    audit.full = None
    office.query(1)
    before = audit.traffic_totals()
    with pytest.raises(QueryMismatch):
        office.query(0)
    assert audit.traffic_totals() == before
    assert [audit.spending(name, ALL_RUNS).total_queries for name in "abc"] == [1, 1, 1]


def test_refused_response_keeps_no_memory_after_next_query() -> None:
    """Otherwise, several large queries that cannot be released anymore could fill the memory."""
    office = Office()
    audit = full(office)
    audit.full = ("a", "response")
    x = X.clone()
    received = weakref.ref(x)
    with pytest.raises(OSError, match="no space"):
        office.query(0, x)
    del x
    audit.full = None
    office.query(1)
    gc.collect()
    assert received() is None


def test_gradients_count_in_memory_of_recent_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "MAX_BYTES", 3 * MAX_EXCHANGES * B * 4 * 4)  # without gradients, all fit
    office = Office()
    office.query(0)
    office.query(1)
    office.node_gradients(output_gradients(), 1)
    assert [office.handler.has_responded(number) for number in (0, 1)] == [True, True]
    office.query(2)
    assert [office.handler.has_responded(number) for number in (0, 1, 2)] == [False, False, True]


def test_gradients_that_were_not_charged_can_be_repeated() -> None:
    whole = Office()
    whole.query()
    expected = whole.node_gradients(output_gradients())
    office = Office()
    audit = full(office)
    office.query()
    audit.full = ("b", "gradient")
    with pytest.raises(OSError, match="no space"):
        office.node_gradients(output_gradients())
    with pytest.raises(QueryMismatch):
        office.node_gradients(output_gradients(1))
    audit.full = None
    assert same(office.node_gradients(output_gradients()), expected)
    assert audit.traffic_totals() == whole.audit.traffic_totals()


# --- a part of a group ---------------------------------------------------------------------------


def test_handlers_of_subgroups_match_whole_group() -> None:
    whole, parted = Office(), Office()
    together = RequestHandler(NodeGroup(parted.nodes), parted.side, Compute())
    whole.query(3)
    respond(together, "predict_logits", 3, {"x": X}, True)
    handlers = [RequestHandler(NodeGroup([node]), parted.side, Compute()) for node in parted.nodes]
    calls = parted.calls
    for handler in handlers:
        for old in (2, 3):
            with pytest.raises(QueryMismatch):
                respond(handler, "predict_logits", old, {"x": X}, False)
    assert parted.calls == calls
    expected = whole.query(4)
    for handler, response in zip(handlers, expected, strict=True):
        (mine,) = respond(handler, "predict_logits", 4, {"x": X}, False)
        for name in response:
            torch.testing.assert_close(mine[name], response[name])
    # the group also finds the tensors that the single nodes' handlers moved in memory
    for old, new in zip(whole.query(5), respond(together, "predict_logits", 5, {"x": X}, False), strict=True):
        for name in old:
            torch.testing.assert_close(new[name], old[name])
