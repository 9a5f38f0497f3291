"""Time of one training step of each network in bfloat16 relative to float32, in the library's memory format.

    python benchmarks/precision.py --threads 1

The rule of ``engine.precision = "auto"`` (``fedstill/core/compute.py``) follows from this table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from fedstill import models
from fedstill.core.compute import Compute, EngineConfig, Precision, is_bfloat16_faster
from fedstill.models import Generator, PatchCritic

Shape = tuple[int, ...]
DIGITS, GRAY, COLOR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
NOISE = 100


def networks() -> list[tuple[str, Shape, Callable[[], nn.Module], Shape]]:
    """Return each network's name, image shape, factory and the shape of one input."""
    entries: list[tuple[str, Shape, Callable[[], nn.Module], Shape]] = []
    for spec, shape in [
        ("mlp", GRAY),
        ("lenet5", COLOR),
        ("small-cnn", DIGITS),
        ("small-cnn:16", GRAY),
        ("small-cnn", GRAY),
        ("resnet8:16", COLOR),
        ("resnet8:64", COLOR),
        ("unet:16", (1, 96, 96)),
    ]:
        classes = 2 if spec.startswith("unet") else 10
        entries.append((spec, shape, lambda s=spec, x=shape, c=classes: models.build(s, x, c, 0), shape))
    for shape in (DIGITS, GRAY, COLOR):
        half = (0.5,) * shape[0]
        for width in (16, 64):
            critic = (f"critic:{width}", shape, lambda x=shape, w=width: PatchCritic(x[0], w), shape)
            maker = lambda x=shape, w=width, h=half: Generator(x, NOISE, w, h, h)  # noqa: E731
            entries += [critic, (f"generator:{width}", shape, maker, (NOISE,))]
    return entries


def step(compute: Compute, network: nn.Module, x: torch.Tensor) -> float:
    """Return the processor seconds of a forward and backward pass."""
    start = time.process_time()
    with compute.autocast():
        z = network(x).float()
    z.square().mean().backward()
    for parameter in network.parameters():
        parameter.grad = None
    return time.process_time() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    able = is_bfloat16_faster(torch.device("cpu"))
    print(f"The processor computes in bfloat16: {'yes' if able else 'no'}.\n")
    print("| network | images | float32, ms | bfloat16, ms | bfloat16 / float32 | auto selects |")
    print("|---|---|---:|---:|---:|---|")
    for name, images, make, shape in networks():
        batch = max(chosen.batch * 1024 // max(images[-1] ** 2, 1024), 1)
        x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
        seconds: dict[Precision, list[float]] = {"float32": [], "bfloat16": []}
        placed = {}
        for precision in seconds:
            compute = Compute(EngineConfig(precision=precision, threads=chosen.threads))
            placed[precision] = compute, compute.to_device(make()).train()
        for round_ in range(chosen.rounds + 1):  # the first round warms up
            for precision, (compute, network) in placed.items():
                took = step(compute, network, x)
                if round_:
                    seconds[precision].append(took)
        full, half = (min(each) * 1e3 for each in seconds.values())
        ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
        auto = Compute(EngineConfig(threads=chosen.threads)).for_network(images, make()).precision
        print(
            f"| {name} | {'x'.join(map(str, images))} | {full:.1f} | {half:.1f} | {ratio:.2f} | {auto} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
