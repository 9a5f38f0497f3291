"""Named random streams: each generator is seeded from the run's seed and a name.

No generator depends on what happened before. A resumed run therefore needs no random state on the disk, a
repeated query samples the same examples, and engines that compute nodes in another order draw the same
numbers.
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
    """Derive a 63-bit seed for one purpose from the run's seed and the names of the purpose.

    >>> derive(0, "noise", 1) == derive(0, "noise", 1)
    True
    >>> derive(0, "noise", 1) == derive(0, "noise", 2)
    False
    """
    text = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a CPU generator for one purpose. Sampling on the CPU gives equal numbers on all devices."""
    return torch.Generator().manual_seed(derive(seed, *names))


def numpy_generator(seed: int, *names: str | int) -> np.random.Generator:
    """Return a numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *names))


class _ThreadLocalState(threading.local):
    skips_seeding = False


@dataclass
class GlobalRngWatch:
    """Records whether torch's global generator was used inside :func:`seeded`."""

    used: bool = False


_thread = _ThreadLocalState()
_run = threading.RLock()
_watches: list[GlobalRngWatch] = []


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Seed torch's global generator within the block, and restore it afterwards.

    This is for code that uses it implicitly, such as initial weights or dropout. In a thread that runs
    concurrently with others (:func:`without_global_seeding`) nothing is seeded.
    """
    if _thread.skips_seeding:
        yield
        return
    derived, generator = derive(seed, *names), torch.default_generator
    cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda_states = torch.cuda.get_rng_state_all() if cuda_in_use else []
    state = generator.get_state()  # torch.random.fork_rng takes four times as long
    try:
        # torch.manual_seed is 100 times slower: it formats a stack trace for unused devices.
        generator.manual_seed(derived)
        if cuda_states:
            torch.cuda.manual_seed_all(derived)
        start = generator.get_state() if _watches else None
        yield
        if start is not None and not torch.equal(generator.get_state(), start):
            for watch in _watches:
                watch.used = True
    finally:
        generator.set_state(state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


@contextmanager
def exclusive_run() -> Iterator[None]:
    """Let one thread of this process at a time into the block.

    Torch's global generator, thread count and default dtype belong to the process, so two concurrent runs
    would change each other's random numbers.
    """
    with _run:
        yield


@contextmanager
def without_global_seeding() -> Iterator[None]:
    """Do not seed torch's global generator in this thread, as other threads run concurrently."""
    _thread.skips_seeding = True
    try:
        yield
    finally:
        _thread.skips_seeding = False


@contextmanager
def watch_global_rng() -> Iterator[GlobalRngWatch]:
    """Watch whether any thread uses torch's global generator."""
    watch = GlobalRngWatch()
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)
