"""Seconds and memory of a whole run on features, by the number of nodes.

    python benchmarks/features.py

FedKD with linear heads on 50,000 feature vectors of 1,280 numbers, as of CIFAR-10 on EfficientNet-Lite0. The
vectors are synthetic (ten Gaussian classes), as their values change no speed; queries are 8,000 vectors of
noise. The time contains everything after the features: checks, 10 local epochs, one query to each node, 20
epochs of distillation, evaluation. Each number of nodes has its own process.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import step_time
import torch
import tyro
from torch import nn

import fedstill

FEATURES, CLASSES = 1280, 10


@dataclass(frozen=True)
class Options:
    """Options: sizes of the run."""

    nodes: tuple[int, ...] = (20, 100, 1000)
    """Numbers of nodes."""
    records: int = 50_000
    """Records of all nodes together."""
    queries: int = 8_000
    """Vectors of noise that are sent to each node."""
    threads: int = 1
    """Threads of the processor."""
    only: int | None = None
    """One of these numbers of nodes, in this process, as JSON."""
    save: bool = False
    """Write the results to benchmarks/results."""


def examples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors ``(count, 1280)`` of ten Gaussian classes, and the classes."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(CLASSES, FEATURES, generator=generator) / math.sqrt(FEATURES) * 4
    generator.manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return means[y] + torch.randn(count, FEATURES, generator=generator), y


def measure(options: Options, nodes: int) -> dict[str, Any]:
    """Return seconds, peak memory and accuracy of a run."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)  # of the heads
    x, y = examples(options.records, 1)
    test = examples(1_000, 2)
    parts = list(zip(x.tensor_split(nodes), y.tensor_split(nodes), strict=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, processor_start = time.perf_counter(), time.process_time()
    outcome = fedstill.distil(
        parts,
        [nn.Linear(FEATURES, CLASSES) for _ in parts],
        nn.Linear(FEATURES, CLASSES),
        test,
        CLASSES,
        task="tabular",
        method=fedstill.FedKD(gamma=math.inf, ensemble="logits", student=fedstill.StudentTraining(epochs=20)),
        local=fedstill.LocalConfig(epochs=10, batch=32, lr=1e-3, augment="none"),
        engine=fedstill.EngineConfig(threads=options.threads),
        public=torch.randn(options.queries, FEATURES, generator=torch.Generator().manual_seed(3)),
        every=0,
    )
    return {
        "nodes": nodes,
        "seconds": time.perf_counter() - start,
        "of the processor": time.process_time() - processor_start,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "of it the data": before / 1024,
        "accuracy": outcome.result["accuracy"],
    }


def main(options: Options) -> None:
    """Measure, print, and save if asked to."""
    if options.only is not None:
        print(json.dumps(measure(options, options.only)))
        return
    torch.set_num_threads(options.threads)  # for the description of the machine
    print(f"FedKD on features: end to end, threads: {options.threads}")
    print("| nodes | seconds | processor time, s | peak MB | MB before the run | accuracy % |")
    print("|---:|---:|---:|---:|---:|---:|")
    results = []
    for nodes in options.nodes:
        sizes = {"--records": options.records, "--queries": options.queries, "--threads": options.threads}
        words = [str(word) for pair in sizes.items() for word in pair]
        command = [sys.executable, __file__, "--only", str(nodes), *words]
        stdout = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results.append(json.loads(stdout.splitlines()[-1]))
        values = (f"{v:.1f}" if isinstance(v, float) else str(v) for v in results[-1].values())
        print(f"| {' | '.join(values)} |", flush=True)
    if options.save:
        machine = step_time.machine(step_time.Options())
        text = json.dumps({"machine": machine, "results": results}, indent=1)
        step_time.result_file("features", machine).write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options))
