"""``fedstill.check_method``: a valid method passes, and each kind of fault is found and named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch

import fedstill
from fedstill.core.errors import MethodCheckError
from fedstill.methods import (
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    Server,
    Span,
    SpanOfRound,
    adam,
    descend,
    payload_kinds,
    torch_generator,
)
from fedstill.methods.column_sums import ColumnSums
from tests.support.errors import raises_invalid


class Memory:
    """Numbers in a state."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.numbers = list(state["numbers"])


class Forgetful(Memory):
    """Restores all numbers but the last."""

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.numbers = list(state["numbers"])[:-1]


@dataclass
class State:
    optimizer: torch.optim.Optimizer
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, kw_only=True)
class Distills(Method):
    """The student trains on the mean of the nodes' logits for public inputs."""

    title: ClassVar[str] = "Distills"
    initial_training: ClassVar[None] = None

    rounds: int = 3

    def needs(self) -> Needs:
        return Needs(public=True, trainable=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.learn,
            sends={"rows": payload_kinds.INDICES, "round": payload_kinds.SCHEDULE},
            releases={"logits": payload_kinds.LOGITS},
            times=self.rounds,
            rows=8,
            depends_on_records=(),
            span=SpanOfRound(self.rounds),
            stackable=True,
        )

    def learn(self, node: NodeView, rows: torch.Tensor, round: int) -> Mapping[str, torch.Tensor]:
        node.train(Span.part(round, self.rounds))
        return {"logits": node.model(node.public.inputs[rows])}

    def init_state(self, server: Server) -> State:
        return State(adam(server.student, 1e-2))

    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        rows = torch.randperm(len(server.public), generator=torch_generator(server.seed, "rows", t))[:8]
        z = server.query("learn", rows=rows, round=t)["logits"].mean(0)
        loss = (server.student(server.public.inputs[rows]) - z).square().mean()
        descend(state.optimizer, loss)
        state.memory.numbers.append(loss.item())
        return {"loss": sum(state.memory.numbers)}


class Breaks(Distills):
    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        return {"loss": super().step(server, state, t)["no such loss"]}


class NoLosses(Distills):
    def step(self, server: Server, state: State, t: int) -> Any:
        super().step(server, state, t)


class GradientIsLost(Distills):
    """The query is not differentiable in its inputs, although these require gradients."""

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        sends = {"x": payload_kinds.INPUTS}
        yield Query(self.see, sends=sends, releases={"logits": payload_kinds.LOGITS}, depends_on_records=())

    def see(self, node: NodeView, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"logits": node.model(x)}

    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        x = server.public.inputs[:4].clone().requires_grad_() if server.public else None
        return {"loss": float(server.query("see", x=x)["logits"].sum())}


class NoNumber(Distills):
    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        return {"loss": float("nan")} | {"other": super().step(server, state, t)["loss"]}


class Repeats(Distills):
    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        server.query("learn", rows=torch.arange(3), round=t)
        return super().step(server, state, t)


class NeverSends(Distills):
    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield from super().queries(setting)
        yield Query(self.never, releases={"logits": payload_kinds.LOGITS}, times=1)

    def never(self, node: NodeView) -> Mapping[str, torch.Tensor]:
        return {"logits": node.predict(node.public.inputs)}


class ManyRows(Distills):
    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield from (replace(query, rows=7) for query in super().queries(setting))


class ReadsRecords(Distills):
    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield from (replace(query, stackable=False) for query in super().queries(setting))

    def learn(self, node: NodeView, rows: torch.Tensor, round: int) -> Mapping[str, torch.Tensor]:
        super().learn(node, rows, round)
        return {"logits": node.model(node.data.inputs[: len(rows)])}


class UndeclaredSpan(Distills):
    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield from (replace(query, span=None) for query in super().queries(setting))


class OtherSpan(Distills):
    """Trains the first round's span in each round."""

    def learn(self, node: NodeView, rows: torch.Tensor, round: int) -> Mapping[str, torch.Tensor]:
        return super().learn(node, rows, 0)


