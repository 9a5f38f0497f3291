"""Captured training steps: with CUDA graphs on a GPU, and with a substitute on the CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core import cuda_graphs
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.cuda_graphs import (
    WARMUP_CALLS,
    CudaGraphStep,
    ModelAndOptimizerTensors,
    make_capturable,
    uses_global_rng,
)
from fedstill.core.dataset import TensorData
from fedstill.federation.inprocess import InProcess
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._input_generators import InputGenerator
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods._server import Server
from fedstill.methods.fediod import FedIOD
from fedstill.models import build
from fedstill.models.module_utils import to_vector
from fedstill.node import captured_functions, captured_train_step
from fedstill.node.audit_log import AuditLog
from fedstill.node.captured_train_step import MIN_STEPS_TO_CAPTURE
from fedstill.node.gate import Gate
from fedstill.node.local_training import attach_optimizers, train
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, set_lr
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.queries import Query
from fedstill.runs.simulation import group_nodes
from fedstill.tasks.classification import Classification
from tests.support.small_world import FakeCapture, changed

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, TASK = (1, 8, 8), Classification(3)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class LinearTraining:
    """Linear layer trained by captured or eager steps."""

    def __init__(self, captured: bool) -> None:
        self.net = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter, value in zip(self.net.parameters(), (0.3, -0.2), strict=True):
                parameter.fill_(value)
        self.adam = torch.optim.Adam(self.net.parameters(), 0.1, fused=True)
        self.capture = FakeCapture(ModelAndOptimizerTensors([self.net], [self.adam]))
        if captured:
            for group in self.adam.param_groups:  # like make_capturable on a GPU
                group["lr"] = torch.tensor(0.1)
            self.train_step: Any = CudaGraphStep(
                self.step, ModelAndOptimizerTensors([self.net], [self.adam]), self.capture
            )
        else:
            self.train_step = self.step

    def step(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.net(x).square().mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return {"loss": loss.detach()}

    def run(self, count: int, rows: int = 4) -> list[float]:
        losses = []
        for number in range(count):
            set_lr(self.adam, 0.1 / (number + 1))
            x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(number))
            losses.append(float(self.train_step(x=x)["loss"]))
        return losses


def test_captured_step_equals_eager_step_and_follows_learning_rate() -> None:
    eager, captured = LinearTraining(False), LinearTraining(True)
    assert captured.run(9) == pytest.approx(eager.run(9), rel=1e-6)
    torch.testing.assert_close(list(captured.net.parameters()), list(eager.net.parameters()))
    assert captured.capture.captures == 1


@pytest.mark.parametrize("moved", ["weights", "rows"])
def test_recaptures_if_memory_moves_or_shapes_change(moved: str) -> None:
    training = LinearTraining(True)
    training.run(9)
    if moved == "weights":
        training.net.weight.data = training.net.weight.data.clone()
    losses = training.run(WARMUP_CALLS, rows=5 if moved == "rows" else 4)
    assert training.capture.captures == 1, "captures only after warmup"
    losses += training.run(1, rows=5 if moved == "rows" else 4)
    assert training.capture.captures == 2
    assert len(losses) == WARMUP_CALLS + 1


def test_outputs_are_not_overwritten_by_next_call() -> None:
    training = LinearTraining(True)
    training.run(6)
    x = torch.ones(4, 3)
    first = training.train_step(x=x)["loss"]
    value = float(first)
    training.train_step(x=2 * x)
    assert float(first) == value


def captured_double() -> CudaGraphStep:
    """Return a captured 2 x + 1, whose backward pass saves no tensors, as the substitute requires."""
    return CudaGraphStep(
        lambda x: {"y": x + x + 1, "n": x.detach().sum()}, tuple, FakeCapture(lambda: iter(()))
    )


def test_backward_works_for_last_call_only() -> None:
    captured = captured_double()
    for number in range(WARMUP_CALLS + 3):
        x = torch.full((2,), float(number), requires_grad=True)
        outputs = captured(x=x)
        assert outputs["y"].tolist() == [2.0 * number + 1] * 2
        gradient_y = torch.tensor([1.0, 10.0]) * (number + 1)
        (gradient,) = torch.autograd.grad(outputs["y"], x, gradient_y)
        torch.testing.assert_close(gradient, 2 * gradient_y)
        assert not outputs["n"].requires_grad
    first, x = captured(x=x)["y"], x
    captured(x=x)
    with pytest.raises(RuntimeError, match="before its next call"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("how", ["no_grad", "no input with gradients"])
def test_requires_grad_is_part_of_signature(how: str) -> None:
    captured, x = captured_double(), torch.ones(2, requires_grad=True)
    for _ in range(WARMUP_CALLS + 2):
        with torch.set_grad_enabled(how != "no_grad"):
            assert not captured(x=x.detach() if how != "no_grad" else x)["y"].requires_grad
    for _ in range(WARMUP_CALLS + 2):
        (gradient,) = torch.autograd.grad(captured(x=x)["y"].sum(), x)
        assert gradient.tolist() == [2.0, 2.0]


def test_uncapturable_step_runs_eagerly_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    class FailingCapture(FakeCapture):
        def __call__(self, step: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    cuda_graphs._warn.cache_clear()
    for _ in range(2):  # one iteration per node
        captured = CudaGraphStep(lambda x: {"y": 2 * x}, tuple, FailingCapture(lambda: iter(())))
        for number in range(WARMUP_CALLS + 3):
            assert captured(x=torch.full((2,), float(number)))["y"].tolist() == [2.0 * number] * 2
    (record,) = caplog.records
    assert "operation not permitted when stream is capturing" in record.getMessage()
    assert "and more" not in record.getMessage()


def test_out_of_memory_in_backward_capture_resets_step() -> None:
    class OutOfMemoryCapture(FakeCapture):
        def __call__(self, step: Any) -> Any:
            if self.captures:
                raise torch.cuda.OutOfMemoryError("out of memory")
            return super().__call__(step)

    captured = CudaGraphStep(lambda x: {"y": 2 * x}, tuple, OutOfMemoryCapture(lambda: iter(())))
    x = torch.ones(2, requires_grad=True)
    for _ in range(WARMUP_CALLS):
        captured(x=x)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        captured(x=x)
    assert captured(x=x)["y"].requires_grad


def test_backward_uses_precision_of_forward() -> None:
    autocast_states = []

    class RecordAutocast(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            autocast_states.append(torch.is_autocast_enabled("cpu"))
            return gradient

    captured = CudaGraphStep(lambda x: {"y": RecordAutocast.apply(x)}, tuple, FakeCapture(lambda: iter(())))
    for _ in range(WARMUP_CALLS + 1):
        x = torch.ones(2, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = captured(x=x)["y"]
        torch.autograd.grad(y.sum(), x)
    assert len(autocast_states) >= WARMUP_CALLS + 1
    assert not any(autocast_states)


def test_random_layers_are_never_captured() -> None:
    assert uses_global_rng(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    assert uses_global_rng(nn.FractionalMaxPool2d(2, 3))
    assert not uses_global_rng(nn.Linear(2, 2))
    assert not Compute(EngineConfig()).uses_cuda_graphs(nn.Linear(2, 2)), "no CUDA graphs on a CPU"


def test_set_lr_fills_learning_rate_tensor() -> None:
    adam = torch.optim.Adam(nn.Linear(2, 2).parameters(), 0.5, fused=True)
    make_capturable(adam)
    rate = adam.param_groups[0]["lr"]
    set_lr(adam, 0.25)
    assert adam.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25
    make_capturable(adam)
    assert adam.param_groups[0]["lr"] is rate, "the graph reads this tensor"


# --- callers of captured steps, with the substitute ----------------------------------------


@pytest.fixture
def capturing_compute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compute]:
    """Return a compute object on the CPU that captures steps."""

    def capture(step: Any, static_buffers: Any, capture: Any = None) -> CudaGraphStep:
        return CudaGraphStep(step, static_buffers, FakeCapture(static_buffers))

    for module in (captured_train_step, captured_functions):
        monkeypatch.setattr(module, "CudaGraphStep", capture)
    compute = Compute(EngineConfig(batching="one-by-one"))
    monkeypatch.setattr(compute, "uses_cuda_graphs", lambda *modules: True, raising=False)
    return compute


def test_captured_training_follows_learning_rate_and_batches(capturing_compute: Compute) -> None:
    eager, expected = train_nodes(Compute(EngineConfig(batching="one-by-one")), "mlp:8", "sgd")
    nodes, losses = train_nodes(capturing_compute, "mlp:8", "sgd")
    torch.testing.assert_close(losses, expected)
    for node, other in zip(nodes, eager, strict=True):
        torch.testing.assert_close(list(node.model.parameters()), list(other.model.parameters()))


def test_node_copy_with_other_network_captures_its_own_steps(capturing_compute: Compute) -> None:
    """PATE's teachers are such copies; training one on another's records would break the guarantee."""
    local = LocalConfig(epochs=0, min_steps=MIN_STEPS_TO_CAPTURE, batch=8, optimizer="sgd", lr=0.01)
    (node,) = nodes_of(capturing_compute, "mlp:8", 1)
    other = copy.copy(node)
    other.modules, other.optimizers = {"model": build("mlp:8", SHAPE, 3, 0, "other")}, {}
    attach_optimizers([node, other], local)
    train([node], TASK, local, capturing_compute, steps=10)
    before = [to_vector(each.model) for each in (node, other)]
    train([other], TASK, local, capturing_compute, steps=10)
    assert torch.equal(to_vector(node.model), before[0])
    assert not torch.equal(to_vector(other.model), before[1])


@pytest.mark.parametrize("importance", ["counts", "fakeness"])
def test_captured_responses_follow_random_inputs_and_learning_rates(
    capturing_compute: Compute, importance: Any
) -> None:
    """Gradients to the server are off, because the substitute cannot run a backward pass twice."""
    options = {"importance": importance, "critic": {"schedule": "cosine"}, "backpropagate": False}
    expected, networks = distill(Compute(EngineConfig(batching="one-by-one")), **options)
    losses, others = distill(capturing_compute, **options)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(others, networks)


class Annealed(FedIOD):
    """Custom method with a function that depends on the query number."""

    def mean_critic_output_on_real(self, node: Any, size: int) -> Any:
        numbers.append(node.query_number)
        return {}


numbers: list[int] = []


def test_subclass_is_not_captured_and_its_helpers_see_each_query(capturing_compute: Compute) -> None:
    numbers.clear()
    distill(capturing_compute, kind=Annealed)
    assert len({*numbers}) == 8


def test_query_with_values_cannot_be_captured() -> None:
    declared = {"sends": {"x": "inputs", "v": "schedule"}, "releases": {"z": "logits"}}
    assert not Query(lambda node: {}, stackable=True, name="ask", **declared).is_capturable  # type: ignore[arg-type]


# --- on a GPU --------------------------------------------------------------------------------------


def gpu(graphs: bool) -> Compute:
    torch.backends.cudnn.allow_tf32 = False
    return Compute(
        EngineConfig(batching="one-by-one", device="cuda", precision="float32", cuda_graphs=graphs)
    )


def nodes_of(compute: Compute, spec: str | None, count: int = 3, rows: int = 24) -> list[Node]:
    nodes = []
    for index in range(count):
        draw = torch.Generator().manual_seed(index)
        data = TensorData(
            torch.randn(rows, *SHAPE, generator=draw), torch.randint(3, (rows,), generator=draw)
        )
        network = build(spec, SHAPE, 3, 0, index) if spec else nn.Sequential(nn.Flatten(), BranchingNetwork())
        gate = Gate(f"n{index}", PolicyConfig(), AuditLog())
        nodes.append(Node(f"n{index}", data.to(compute.device), compute.to_device(network), gate, 0))
    return nodes


class BranchingNetwork(nn.Module):
    """Network that branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) if x.sum().item() > 0 else -self.out(x)


