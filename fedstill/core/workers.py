"""Run independent functions concurrently, each in one thread on one core.

Nodes are independent of each other, and torch releases Python's lock while it computes. Many small networks
on a few cores are therefore fastest with one network per core. Results do not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from threading import Barrier, Event, local
from typing import Any, TypeVar

import torch

from fedstill.core import seeds, timing
from fedstill.core.errors import FedstillError

T = TypeVar("T")
R = TypeVar("R")
Runner = Callable[..., Any]


class Workers:
    """A pool of threads that compute with one core each.

    Args:
        count: number of threads; 1: functions run in the calling thread.
        watch_random: find calls that use torch's global generator by watching the first one of each kind.
    """

    def __init__(self, count: int, *, watch_random: bool = False) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._watch_random = watch_random
        self._uses_rng: dict[Hashable, bool] = {}  # by kind: whether it uses torch's global generator

    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        kinds: Sequence[Hashable],
        random: Sequence[bool] | None = None,
    ) -> list[R]:
        """Apply a function to each item and return the results in order.

        All threads share torch's global generator. Calls that use it run one after another, each seeded.

        Args:
            function: the function. Nested calls of ``map`` run sequentially in its thread.
            items: arguments of the function.
            kinds: kind of each call, equal if equal code computes on equal architectures.
            random: whether each call uses torch's global generator, as networks with dropout do; None: no
                call does.

        Raises:
            FedstillError: a call used torch's global generator unexpectedly, so its results would not repeat.
        """
        if self.count == 1 or _thread.is_worker:  # a worker thread has one core
            return [function(item) for item in items]
        results: dict[int, R] = {}
        for index, (item, kind) in enumerate(zip(items, kinds, strict=True)):
            if self._watch_random and kind not in self._uses_rng:
                with seeds.watch_global_rng() as watch:
                    results[index] = self._run_in_threads(_run_alone, function, {index: item})[index].result()
                self._uses_rng[kind] = watch.used
        for index, (item, kind) in enumerate(zip(items, kinds, strict=True)):
            is_random = self._uses_rng.get(kind, False) or (random is not None and random[index])
            if index not in results and is_random:
                # On one core as well: else the last digits would depend on the first call.
                results[index] = self._run_in_threads(_run_alone, function, {index: item})[index].result()
        remaining = [index for index in range(len(items)) if index not in results]
        before = torch.get_rng_state()
        futures = self._run_in_threads(
            _run_concurrently, function, {index: items[index] for index in remaining}
        )
        results |= {index: future.result() for index, future in futures.items()}
        if not torch.equal(torch.get_rng_state(), before):
            raise FedstillError(
                "nodes that are computed in parallel used torch's global generator outside of layers such as "
                "torch.nn.Dropout, so results would not repeat: set engine.watch_random to true, or "
                "engine.threads to 1"
            )
        return [results[index] for index in range(len(items))]

    def _run_in_threads(
        self, runner: Runner, function: Callable[[T], R], items: Mapping[int, T]
    ) -> Mapping[int, Future[R]]:
        """Run calls in threads and wait for them. An interrupt stops all of them between two steps."""
        stop = Event()
        pool, futures = self._threads(), dict[int, Future[R]]()
        try:
            for index, item in items.items():
                futures[index] = pool.submit(copy_context().run, runner, function, item, stop)
            wait(futures.values())
        except BaseException:
            stop.set()
            wait(futures.values())
            raise
        return futures

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            thread_count = torch.get_num_threads()
            pool, started = (
                ThreadPoolExecutor(self.count, "node", initializer=_use_one_core),
                Barrier(self.count),
            )
            try:
                wait([pool.submit(started.wait) for _ in range(self.count)])
            except BaseException:
                started.abort()  # else started threads would wait for ever
                raise
            finally:
                torch.set_num_threads(thread_count)
            self._pool = pool
        return self._pool


class _ThreadLocalState(local):
    is_worker = False


_thread = _ThreadLocalState()


def _use_one_core() -> None:
    """Let torch compute with one core in this thread.

    A thread takes the last number that any thread has set when it first asks for it, and keeps it.
    """
    _thread.is_worker = True
    torch.set_num_threads(1)
    torch.get_num_threads()


def _run_alone(function: Callable[[T], R], item: T, stop: Event) -> R:
    with timing.stop_on(stop):
        return function(item)


def _run_concurrently(function: Callable[[T], R], item: T, stop: Event) -> R:
    with timing.stop_on(stop), seeds.without_global_seeding():
        return function(item)
