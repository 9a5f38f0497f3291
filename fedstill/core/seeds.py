"""Randomness by counter: every draw has a name, and its generator follows from seed and name alone.

Nothing is drawn from a stream whose position depends on what happened before. So a run that was
killed goes on without any random state on disk, a query that is asked again draws the same
examples again, and engines that compute nodes in another order draw the same numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose, from the run's seed and the purpose's name.

    >>> derive(0, "noise", 1) == derive(0, "noise", 1)
    True
    >>> derive(0, "noise", 1) == derive(0, "noise", 2)
    False
    """
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for one purpose. Draws are made on the CPU so that devices agree."""
    return torch.Generator().manual_seed(derive(seed, *names))


def numpy_generator(seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *names))


class _Thread(threading.local):
    skips_seeding = False


@dataclass
class GlobalRngWatch:
    """Whether anything was drawn from torch's global generator inside :func:`seeded`."""

    used: bool = False


_thread = _Thread()
_run = threading.RLock()
_watches: list[GlobalRngWatch] = []


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Seed torch's global generator inside the block, and restore it after.

    For what draws from it without asking: a module's first weights, dropout in a user's model. Where other
    threads compute beside this one (:func:`without_global_seeding`) it is left alone.
    """
    if _thread.skips_seeding:
        yield
        return
    fresh = derive(seed, *names)
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices):
        # Not torch.manual_seed: for devices not yet in use it formats a stack trace, 100 times slower.
        torch.default_generator.manual_seed(fresh)
        if devices:
            torch.cuda.manual_seed_all(fresh)
        start = torch.get_rng_state() if _watches else None
        yield
        if start is not None and not torch.equal(torch.get_rng_state(), start):
            for watch in _watches:
                watch.used = True


@contextmanager
def exclusive_run() -> Iterator[None]:
    """Let one thread of this process at a time into the block; others wait.

    For whole runs: torch's global generator, number of threads and default dtype belong to the process, so
    that two runs at once would change each other's draws.
    """
    with _run:
        yield


@contextmanager
def without_global_seeding() -> Iterator[None]:
    """Leave torch's global generator alone in this thread: other threads compute beside it."""
    _thread.skips_seeding = True
    try:
        yield
    finally:
        _thread.skips_seeding = False


@contextmanager
def watch_global_rng() -> Iterator[GlobalRngWatch]:
    """Look whether work, in whatever thread, draws from torch's global generator."""
    watch = GlobalRngWatch()
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)
