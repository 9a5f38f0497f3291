"""Time of a training step with torch's group norm, in its memory format, and with ours.

    python benchmarks/group_norm.py

Reports the median processor milliseconds of nine steps on one thread; the variants alternate. Images are
channels first, like data, or channels last, like a generator's output. ``response`` is a forward pass without
gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from fedstill import models
from fedstill.core.compute import Compute, EngineConfig, Precision
from fedstill.models.norm_layers import GroupNorm

STEPS = 9
NETWORKS = [
    ("small-cnn:16", (1, 28, 28), 64),
    ("small-cnn:8", (3, 32, 32), 64),
    ("unet:8", (3, 64, 64), 16),
]
Times = dict[tuple[str, str], list[float]]


def with_torchs(network: nn.Module) -> nn.Module:
    """Replace our layers by torch's own in a network, in place."""
    for layer in network.modules():
        if type(layer) is GroupNorm:
            layer.__class__ = nn.GroupNorm
    return network


def measured(spec: str, shape: tuple[int, int, int], batch: int, precision: Precision) -> dict[str, Times]:
    """Return the seconds of a step and of a forward pass, by the images' layout and the layer's source."""
    compute = Compute(EngineConfig(precision=precision))
    sides = {
        "torch's": compute.to_device(with_torchs(models.build(spec, shape, 2, 0))),
        "ours": compute.to_device(models.build(spec, shape, 2, 0)),
    }
    timings: dict[str, Times] = {"step": {}, "response": {}}
    for _ in range(STEPS):
        for layout in ("first", "last"):
            for side, network in sides.items():
                x = torch.randn(batch, *shape)
                if layout == "last":
                    x = torch.randn(batch, *shape[1:], shape[0]).permute(0, 3, 1, 2)
                y = torch.randint(2, (batch, *(shape[1:] if spec.startswith("unet") else ())))
                start = time.process_time()
                with compute.autocast():
                    z = network(x)
                F.cross_entropy(z.float(), y).backward()
                timings["step"].setdefault((layout, side), []).append(time.process_time() - start)
                start = time.process_time()
                with torch.no_grad(), compute.autocast():
                    network(x)
                timings["response"].setdefault((layout, side), []).append(time.process_time() - start)
    return timings


def main() -> None:
    """Print a row for each network and precision."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    variants = [(layout, side) for layout in ("first", "last") for side in ("torch's", "ours")]
    print(
        "| network | precision | "
        + " | ".join(f"{layout}: {side}" for layout, side in variants)
        + " | inference, last: torch's | inference, last: ours |"
    )
    for spec, shape, batch in NETWORKS:
        for precision in ("float32", "bfloat16"):
            timings = measured(spec, shape, batch, precision)
            step, response = (
                {variant: 1e3 * statistics.median(each) for variant, each in part.items()}
                for part in timings.values()
            )
            cells = [f"{step[variant]:.1f}" for variant in variants]
            cells += [f"{response['last', side]:.1f}" for side in ("torch's", "ours")]
            print(f"| {spec} | {precision} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
