"""Steps that are recorded and replayed: by a stand-in for a GPU's graphs, and on a GPU where one is."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core import cuda_graphs as recorded_module
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.cuda_graphs import (
    WARMUP_CALLS,
    CudaGraphStep,
    StaticBuffers,
    make_capturable,
    uses_global_rng,
)
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.federation.inprocess import InProcess, group_nodes
from fedstill.methods._server import Server
from fedstill.methods.fediod import FedIOD
from fedstill.models import build
from fedstill.models.module_utils import to_vector
from fedstill.node import local_training, query_handlers
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.local_training import MIN_STEPS_TO_CAPTURE, make_optimizers, train
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, set_lr
from fedstill.protocol.queries import NodeSetting, Query
from fedstill.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, TASK = (1, 8, 8), Classification(3)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Rerun:
    """Records by keeping the function: a replay runs it again, and puts what it gives where it was at first.

    Recording leaves memory as it was, as a graph's does.
    """

    def __init__(self, lies: Callable[[], Iterator[torch.Tensor]]) -> None:
        self.lies, self.recorded = lies, 0

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, work: Callable[[], Mapping[str, torch.Tensor]]) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        before = [each.detach().clone() for each in self.lies()]
        told = dict(work())
        with torch.no_grad():
            for each, was in zip(self.lies(), before, strict=True):
                each.copy_(was)

        def replay() -> None:
            with torch.enable_grad():
                found = work()
            for name, each in found.items():
                told[name].detach().copy_(each.detach())

        return told, replay


class Fit:
    """A linear layer that learns by steps, recorded or not."""

    def __init__(self, recorded: bool) -> None:
        self.net = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter, value in zip(self.net.parameters(), (0.3, -0.2), strict=True):
                parameter.fill_(value)
        self.adam = torch.optim.Adam(self.net.parameters(), 0.1, fused=True)
        self.capture = Rerun(StaticBuffers([self.net], [self.adam]))
        if recorded:
            for group in self.adam.param_groups:  # as recordable does on a GPU
                group["lr"] = torch.tensor(0.1)
            self.again: Any = CudaGraphStep(self.step, StaticBuffers([self.net], [self.adam]), self.capture)
        else:
            self.again = self.step

    def step(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.net(x).square().mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return {"loss": loss.detach()}

    def run(self, count: int, rows: int = 4) -> list[float]:
        losses = []
        for turn in range(count):
            set_lr(self.adam, 0.1 / (turn + 1))
            x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(turn))
            losses.append(float(self.again(x=x)["loss"]))
        return losses


def test_captured_step_equals_eager_step_and_follows_learning_rate() -> None:
    plain, recorded = Fit(False), Fit(True)
    assert recorded.run(9) == pytest.approx(plain.run(9), rel=1e-6)
    torch.testing.assert_close(list(recorded.net.parameters()), list(plain.net.parameters()))
    assert recorded.capture.recorded == 1


@pytest.mark.parametrize("moved", ["weights", "rows"])
def test_recaptures_if_memory_moves_or_shapes_change(moved: str) -> None:
    fit = Fit(True)
    fit.run(9)
    if moved == "weights":
        fit.net.weight.data = fit.net.weight.data.clone()
    losses = fit.run(WARMUP_CALLS, rows=5 if moved == "rows" else 4)
    assert fit.capture.recorded == 1, "first it is computed as it stands"
    losses += fit.run(1, rows=5 if moved == "rows" else 4)
    assert fit.capture.recorded == 2
    assert len(losses) == WARMUP_CALLS + 1


def test_outputs_are_not_overwritten_by_next_call() -> None:
    fit = Fit(True)
    fit.run(6)
    x = torch.ones(4, 3)
    first = fit.again(x=x)["loss"]
    value = float(first)
    fit.again(x=2 * x)
    assert float(first) == value


def doubled() -> CudaGraphStep:
    """2 x + 1, whose way back needs nothing of the way forth, so that the stand-in can run it again."""
    return CudaGraphStep(lambda x: {"y": x + x + 1, "n": x.detach().sum()}, tuple, Rerun(lambda: iter(())))


def test_backward_works_for_last_call_only() -> None:
    recorded = doubled()
    for turn in range(WARMUP_CALLS + 3):
        x = torch.full((2,), float(turn), requires_grad=True)
        found = recorded(x=x)
        assert found["y"].tolist() == [2.0 * turn + 1] * 2
        pull = torch.tensor([1.0, 10.0]) * (turn + 1)
        (gradient,) = torch.autograd.grad(found["y"], x, pull)
        torch.testing.assert_close(gradient, 2 * pull)
        assert not found["n"].requires_grad
    first, x = recorded(x=x)["y"], x
    recorded(x=x)
    with pytest.raises(RuntimeError, match="before it is done once more"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("how", ["no_grad", "no input with gradients"])
def test_requires_grad_is_part_of_signature(how: str) -> None:
    recorded, x = doubled(), torch.ones(2, requires_grad=True)
    for _ in range(WARMUP_CALLS + 2):
        with torch.set_grad_enabled(how != "no_grad"):
            assert not recorded(x=x.detach() if how != "no_grad" else x)["y"].requires_grad
    for _ in range(WARMUP_CALLS + 2):
        (gradient,) = torch.autograd.grad(recorded(x=x)["y"].sum(), x)
        assert gradient.tolist() == [2.0, 2.0]


def test_uncapturable_step_runs_eagerly_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Refuse(Rerun):
        def __call__(self, work: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    recorded_module._warn.cache_clear()
    for _ in range(2):  # nodes
        recorded = CudaGraphStep(lambda x: {"y": 2 * x}, tuple, Refuse(lambda: iter(())))
        for turn in range(WARMUP_CALLS + 3):
            assert recorded(x=torch.full((2,), float(turn)))["y"].tolist() == [2.0 * turn] * 2
    (record,) = caplog.records
    told = "a step is not recorded on the GPU, and takes longer: operation not permitted when stream is"
    assert record.getMessage() == f"{told} capturing"


def test_out_of_memory_in_backward_capture_resets_step() -> None:
    class Full(Rerun):
        def __call__(self, work: Any) -> Any:
            if self.recorded:
                raise torch.cuda.OutOfMemoryError("out of memory")
            return super().__call__(work)

    recorded = CudaGraphStep(lambda x: {"y": 2 * x}, tuple, Full(lambda: iter(())))
    x = torch.ones(2, requires_grad=True)
    for _ in range(WARMUP_CALLS):
        recorded(x=x)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        recorded(x=x)
    assert recorded(x=x)["y"].requires_grad


def test_backward_uses_precision_of_forward() -> None:
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, pull: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return pull

    recorded = CudaGraphStep(lambda x: {"y": Looks.apply(x)}, tuple, Rerun(lambda: iter(())))
    for _ in range(WARMUP_CALLS + 1):
        x = torch.ones(2, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = recorded(x=x)["y"]
        torch.autograd.grad(found.sum(), x)
    assert len(seen) >= WARMUP_CALLS + 1
    assert not any(seen)


def test_random_layers_are_never_captured() -> None:
    assert uses_global_rng(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    assert not uses_global_rng(nn.Linear(2, 2))
    assert not Compute(EngineConfig()).uses_cuda_graphs(nn.Linear(2, 2)), "there is no launching on a CPU"


def test_set_lr_fills_learning_rate_tensor() -> None:
    adam = torch.optim.Adam(nn.Linear(2, 2).parameters(), 0.5, fused=True)
    make_capturable(adam)
    rate = adam.param_groups[0]["lr"]
    set_lr(adam, 0.25)
    assert adam.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25
    make_capturable(adam)
    assert adam.param_groups[0]["lr"] is rate, "a graph reads that one"


# --- where steps are recorded: here as a GPU would, with the stand-in ---------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compute]:
    """A compute of the CPU that records."""

    def recorded(work: Any, lies: Any, capture: Any = None) -> CudaGraphStep:
        return CudaGraphStep(work, lies, Rerun(lies))

    for module in (local_training, query_handlers):
        monkeypatch.setattr(module, "Recorded", recorded)
    compute = Compute(EngineConfig("one-by-one"))
    monkeypatch.setattr(compute, "uses_cuda_graphs", lambda *modules: True, raising=False)
    return compute


def test_captured_training_follows_learning_rate_and_batches(as_on_a_gpu: Compute) -> None:
    plain, told = trained(Compute(EngineConfig("one-by-one")), "mlp:8", "sgd")
    nodes, losses = trained(as_on_a_gpu, "mlp:8", "sgd")
    torch.testing.assert_close(losses, told)
    for node, other in zip(nodes, plain, strict=True):
        torch.testing.assert_close(list(node.model.parameters()), list(other.model.parameters()))


def test_node_copy_with_other_network_captures_its_own_steps(as_on_a_gpu: Compute) -> None:
    """As PATE's teachers are: one's step on another's records would void what a vote is charged for."""
    local = LocalConfig(epochs=0, least_steps=MIN_STEPS_TO_CAPTURE, batch=8, optimizer="sgd", lr=0.01)
    (node,) = nodes_of(as_on_a_gpu, "mlp:8", 1)
    other = copy.copy(node)
    other.modules, other.optimizers = {"model": build("mlp:8", SHAPE, 3, 0, "other")}, {}
    make_optimizers([node, other], local)
    train([node], TASK, local, as_on_a_gpu, steps=10)
    before = [to_vector(each.model) for each in (node, other)]
    train([other], TASK, local, as_on_a_gpu, steps=10)
    assert torch.equal(to_vector(node.model), before[0])
    assert not torch.equal(to_vector(other.model), before[1])