def train_nodes(
    compute: Compute, spec: str | None, optimizer: Any, chunk: int = 20
) -> tuple[list[Node], Any]:
    """Train nodes for enough steps to capture, in chunks, one node after another."""
    local = LocalConfig(epochs=0, min_steps=MIN_STEPS_TO_CAPTURE + 10, batch=8, optimizer=optimizer, lr=0.01)
    nodes, losses = nodes_of(compute, spec), []
    attach_optimizers(nodes, local)
    for start in range(0, MIN_STEPS_TO_CAPTURE + 10, chunk):
        for node in nodes:
            train(
                [node],
                TASK,
                local,
                compute,
                start=start,
                steps=chunk,
                report=lambda *values: losses.append(values[2]),
            )
    return nodes, torch.cat(losses)


@on_gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("spec", ["resnet8:4", "mlp:8"])
def test_captured_local_training_equals_eager_training(spec: str, optimizer: str) -> None:
    eager, expected = train_nodes(gpu(False), spec, optimizer)
    nodes, losses = train_nodes(gpu(True), spec, optimizer)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    for node, other in zip(nodes, eager, strict=True):
        torch.testing.assert_close(
            list(node.model.parameters()), list(other.model.parameters()), rtol=1e-3, atol=1e-4
        )
        assert not node.captured_step, "graphs are released after training"


