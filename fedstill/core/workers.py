"""Runs independent pieces of work at once, each in a thread of its own: many on a core each, few on several.

Nodes are independent of each other, and torch lets other threads run while it computes. So many small
networks on a few cores are best computed one a core, and those that are left at the end, fewer than there
are cores, share these out. How many cores a piece of work has follows from its place among the others, so
that it gives the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier, Event, local
from typing import Any, TypeVar

import torch

from fedstill.core import deadline, seeds

T = TypeVar("T")
R = TypeVar("R")
How = Callable[..., Any]


def shares(count: int, cores: int) -> list[int]:
    """How many cores each of ``count`` pieces of work has: one, and of those in the last row more.

    >>> shares(5, 2)
    [1, 1, 1, 1, 2]
    >>> shares(3, 8)
    [2, 2, 2]
    """
    last = count % cores
    return [1] * (count - last) + [cores // last] * last if last else [1] * count


class Workers:
    """Threads that compute with a core each, or a few.

    Args:
        count: how many; with 1, work is done where it is asked for.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._draws: dict[Hashable, bool] = {}  # by kind of work: does it draw from torch's global generator?

    def each(self, work: Callable[[T], R], items: Sequence[T], kinds: Sequence[Hashable]) -> list[R]:
        """``work`` of each item, in their order.

        There is one global generator of torch for all threads. So the first work of a kind is done alone;
        if it draws from that generator, as dropout does, all of its kind are done one after another.

        Args:
            work: what itself has work done at once has it done one after another, by its own thread.
            kinds: of work, one an item: equal where equal code computes on equal architectures.

        Raises:
            RuntimeError: work drew from torch's global generator that had not done so the first time.
        """
        if self.count == 1 or _thread.works:  # whoever works in a thread has its own cores
            return [work(item) for item in items]
        done: dict[int, R] = {}
        # Who is alone for a while has no more cores for it: which work was the first of its kind, or that its
        # kind draws, would show in the last digits.
        each = list(zip(items, shares(len(items), self.count), strict=True))
        for place, kind in enumerate(kinds):
            if kind not in self._draws:
                with seeds.watched() as watch:
                    done[place] = self._begun(_alone, work, {place: each[place]})[place].result()
                self._draws[kind] = watch.drawn
        for place, kind in enumerate(kinds):
            if place not in done and self._draws[kind]:
                done[place] = self._begun(_alone, work, {place: each[place]})[place].result()
        left = [place for place in range(len(items)) if place not in done]
        before = torch.get_rng_state()
        futures = self._begun(_apart, work, {place: each[place] for place in left})
        done |= {place: future.result() for place, future in futures.items()}
        if not torch.equal(torch.get_rng_state(), before):
            raise RuntimeError(
                "nodes that are computed at once drew from torch's global generator, so that their figures "
                "would not repeat: draw from it in each question or in none, or set engine.threads to 1"
            )
        return [done[place] for place in range(len(items))]

    def _begun(
        self, how: How, work: Callable[[T], R], each: Mapping[int, tuple[T, int]]
    ) -> Mapping[int, Future[R]]:
        """Work of some items on so many cores, ended.

        Whoever is interrupted has all of it ended soon, between two steps.
        """
        end, pool, here = Event(), self._threads(), torch.get_num_threads()
        futures: dict[int, Future[R]] = {}
        try:
            for place, (item, cores) in each.items():
                futures[place] = pool.submit(_on, cores, how, work, item, end)
            wait(futures.values())
        except BaseException:
            end.set()
            wait(futures.values())
            raise
        finally:
            torch.set_num_threads(here)  # for threads that are yet to come: see _one_core
        return futures

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            here = torch.get_num_threads()
            pool, started = ThreadPoolExecutor(self.count, "node", initializer=_one_core), Barrier(self.count)
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
    works = False


_thread = _Thread()


def _one_core() -> None:
    """Have torch compute with one core in this thread.

    A thread takes the number that any thread set last when it first asks for it, and keeps it.
    """
    _thread.works = True
    torch.set_num_threads(1)
    torch.get_num_threads()


def _on(cores: int, how: How, *about: Any) -> Any:
    """Something done in a thread, on so many cores."""
    if cores == 1:
        return how(*about)
    torch.set_num_threads(cores)
    try:
        return how(*about)
    finally:
        torch.set_num_threads(1)


def _alone(work: Callable[[T], R], item: T, end: Event) -> R:
    """Work in a thread while no other one works."""
    with deadline.until(end):
        return work(item)


def _apart(work: Callable[[T], R], item: T, end: Event) -> R:
    """Work in a thread beside others."""
    with deadline.until(end), seeds.shared():
        return work(item)
