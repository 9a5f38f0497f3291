"""Milliseconds and memory per node, by the number of nodes, each number in its own process.

A step of FedIOD queries all nodes. A round of FedAvg with partial participation queries a few of many.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import peers
import step_time
import torch
import tyro
from torch import nn

import fedstill
from fedstill import models
from fedstill.core.dataset import TensorData
from fedstill.methods._server import Server
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fediod import FedIOD
from fedstill.protocol.local_config import LocalConfig

SHAPE = (1, 28, 28)
MODEL = "small-cnn:16"


@dataclass(frozen=True)
class Options:
    """Options: numbers of nodes."""

    fediod: tuple[int, ...] = (20, 100, 1000)
    """Numbers of nodes for FedIOD, which queries all of them with inputs in batches of 16."""
    fedavg: tuple[int, ...] = (100, 1000, 10000)
    """Numbers of nodes for FedAvg, which queries 50 per round."""
    rounds: int = 3
    """Timed steps or rounds."""
    only: tuple[Literal["fediod", "fedavg"], int] | None = None
    """Measure one of these in this process, and print JSON."""
    save: bool = False
    """Write the results to benchmarks/results."""


def memory() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fediod(data: list[TensorData], networks: list[nn.Module], student: nn.Module) -> Server:
    """Return FedIOD with a small student and generator, so that the nodes dominate its cost."""
    method = FedIOD(
        steps=1000,
        batch=16,
        generator=fedstill.InputGenerator(width=16),
        student=fedstill.ReplayTraining(steps=1, batch=16),
    )
    return peers.ours(method, networks, student, data, LocalConfig(), "float32", peers.Options(threads=1))


def fedavg(data: list[TensorData], networks: list[nn.Module], student: nn.Module) -> Server:
    """Return FedAvg that queries 50 nodes per round, each for four local steps with Adam."""
    method = FedAvg(rounds=1000, participation=50 / len(data))
    local = LocalConfig(epochs=1000, batch=16)
    return peers.ours(method, networks, student, data, local, "float32", peers.Options(threads=1))


def one(what: str, nodes: int, rounds: int) -> dict[str, Any]:
    """Return the results for one number of nodes."""
    torch.set_num_threads(1)
    build = lambda *name: models.build(MODEL, SHAPE, peers.CLASSES, 0, *name)  # noqa: E731
    student = build("student")
    before = memory()
    data = [peers.node_data(0, k, 64, SHAPE) for k in range(nodes)]
    networks = [build("node", k) for k in range(nodes)]
    server = (fediod if what == "fediod" else fedavg)(data, networks, student)
    made = memory()
    server.step()
    start = time.process_time()
    for _ in range(rounds):
        server.step()
    seconds = (time.process_time() - start) / rounds
    queried = nodes if what == "fediod" else 50
    return {
        "what": what,
        "nodes": nodes,
        "milliseconds for each that is asked": 1e3 * seconds / queried,
        "MB a node": (memory() - before) / nodes,
        "of it before the first step": (made - before) / nodes,
    }


def main(options: Options) -> None:
    """Measure, print and save."""
    if options.only is not None:
        print(json.dumps(one(*options.only, options.rounds)))
        return
    print("| method | nodes | ms per queried node | MB per node | of it before the first step |")
    print("|---|---:|---:|---:|---:|")
    results = []
    for what, counts in (("fediod", options.fediod), ("fedavg", options.fedavg)):
        for nodes in counts:
            command = [sys.executable, __file__, "--only", what, str(nodes), "--rounds", str(options.rounds)]
            stdout = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            metrics = json.loads(stdout.splitlines()[-1])
            results.append(metrics)
            print(
                "| "
                + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in metrics.values())
                + " |",
                flush=True,
            )
    if options.save:
        machine = step_time.machine(step_time.Options())
        path = step_time.result_file("scale", machine)
        path.write_text(
            json.dumps({"machine": machine, "results": results}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main(tyro.cli(Options))