@pytest.mark.parametrize("importance", ["counts", "fakeness"])
def test_captured_responses_follow_random_inputs_and_learning_rates(
    as_on_a_gpu: Compute, importance: Any
) -> None:
    """Without gradients to the server, which the stand-in cannot pull back twice."""
    options = {"importance": importance, "critic_schedule": "cosine", "through": False}
    plain, networks = distilled(Compute(EngineConfig("one-by-one")), **options)
    losses, others = distilled(as_on_a_gpu, **options)
    torch.testing.assert_close(losses, plain)
    torch.testing.assert_close(others, networks)


class Annealed(FedIOD):
    """A researcher's own, whose helper goes by the query's number."""

    def rating(self, nodes: Any, x: torch.Tensor) -> Any:
        numbers.append(nodes.number)
        return {}


numbers: list[int] = []


def test_subclass_is_not_captured_and_its_helpers_see_each_query(as_on_a_gpu: Compute) -> None:
    numbers.clear()
    distilled(as_on_a_gpu, kind=Annealed)
    assert len({*numbers}) == 8


def test_query_with_values_cannot_be_captured() -> None:
    asked = {"sends": {"x": "inputs", "v": "schedule"}, "releases": {"z": "logits"}}
    with pytest.raises(ArgumentError, match="records"):
        Query("ask", lambda group, number: {}, capturable=True, **asked)  # type: ignore[arg-type]


