"""Device, precision and memory layout, and concurrent calls."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Thread, main_thread
from typing import Any

import pytest
import torch
from torch import nn

import fedstill
from fedstill.core import compute as compute_module
from fedstill.core import timing
from fedstill.core.compute import (
    Compute,
    EngineConfig,
    Workers,
    is_bfloat16_faster,
    match_layout,
    match_parameter_layout,
)
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.seeds import seeded
from fedstill.methods._discriminators import Discriminators
from fedstill.methods.fediod import FedIOD
from fedstill.models import LeNet5, SmallCNN, build
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.tasks.classification import Classification

CPU = torch.device("cpu")
LAST = torch.channels_last


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (FedIOD, "importance", r"invalid method.importance = 'misspelled' \(expected one of counts"),
        (Discriminators, "loss", r"invalid method.critic.loss = 'misspelled' \(expected one of eq2, bce"),
        (FedIOD, "student_inputs", r"invalid method.student_inputs = 'misspelled'"),
        (LocalConfig, "optimizer", r"invalid local.optimizer = 'misspelled' \(expected one of adam, sgd"),
        (LocalConfig, "augment", r"invalid local.augment = 'misspelled' \(expected one of none, shift"),
        (
            EngineConfig,
            "batching",
            r"invalid engine.batching = 'misspelled' \(expected one of auto, stacked, one-by-one",
        ),
        (
            EngineConfig,
            "precision",
            r"invalid engine.precision = 'misspelled' \(expected one of float32, bfloat16",
        ),
    ],
)
def test_rejects_misspelled_choice_from_python(config: Any, name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        config(**{name: "misspelled"})


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "faster"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        # bfloat16 takes twice as long
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "aarch64", "bf16": True}, False),
    ],
)
def test_processor_uses_bfloat16_if_faster(
    capabilities: dict[str, object], faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert is_bfloat16_faster(CPU) is faster


def test_unknown_processor_uses_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not is_bfloat16_faster(CPU)


@pytest.mark.parametrize("emulated", [True, False])
def test_emulated_bfloat16_is_not_faster(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or not emulated

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert is_bfloat16_faster(torch.device("cuda")) is not emulated


@pytest.mark.parametrize(
    ("precision", "faster", "shape", "model", "expected"),
    [
        ("auto", True, (1, 16, 16), "small-cnn:4", "bfloat16"),
        ("auto", True, (1, 16, 12), "small-cnn:4", "float32"),  # no speedup for small images
        ("auto", True, (1, 16, 16), "mlp:4", "float32"),  # no speedup without convolutions
        ("auto", False, (1, 16, 16), "small-cnn:4", "float32"),
        ("float32", True, (1, 16, 16), "small-cnn:4", "float32"),
        ("bfloat16", False, (1, 8, 8), "mlp:4", "bfloat16"),
    ],
)
def test_auto_precision_depends_on_processor_and_network(
    precision: Any, faster: bool, shape: Any, model: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_module, "is_bfloat16_faster", lambda device: faster)
    network = build(model, shape, 3, 0)
    compute = Compute(EngineConfig(precision=precision)).for_network(shape, network)
    assert compute.precision == expected
    exact = Compute(EngineConfig(precision=precision)).for_network(shape, network, force_float32=True)
    assert exact.precision == ("float32" if precision == "auto" else precision)
    with compute.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == getattr(torch, expected)


# --- layout --------------------------------------------------------------------------------------


def is_channels_last(compute: Compute, network: nn.Module) -> bool:
    """Return whether a network for three channels is in channels-last format on the device."""
    return bool(compute.to_device(network)[0].weight.is_contiguous(memory_format=LAST))  # type: ignore[index]


def test_networks_use_channels_last_if_enabled() -> None:
    assert is_channels_last(Compute(), SmallCNN((3, 8, 8), 3, 4))
    assert not is_channels_last(Compute(EngineConfig(channels_last=False)), SmallCNN((3, 8, 8), 3, 4))


def convolution_with_group_norm() -> nn.Sequential:
    """Return a convolution and the group norm of torch."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))


def test_group_norm_keeps_channels_first_in_bfloat16() -> None:
    """With channels first, it is several times faster."""
    low = Compute(EngineConfig(precision="bfloat16"))
    assert not is_channels_last(low, convolution_with_group_norm())
    assert is_channels_last(low, SmallCNN((3, 8, 8), 3, 4))  # its norms support any layout


class CustomGroupNorm(nn.GroupNorm):
    """Subclass of a group norm."""


