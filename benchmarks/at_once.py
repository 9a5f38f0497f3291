"""Images per second of networks in evaluation, by batch size.

    python benchmarks/at_once.py

``fedstill.models.inference.inference_batch_size`` is based on this table: the layer outputs of one batch
should fit into the processor's cache. Runs on one thread and reports the median processor time of seven
passes over 1,000 images. The batch sizes alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from fedstill import models
from fedstill.core.compute import Compute, EngineConfig
from fedstill.models.inference import inference_batch_size

IMAGES = 1000
PASSES = 7
PIECES = (32, 64, 85, 128, 334, 1000)
NETWORKS = [
    ("bn-lenet", (1, 28, 28)),
    ("small-cnn:16", (1, 28, 28)),
    ("resnet8:8", (3, 32, 32)),
    ("resnet8:16", (3, 32, 32)),
    ("unet:8", (1, 64, 64)),
]


def seconds(compute: Compute, network: torch.nn.Module, x: torch.Tensor) -> dict[int, float]:
    """Return the processor seconds of a pass by batch size.

    Batch sizes alternate, so that other work on the machine affects all of them.
    """
    took: dict[int, list[float]] = {piece: [] for piece in PIECES}
    for _ in range(PASSES):
        for piece, each in took.items():
            start = time.process_time()
            with torch.no_grad(), compute.autocast():
                for part in torch.split(x, piece):
                    network(part).float()
            each.append(time.process_time() - start)
    return {piece: statistics.median(each) for piece, each in took.items()}


def main() -> None:
    """Print a row for each network and precision; * is the batch size that the library uses."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    print("| network | images | precision |" + "".join(f" {piece} |" for piece in PIECES))
    for spec, shape in NETWORKS:
        x = torch.randn(IMAGES, *shape)
        for precision in ("float32", "bfloat16"):
            compute = Compute(EngineConfig(precision=precision))
            network = compute.to_device(models.build(spec, shape, 2, 0)).eval()
            cells = [
                f"{IMAGES / took:,.0f}{'*' * (piece == inference_batch_size(x))}"
                for piece, took in seconds(compute, network, x).items()
            ]
            print(f"| {spec} | {'x'.join(map(str, shape))} | {precision} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
