"""Concurrent calls: results in order, one core each, and repeatable random numbers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Thread, main_thread
from typing import Any

import pytest
import torch

from fedstill.core import timing
from fedstill.core.compute import Compute
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seeded
from fedstill.core.workers import Workers
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.tasks.classification import Classification


def test_runs_concurrently_and_returns_results_in_order() -> None:
    workers, meeting = Workers(2), Barrier(2)
    workers.map(lambda item: item, ["first"], ["meet"])

    def meet(item: int) -> int:
        meeting.wait(timeout=20)  # alone, nobody would come
        time.sleep(0.02 * (4 - item))  # later ones end first
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
    """Sums over several threads differ in the last digits. After a resume another call is the first one."""

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
    with pytest.raises(FedstillError, match="used torch's global generator"):
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
    """Handle SIGINT as a terminal does. Processes that run tests may ignore it."""
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

    asking = Thread(target=call, daemon=True)
    asking.start()
    asking.join(20)
    assert done == [[[11, 12], [21, 22], [31, 32]]]


def test_interrupt_during_start_leaves_no_waiting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the process could not end."""
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
        started[0].result(timeout=20)
    monkeypatch.undo()
    assert workers.map(lambda item: item, [0, 1], ["a"] * 2) == [0, 1]
