"""Runs independent pieces of work at once: each in a thread of its own, on one core.

Nodes are independent of each other, and torch lets other threads run while it computes. So many small
networks on a few cores are best computed one a core. What a piece of work gives does not depend on how many
others are computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from threading import Barrier, Event, local
from typing import Any, TypeVar

import torch

from fedstill.core import seeds, timing

T = TypeVar("T")
R = TypeVar("R")
Runner = Callable[..., Any]


class Workers:
    """Threads that compute with one core each.

    Args:
        count: how many; with 1, work is done where it is asked for.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._uses_rng: dict[
            Hashable, bool
        ] = {}  # by kind of work: does it draw from torch's global generator?

    def map(self, function: Callable[[T], R], items: Sequence[T], kinds: Sequence[Hashable]) -> list[R]:
        """``function`` of each item, in their order.

        There is one global generator of torch for all threads. So the first work of a kind is done alone;
        if it draws from that generator, as dropout does, all of its kind are done one after another.

        Args:
            function: what itself has work done at once has it done one after another, by its own thread.
            kinds: of work, one an item: equal where equal code computes on equal architectures.

        Raises:
            RuntimeError: work drew from torch's global generator that had not done so the first time.
        """
        if self.count == 1 or _thread.is_worker:  # whoever works in a thread has that one core
            return [function(item) for item in items]
        done: dict[int, R] = {}
        for place, (item, kind) in enumerate(zip(items, kinds, strict=True)):
            if kind not in self._uses_rng:
                with seeds.watch_global_rng() as watch:
                    done[place] = self._run_in_threads(_run_alone, function, {place: item})[place].result()
                self._uses_rng[kind] = watch.used
        for place, item in enumerate(items):
            if place not in done and self._uses_rng[kinds[place]]:
                # On one core, too: which work was the first of its kind would show in the last digits.
                done[place] = self._run_in_threads(_run_alone, function, {place: item})[place].result()
        left = [place for place in range(len(items)) if place not in done]
        before = torch.get_rng_state()
        futures = self._run_in_threads(_run_concurrently, function, {place: items[place] for place in left})
        done |= {place: future.result() for place, future in futures.items()}
        if not torch.equal(torch.get_rng_state(), before):
            raise RuntimeError(
                "nodes that are computed at once drew from torch's global generator, so that their figures "
                "would not repeat: draw from it in each query or in none, or set engine.threads to 1"
            )
        return [done[place] for place in range(len(items))]

    def _run_in_threads(
        self, runner: Runner, function: Callable[[T], R], items: Mapping[int, T]
    ) -> Mapping[int, Future[R]]:
        """Work of some items, ended. Whoever is interrupted has all of it ended soon, between two steps."""
        end = Event()
        pool, futures = self._threads(), dict[int, Future[R]]()
        try:
            for place, item in items.items():
                futures[place] = pool.submit(copy_context().run, runner, function, item, end)
            wait(futures.values())
        except BaseException:
            end.set()
            wait(futures.values())
            raise
        return futures

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            here = torch.get_num_threads()
            pool, started = (
                ThreadPoolExecutor(self.count, "node", initializer=_use_one_core),
                Barrier(self.count),
            )
            try:
                wait([pool.submit(started.wait) for _ in range(self.count)])
            except BaseException:
                started.abort()  # or those that have started would wait for the others for ever
                raise
            finally:
                torch.set_num_threads(here)
            self._pool = pool
        return self._pool


class _Thread(local):
    is_worker = False


_thread = _Thread()


def _use_one_core() -> None:
    """Have torch compute with one core in this thread.

    A thread takes the number that any thread set last when it first asks for it, and keeps it.
    """
    _thread.is_worker = True
    torch.set_num_threads(1)
    torch.get_num_threads()


def _run_alone(function: Callable[[T], R], item: T, stop: Event) -> R:
    """Work in a thread while no other one works."""
    with timing.stop_on(stop):
        return function(item)


def _run_concurrently(function: Callable[[T], R], item: T, stop: Event) -> R:
    """Work in a thread beside others."""
    with timing.stop_on(stop), seeds.without_global_seeding():
        return function(item)