@pytest.mark.parametrize("norm", [nn.GroupNorm, CustomGroupNorm])
def test_group_norm_behind_frozen_layers_keeps_channels_first(norm: type[nn.GroupNorm]) -> None:
    """With channels last, torch crashes in the backward pass of this norm."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), norm(2, 4))
    network[0].requires_grad_(False)
    assert not is_channels_last(Compute(), network)
    network(torch.ones(2, 3, 8, 8)).sum().backward()
    without = LeNet5((3, 8, 8), 3)
    without[0].requires_grad_(False)
    assert is_channels_last(Compute(), without)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_optimizer_state_matches_parameter_layout(optimizer: Any) -> None:
    how = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    parameter = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=LAST))
    used = optimizer([parameter], 0.1, **how)
    parameter.grad = torch.randn_like(parameter)
    used.step()
    state = used.state[parameter]
    before = {key: value.clone() for key, value in state.items()}
    for key, value in list(state.items()):
        state[key] = value.contiguous()
    match_parameter_layout(used)
    for key, value in state.items():
        assert torch.equal(value, before[key])
        assert value.shape != parameter.shape or value.stride() == parameter.stride()


def test_matching_layout_is_not_copied() -> None:
    one, other = torch.ones(2, 3), torch.zeros(2, 3)
    assert match_layout(one, other) is one
    moved = match_layout(torch.arange(6.0).view(3, 2).T, other)
    assert moved.stride() == other.stride()
    assert moved.tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(("channels", "stride", "last"), [(4, 2, False), (8, 2, True), (4, 1, True)])
def test_networks_with_overrunning_gradients_keep_channels_first(
    channels: int, stride: int, last: bool
) -> None:
    """Without AVX-512, torch 2.13 crashes or reads memory outside of the tensor."""
    network = nn.Sequential(nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 8, 1, stride))
    assert is_channels_last(Compute(EngineConfig(device="cpu")), network) is last


@pytest.mark.sample(1)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_resnet_steps_are_equal_in_both_layouts(width: int) -> None:
    first, last = (build(f"resnet8:{width}", (1, 8, 8), 2, 0) for _ in range(2))
    last = last.to(memory_format=LAST)
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(60):
        grads = [
            torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
            for network in (first, last)
        ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# --- threads -------------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    here = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(here)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("threads", "shape", "expected"),
    [
        (0, (1, 8, 8), 1),
        (2, (1, 8, 8), 2),  # set by the user
        (0, (1, 28, 28), 2),
        (0, (3, 32, 32), 2),
    ],
)
def test_small_convolutional_networks_use_one_thread(
    threads: int, shape: tuple[int, int, int], expected: int
) -> None:
    compute = Compute(EngineConfig(threads=threads))
    with compute.limit_threads(shape, SmallCNN(shape, 10)):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2
    assert compute.workers.count == 2


@pytest.mark.usefixtures("two_threads")
def test_large_or_dense_networks_keep_all_threads() -> None:
    compute = Compute(EngineConfig())
    for network in (SmallCNN((1, 8, 8), 10, width=512), nn.Linear(64, 10)):
        with compute.limit_threads((1, 8, 8), network):
            assert torch.get_num_threads() == 2


def test_student_does_not_depend_on_thread_count() -> None:
    def student(threads: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(1)
        part = 2 * torch.rand(60, 1, 8, 8, generator=draw) - 1, torch.randint(10, (60,), generator=draw)
        torch.manual_seed(0)
        here = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            outcome = fedstill.distil(
                data=[part, part],
                models=[SmallCNN((1, 8, 8), 10), SmallCNN((1, 8, 8), 10)],
                student=SmallCNN((1, 8, 8), 10),
                test=part,
                classes=10,
                method=FedIOD(steps=6),
                local=LocalConfig(epochs=1),
                every=0,
            )
        finally:
            torch.set_num_threads(here)
        assert outcome.student is not None
        return outcome.student.state_dict()

    one, two = student(1), student(2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_runs_concurrently_and_returns_results_in_order() -> None:
    workers, barrier = Workers(2), Barrier(2)
    workers.map(lambda item: item, ["first"], ["meet"])

    def meet(item: int) -> int:
        barrier.wait(timeout=60)  # times out unless both workers run
        time.sleep(0.02 * (4 - item))  # later items end first
        return 10 * item

    assert workers.map(meet, [0, 1, 2, 3], ["meet"] * 4) == [0, 10, 20, 30]


def test_workers_use_one_torch_thread_and_caller_keeps_its_own() -> None:
    here = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert Workers(2).map(lambda _: torch.get_num_threads(), [0, 1, 2], ["a"] * 3) == [1, 1, 1]
        assert torch.get_num_threads() == 3
        assert Workers(1).map(lambda _: torch.get_num_threads(), [0, 1], ["a"] * 2) == [3, 3]
    finally:
        torch.set_num_threads(here)


def test_random_functions_use_one_torch_thread() -> None:
    """Thread counts change the last digits of sums, and the first call differs after a resume."""

    def threads(item: int) -> int:
        sample_numbers(item)
        return torch.get_num_threads()

    here = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert Workers(2).map(threads, [0, 1, 2], ["draws"] * 3, [True] * 3) == [1, 1, 1]
    finally:
        torch.set_num_threads(here)


def sample_numbers(item: int) -> list[float]:
    with seeded(0, "draw", item):
        return torch.rand(3).tolist()


def test_functions_using_global_rng_run_sequentially() -> None:
    alone = [sample_numbers(item) for item in range(6)]
    state = torch.get_rng_state()
    named, watching = Workers(3), Workers(3, watch_random=True)
    for _ in range(20):
        assert named.map(sample_numbers, list(range(6)), ["draws"] * 6, [True] * 6) == alone
        assert watching.map(sample_numbers, list(range(6)), ["draws"] * 6) == alone
    assert torch.equal(torch.get_rng_state(), state)


def test_rng_use_is_checked_per_kind() -> None:
    workers = Workers(2, watch_random=True)
    both = workers.map(
        lambda item: sample_numbers(item) if item % 2 else [float(item)], [0, 1, 2, 3], ["still", "draws"] * 2
    )
    assert both == [[0.0], sample_numbers(1), [2.0], sample_numbers(3)]


@pytest.mark.parametrize("watch", [False, True])
def test_rejects_unexpected_use_of_global_rng(watch: bool) -> None:
    workers = Workers(2, watch_random=watch)
    workers.map(lambda item: item, [0, 1], ["late"] * 2)
    with pytest.raises(FedstillError, match="global generator"):
        workers.map(sample_numbers, [0, 1], ["late"] * 2)


def test_error_is_raised_after_other_workers_finish() -> None:
    workers, done = Workers(2), []

    def fail(item: int) -> None:
        if item == 1:
            raise ValueError("one")
        time.sleep(0.05)
        done.append(item)

    with pytest.raises(ValueError, match="one"):
        workers.map(fail, [0, 1, 2, 3], ["a"] * 4)
    assert sorted(done) == [0, 2, 3]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT like a process in a terminal; test processes may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_stops_other_workers() -> None:
    workers, ended = Workers(2), []
    workers.map(lambda item: item, [0], ["long"])

    def long(item: int) -> None:
        if item == 1:
            time.sleep(0.1)
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)
        start = time.monotonic()
        try:
            while time.monotonic() < start + 60:
                timing.check_limits()
                time.sleep(0.005)
        finally:
            ended.append(time.monotonic() - start)

    with pytest.raises(KeyboardInterrupt):
        workers.map(long, [0, 1], ["long"] * 2)
    assert len(ended) == 2
    assert max(ended) < 20


def test_shared_setup_runs_once_with_concurrent_callers() -> None:
    at, made = NodeSetting(Classification(2), LocalConfig(), Compute()), []

    def make() -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    workers = Workers(2)
    workers.map(lambda item: item, [0], ["ask"])
    first, second = workers.map(lambda item: at.cached("it", make), [0, 1], ["ask"] * 2)
    assert first is second is made[0]
    assert len(made) == 1


def test_nested_map_does_not_deadlock() -> None:
    workers, done = Workers(2), []

    def both(ten: int) -> list[int]:
        return workers.map(lambda one: ten + one, [1, 2], ["inner"] * 2)

    def call() -> None:
        done.append(workers.map(both, [10, 20, 30], ["outer"] * 3))

    caller = Thread(target=call, daemon=True)
    caller.start()
    caller.join(60)
    assert done == [[[11, 12], [21, 22], [31, 32]]]


def test_interrupt_during_start_leaves_no_waiting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting thread would keep the process from ending."""
    submit, started = ThreadPoolExecutor.submit, []

    def interrupted(pool: ThreadPoolExecutor, *what: Any) -> Any:
        if started:
            raise KeyboardInterrupt
        started.append(submit(pool, *what))
        return started[-1]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    workers = Workers(2)
    with pytest.raises(KeyboardInterrupt):
        workers.map(lambda item: item, [0, 1], ["a"] * 2)
    with pytest.raises(BrokenBarrierError):
        started[0].result(timeout=60)
    monkeypatch.undo()
    assert workers.map(lambda item: item, [0, 1], ["a"] * 2) == [0, 1]
