"""Processor time of the parts of a FedIOD step, with one thread, times the number in a step.

The parts are the networks' computations in plain torch. The rest of a full step is overhead of the library
(``overhead.py``) and memory access.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import step_time
import torch
import torch.nn.functional as F
import tyro
from torch import nn

from fedstill import models
from fedstill.models import Generator, PatchCritic

Part = Callable[[], object]


@dataclass(frozen=True)
class Options:
    """Options: sizes of a FedIOD step, by default those of the preset fashion-fediod."""

    model: str = "small-cnn:16"
    """The nodes' architecture."""
    student: str = "small-cnn:32"
    """The student's architecture."""
    shape: tuple[int, int, int] = (1, 28, 28)
    """Shape of an input."""
    nodes: int = 10
    """K."""
    batch: int = 64
    """Inputs in a query."""
    critic_batch: int = 32
    """Batch size of a critic step."""
    critic_width: int = 16
    """Width of each D_k."""
    generator_width: int = 32
    """Width of G."""
    student_steps: int = 5
    """Steps of S, each on 64 inputs from memory."""
    repeat: int = 30
    """Number of times that each part is timed."""


def parts(options: Options) -> dict[str, tuple[int, Part]]:
    """Return each part of a step, with its number of calls in a step."""
    to_channels_last = lambda network: network.to(memory_format=torch.channels_last)  # noqa: E731
    channels = options.shape[0]
    T, S = (
        to_channels_last(models.build(name, options.shape, 10, 0, role))
        for name, role in ((options.model, "node"), (options.student, "student"))
    )
    D, half = to_channels_last(PatchCritic(channels, options.critic_width)), (0.5,) * channels
    G = to_channels_last(Generator(options.shape, 100, options.generator_width, half, half))
    x = torch.randn(options.batch, *options.shape).contiguous(memory_format=torch.channels_last)
    w, y = torch.randn(options.batch, 100), torch.randint(10, (options.batch,))
    adams = {net: torch.optim.Adam(net.parameters(), fused=True) for net in (D, G, S)}
    some = x[: options.critic_batch or options.batch]

    def there_and_back(network: nn.Module) -> None:
        network.requires_grad_(False)
        inputs = x.clone().requires_grad_()
        network(inputs).sum().backward()
        network.requires_grad_(True)

    def step(network: nn.Module, loss: torch.Tensor) -> None:
        adams[network].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adams[network].step()

    K = options.nodes
    return {
        "T_k there and back": (K, lambda: there_and_back(T.eval())),
        "D_k's step": (K, lambda: step(D, (F.softplus(D(some)) + F.softplus(-D(0.5 * some))).mean())),
        "D_k there and back": (K, lambda: there_and_back(D)),
        "G there and back, its step": (1, lambda: step(G, G(w).mean())),
        "S there and back, for G": (1, lambda: there_and_back(S.eval())),
        "S's steps": (options.student_steps, lambda: step(S.train(), F.cross_entropy(S(x), y))),
    }


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    where = step_time.machine(step_time.Options())
    print(f"{where['cpu']}, one thread, torch {where['torch']}, {where['date']}\n")
    print("| part | ms | times per step | ms per step | share |\n|---|---:|---:|---:|---:|")
    timings = {}
    for name, (times, part) in parts(options).items():
        for _ in range(5):
            part()
        start = time.process_time()
        for _ in range(options.repeat):
            part()
        timings[name] = (1e3 * (time.process_time() - start) / options.repeat, times)
    whole = sum(ms * times for ms, times in timings.values())
    for name, (ms, times) in timings.items():
        print(f"| {name} | {ms:.1f} | {times} | {ms * times:.0f} | {100 * ms * times / whole:.0f} % |")
    print(f"| all | | | {whole:.0f} | |")


if __name__ == "__main__":
    main(tyro.cli(Options))