@on_gpu
@pytest.mark.parametrize("chunk", [20, MIN_STEPS_TO_CAPTURE + 10])
def test_network_that_reads_values_trains_eagerly(chunk: int, caplog: Any) -> None:
    cuda_graphs._warn.cache_clear()
    _, expected = train_nodes(gpu(False), None, "sgd", chunk)
    _, losses = train_nodes(gpu(True), None, "sgd", chunk)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    assert "without CUDA graphs" in caplog.text


@on_gpu
def test_graphs_are_released_and_new_ones_captured() -> None:
    """Nodes capture one after another, twice: the shared memory pool outlives the last graph."""
    compute = gpu(True)
    for _ in range(2):
        train_nodes(compute, "resnet8:4", "sgd", MIN_STEPS_TO_CAPTURE + 10)


def distill(
    compute: Compute, steps: int = 8, kind: Any = FedIOD, **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    config = kind(
        steps=steps,
        batch=6,
        generator=InputGenerator(noise=6, width=4),
        critic=Discriminators(width=4, batch=32),
        student=ReplayTraining(memory=20, steps=2, batch=8),
        ensemble="log_probs",
    )
    config = changed(config, **options)
    nodes = nodes_of(compute, "resnet8:4")
    for node in nodes:
        node.model.eval().requires_grad_(False)
    side = config.node_side(NodeSetting(TASK, LocalConfig(), compute))
    for node in nodes:
        side.prepare(node)
    federation = InProcess(nodes, group_nodes(nodes, False), side, compute)
    student = compute.to_device(build("mlp:8", SHAPE, 3, 0, "student"))
    server_compute = compute if compute.device.type == "cuda" else Compute()  # only nodes use the substitute
    server = Server(
        config, federation, student, TASK, SHAPE, (0.5,), (0.5,), server_compute, 0, LocalConfig()
    )
    losses = torch.tensor([list(server.step().values()) for _ in range(steps)])
    critics = [node.modules["critic"].parameters() for node in nodes]
    return losses, [each.detach().cpu() for each in itertools.chain(student.parameters(), *critics)]


@on_gpu
@pytest.mark.parametrize("importance", ["counts", "fakeness"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_captured_distillation_equals_eager_distillation(importance: str, schedule: str) -> None:
    options = {"importance": importance, "critic": {"schedule": schedule}}
    expected, networks = distill(gpu(False), **options)
    losses, others = distill(gpu(True), **options)
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(others, networks, rtol=1e-2, atol=2e-3)
