"""Queries per second of nodes in this process and in Ray actors, by the number of nodes.

FedIOD sends one batch of inputs to all nodes, and gets logits, critic scores and gradients. The networks are
small, so that the cost of a query itself shows. Each case is a run in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import step_time
import torch
import tyro

from fedstill.federation import ray_actors
from fedstill.node.audit_entries import ENTRY_FIELDS, Entry
from fedstill.node.audit_log import AuditLog, Charge
from fedstill.runs import ray_simulation
from fedstill.runs.run import run
from fedstill.runs.spec import from_dict


@dataclass(frozen=True)
class Options:
    """Options: numbers of nodes and actors."""

    nodes: tuple[int, ...] = (20, 100, 1000)
    """Numbers of nodes."""
    actors: tuple[int, ...] = (0, 1, 2)
    """Numbers of actors; 0: nodes in this process."""
    steps: int = 30
    """Steps of a run."""
    device: str = "cpu"
    """Device of the nodes and the server."""
    only: tuple[int, int] | None = None
    """Measure one number of nodes and of actors in this process, and print JSON."""
    server: bool = False
    """Measure the processor time that the server's process takes for one node's response, and print it."""
    save: bool = False
    """Write the results to benchmarks/results."""


def config(nodes: int, actors: int, options: Options) -> dict[str, Any]:
    """Return the configuration of a run."""
    engine: dict[str, Any] = {"batching": "stacked", "threads": 1, "device": options.device}
    if actors:
        share = 1 / actors if options.device.startswith("cuda") else 0.0
        engine |= {"backend": "ray", "ray": {"actors": actors, "gpus_per_actor": share}}
    return {
        "data": {"name": "digits"},
        "split": {"name": "iid", "nodes": nodes},
        "nodes": {"models": ["mlp:32"], "local": {"epochs": 1, "batch": 16}},
        "student": {"model": "mlp:32"},
        "method": {
            "name": "fediod",
            "steps": options.steps,
            "batch": 16,
            "generator": {"width": 4},
            "critic": {"width": 2},
            "student": {"steps": 1, "batch": 16, "memory": 32},
        },
        "evaluation": {"centralized": False, "every": 0, "samples": 0},
        "engine": engine,
    }


class CountingFederation(ray_actors.RayFederation):
    """Federation that counts the bytes of its messages in Ray's object store.

    Attributes:
        sent, received: bytes of messages to and from the actors, so far.
    """

    sent = received = 0

    def collect_responses(self, *given: Any) -> Any:
        with counting_messages():
            return super().collect_responses(*given)

    def collect_gradients(self, *given: Any) -> Any:
        with counting_messages():
            return super().collect_gradients(*given)


@contextmanager
def counting_messages() -> Iterator[None]:
    """Count the messages that this process makes and reads in the block."""
    to_message, from_message = ray_actors.to_message, ray_actors.from_message

    def count_sent(state: Any) -> Any:
        message = to_message(state)
        CountingFederation.sent += message.nbytes
        return message

    def count_received(message: Any) -> Any:
        CountingFederation.received += message.nbytes
        return from_message(message)

    ray_actors.to_message, ray_actors.from_message = count_sent, count_received
    try:
        yield
    finally:
        ray_actors.to_message, ray_actors.from_message = to_message, from_message


def one(nodes: int, actors: int, options: Options) -> dict[str, Any]:
    """Return the results of one case."""
    ray_simulation.RayFederation = CountingFederation
    spec = from_dict(config(nodes, actors, options))
    with tempfile.TemporaryDirectory() as folder:
        result = run(spec, Path(folder) / "run", command="", progress=False)
    seconds, queries = result["seconds"]["distillation"], result["queries"]
    return {
        "nodes": nodes,
        "actors": actors,
        "queries per second": queries / seconds,
        "milliseconds per query": 1e3 * seconds / queries,
        "kB sent per query": CountingFederation.sent / queries / 1e3,
        "kB received per query": CountingFederation.received / queries / 1e3,
        "accuracy": result["accuracy"],
    }


def server_milliseconds(nodes: int = 1000, values: int = 16 * 64) -> dict[str, float]:
    """Return the server's processor time for one node's response, in milliseconds: reading and charging it.

    Args:
        nodes: nodes in the actor's message.
        values: float32 numbers of a response.
    """
    names = [f"node-{index}" for index in range(nodes)]
    entries = [
        {name: getattr(Entry("run", node, node, 0, "q", "response", "0" * 32), name) for name in ENTRY_FIELDS}
        for node in names
    ]
    released = {node: {"logits": torch.zeros(values)} for node in names}
    message = ray_actors.to_message({"released": released, "entries": entries})
    with tempfile.TemporaryDirectory() as folder:
        log = AuditLog(Path(folder) / "audit.sqlite", durable=False)
        start = time.process_time()
        reply = ray_actors.from_message(message)
        read = time.process_time()
        log.charge_all([Charge(Entry(**fields)) for fields in reply["entries"]])
        charged = time.process_time()
        log.close()
    return {"reading": 1e3 * (read - start) / nodes, "charging": 1e3 * (charged - read) / nodes}


def main(options: Options) -> None:
    """Measure, print and save."""
    if options.server:
        print(json.dumps(server_milliseconds()))
        return
    if options.only is not None:
        print(json.dumps(one(*options.only, options)))
        return
    print("| nodes | actors | queries per second | ms per query | kB sent | kB received | accuracy |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    results = []
    for nodes in options.nodes:
        for actors in options.actors:
            command = [sys.executable, __file__, "--only", str(nodes), str(actors)]
            command += ["--steps", str(options.steps), "--device", options.device]
            stdout = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            metrics = json.loads(stdout.splitlines()[-1])
            results.append(metrics)
            cells = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in metrics.values())
            print(f"| {' | '.join(cells)} |", flush=True)
    if options.save:
        machine = step_time.machine(step_time.Options())
        path = step_time.result_file("ray_actors", machine)
        path.write_text(
            json.dumps({"machine": machine, "results": results}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main(tyro.cli(Options))
