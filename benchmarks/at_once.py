"""How many inputs a network computes at once: images a second in evaluation, by the size of the pieces.

    python benchmarks/at_once.py

``fedstill.node.local_training.at_once`` follows from this table: what layers make of a piece is to stay in
the processor's cache. One thread, processor seconds, the best of three passes over 2,000 images.
"""

from __future__ import annotations

import argparse
import time

import torch

from fedstill import models
from fedstill.core.compute import Compute, EngineConfig
from fedstill.node.local_training import at_once

IMAGES = 2000
PIECES = (32, 64, 85, 128, 334, 1000)
NETWORKS = [
    ("bn-lenet", (1, 28, 28)),
    ("small-cnn:16", (1, 28, 28)),
    ("resnet8:8", (3, 32, 32)),
    ("resnet8:16", (3, 32, 32)),
    ("unet:8", (1, 64, 64)),
]


def seconds(compute: Compute, network: torch.nn.Module, x: torch.Tensor, piece: int) -> float:
    """Processor seconds of the quickest of three passes."""
    took = []
    for _ in range(3):
        start = time.process_time()
        with torch.no_grad(), compute.autocast():
            for part in torch.split(x, piece):
                network(part).float()
        took.append(time.process_time() - start)
    return min(took)


def main() -> None:
    """Print a row for each network and precision; * is the size that the library takes."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    print("| network | images | precision |" + "".join(f" {piece} |" for piece in PIECES))
    for spec, shape in NETWORKS:
        x = torch.randn(IMAGES, *shape)
        for precision in ("float32", "bfloat16"):
            compute = Compute(EngineConfig(precision=precision))
            network = compute.place(models.build(spec, shape, 2, 0)).eval()
            cells = [
                f"{IMAGES / seconds(compute, network, x, piece):,.0f}{'*' * (piece == at_once(x))}"
                for piece in PIECES
            ]
            print(f"| {spec} | {'x'.join(map(str, shape))} | {precision} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