# --- on a GPU --------------------------------------------------------------------------------------


def gpu(graphs: bool) -> Compute:
    torch.backends.cudnn.allow_tf32 = False
    return Compute(EngineConfig("one-by-one", "cuda", "float32", cuda_graphs=graphs))


def nodes_of(compute: Compute, spec: str | None, count: int = 3, rows: int = 24) -> list[Node]:
    nodes = []
    for index in range(count):
        draw = torch.Generator().manual_seed(index)
        data = TensorData(
            torch.randn(rows, *SHAPE, generator=draw), torch.randint(3, (rows,), generator=draw)
        )
        network = build(spec, SHAPE, 3, 0, index) if spec else nn.Sequential(nn.Flatten(), Looks())
        gate = Gate(f"n{index}", PolicyConfig(), AuditLog())
        nodes.append(Node(f"n{index}", data.to(compute.device), compute.to_device(network), gate, 0))
    return nodes


class Looks(nn.Module):
    """A network that branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) if x.sum().item() > 0 else -self.out(x)


def trained(compute: Compute, spec: str | None, optimizer: Any, chunk: int = 20) -> tuple[list[Node], Any]:
    """Nodes after some more steps than repay recording, a few at a time, one node's after another's."""
    local = LocalConfig(
        epochs=0, least_steps=MIN_STEPS_TO_CAPTURE + 10, batch=8, optimizer=optimizer, lr=0.01
    )
    nodes, losses = nodes_of(compute, spec), []
    make_optimizers(nodes, local)
    for start in range(0, MIN_STEPS_TO_CAPTURE + 10, chunk):
        for node in nodes:
            train(
                [node],
                TASK,
                local,
                compute,
                start=start,
                steps=chunk,
                report=lambda *told: losses.append(told[2]),
            )
    return nodes, torch.cat(losses)


@on_gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("spec", ["resnet8:4", "mlp:8"])
def test_captured_local_training_equals_eager_training(spec: str, optimizer: str) -> None:
    plain, told = trained(gpu(False), spec, optimizer)
    nodes, losses = trained(gpu(True), spec, optimizer)
    torch.testing.assert_close(losses, told, rtol=1e-3, atol=1e-4)
    for node, other in zip(nodes, plain, strict=True):
        torch.testing.assert_close(
            list(node.model.parameters()), list(other.model.parameters()), rtol=1e-3, atol=1e-4
        )
        assert not node.captured_step, "it is over"


@on_gpu
@pytest.mark.parametrize("chunk", [20, MIN_STEPS_TO_CAPTURE + 10])
def test_network_that_reads_values_trains_eagerly(chunk: int, caplog: Any) -> None:
    recorded_module._warn.cache_clear()
    _, told = trained(gpu(False), None, "sgd", chunk)
    _, losses = trained(gpu(True), None, "sgd", chunk)
    torch.testing.assert_close(losses, told, rtol=1e-3, atol=1e-4)
    assert "a step is not recorded on the GPU" in caplog.text


@on_gpu
def test_graphs_are_released_and_new_ones_captured() -> None:
    """One node's after another's, then all anew: memory that recordings share is not lost with the last."""
    compute = gpu(True)
    for _ in range(2):
        trained(compute, "resnet8:4", "sgd", MIN_STEPS_TO_CAPTURE + 10)


def distilled(
    compute: Compute, steps: int = 8, kind: Any = FedIOD, **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    config = kind(
        steps=steps, batch=6, noise=6, generator_width=4, critic_width=4, memory=20, student_steps=2,
        student_batch=8, ensemble="log_probs", **options,
    )  # fmt: skip
    nodes = nodes_of(compute, "resnet8:4")
    for node in nodes:
        node.model.eval().requires_grad_(False)
    side = config.node_side(NodeSetting(TASK, LocalConfig(), compute))
    side.prepare(nodes)
    federation = InProcess(nodes, group_nodes(nodes, False), side, compute)
    student = compute.to_device(build("mlp:8", SHAPE, 3, 0, "student"))
    there = compute if compute.device.type == "cuda" else Compute()  # the stand-in is the nodes' alone
    server = Server(config, federation, student, TASK, SHAPE, (0.5,), (0.5,), there, 0, LocalConfig())
    losses = torch.tensor([list(server.step().values()) for _ in range(steps)])
    critics = [node.modules["critic"].parameters() for node in nodes]
    return losses, [each.detach().cpu() for each in itertools.chain(student.parameters(), *critics)]


@on_gpu
@pytest.mark.parametrize("importance", ["counts", "fakeness"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_captured_distillation_equals_eager_distillation(importance: str, schedule: str) -> None:
    options = {"importance": importance, "critic_schedule": schedule}
    plain, networks = distilled(gpu(False), **options)
    losses, others = distilled(gpu(True), **options)
    torch.testing.assert_close(losses, plain, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(others, networks, rtol=1e-2, atol=2e-3)