class SpanTwice(Distills):
    def learn(self, node: NodeView, rows: torch.Tensor, round: int) -> Mapping[str, torch.Tensor]:
        node.train(Span.part(round, self.rounds))
        return super().learn(node, rows, round)


class SpanWithoutTraining(Distills):
    def learn(self, node: NodeView, rows: torch.Tensor, round: int) -> Mapping[str, torch.Tensor]:
        return {"logits": node.model(node.public.inputs[rows])}


class OtherNodesWeights(Distills):
    """Reads a single node's parameters, which a stacked call does not have."""

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield from (replace(query) for query in super().queries(setting))

    def learn(self, node: NodeView, rows: torch.Tensor, round: int) -> Mapping[str, torch.Tensor]:
        z = super().learn(node, rows, round)["logits"]
        first = next(node.model.structure.parameters())
        return {"logits": z + first.detach().sum()}


class GlobalRandomness(Distills):
    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        state.memory.numbers.append(torch.rand(()).item())
        return super().step(server, state, t)


class Forgets(Distills):
    def init_state(self, server: Server) -> State:
        return State(adam(server.student, 1e-2), Forgetful())


class KeepsOutside(Distills):
    """Counts outside of the state."""

    def step(self, server: Any, state: State, t: int) -> Mapping[str, float]:
        server.mine = getattr(server, "mine", 0.0) + 1.0
        return super().step(server, state, t) | {"mine": server.mine}


class UsesLabels(Distills):
    def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
        known = 0.0 if server.public is None or server.public.labels is None else 1.0
        return super().step(server, state, t) | {"known": known}


def declared(kind: type[Distills]) -> Distills:
    made: Distills = dataclass(frozen=True, kw_only=True)(kind)()
    return made


def test_correct_method_passes() -> None:
    fedstill.check_method(Distills(rounds=3))
    fedstill.check_method(Distills)
    fedstill.check_method(Distills(rounds=1))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "check", "reason"),
    [
        (Breaks, "run", "KeyError"),
        (NoLosses, "run", "losses by name"),
        (GradientIsLost, "run", "x.detach(), or differentiable=('x',)"),
        (NoNumber, "run", "loss 'loss' of step 0 is None"),
        (Repeats, "times", "learn was sent 6 times"),
        (NeverSends, "times", "never was never sent"),
        (ManyRows, "rows", "about 8 inputs"),
        (UndeclaredSpan, "span", "trains Span(start=0, stop=1, parts=3)"),
        (OtherSpan, "span", "trains Span(start=0, stop=1, parts=3)"),
        (SpanTwice, "span", "trains Span(start=0, stop=1, parts=3), Span(start=0, stop=1, parts=3)"),
        (SpanWithoutTraining, "span", "trains nothing"),
        (ReadsRecords, "records", "learn reads the node's records"),
        (OtherNodesWeights, "stacked", "differ by"),
        (GlobalRandomness, "determinism", "losses"),
        (Forgets, "state", "memory.numbers"),
        (KeepsOutside, "resume", "losses"),
        (UsesLabels, "public labels", "losses"),
    ],
)
def test_each_fault_is_named(kind: type[Distills], check: str, reason: str) -> None:
    with pytest.raises(MethodCheckError, match=check) as caught:
        fedstill.check_method(declared(kind))
    assert reason in caught.value.faults[check], caught.value.faults
    assert caught.value.method == "Distills"
    assert "\n" not in str(caught.value)
    # Comparisons of runs also find methods that lose state or sample other numbers.
    alone = kind not in (Forgets, GlobalRandomness)
    assert not alone or caught.value.faults.keys() == {check}, caught.value.faults


def test_error_in_a_method_names_its_line() -> None:
    class Fails(Distills):
        def step(self, server: Server, state: State, t: int) -> Mapping[str, float]:
            raise RuntimeError("no such thing")

    line = Fails.step.__code__.co_firstlineno + 1
    with pytest.raises(MethodCheckError, match=f"no such thing.*test_method_check.py, line {line}"):
        fedstill.check_method(declared(Fails))


def test_method_of_other_data_needs_a_setting() -> None:
    with raises_invalid("make_setting", None, "rows of a table"):
        fedstill.check_method(ColumnSums())
