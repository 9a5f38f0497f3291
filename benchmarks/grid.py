"""Check that the library chooses the fastest engine, over networks, numbers of nodes and batch sizes.

The library chooses an engine by rule, without measuring: a GPU stacks nodes. A CPU computes them at once,
except for networks of matrix products when there are several nodes per core. This benchmark times all engines
in alternation (``step_time.py``) and compares the chosen one with the fastest.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import step_time
import tyro
from step_time import PHASES, Timing

from fedstill.core.compute import Compute, EngineConfig
from fedstill.node.audit_log import AuditLog
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.runs.simulation import should_stack
from fedstill.tasks.classification import Classification


@dataclass(frozen=True)
class Options:
    """Options of the comparison over a grid."""

    models: tuple[str, ...] = ("mlp", "lenet5", "small-cnn:16", "resnet8:16")
    """Architectures, as in a run's config."""
    nodes: tuple[int, ...] = (3, 20)
    """K."""
    batch: tuple[int, ...] = (16, 64)
    """Inputs in a query, and examples in a local step."""
    rounds: int = 5
    """Timed rounds; each times every engine once."""
    device: str = "cpu"
    """A torch device."""
    threads: int = 0
    """CPU threads; 0 uses torch's default."""
    slower: float = 1.05
    """An engine counts as slower if it takes more than this many times as long as the fastest."""
    save: bool = False
    """Write the results to benchmarks/results."""

    def one(self, nodes: int, batch: int) -> step_time.Options:
        """Return the options of one point of the grid."""
        return step_time.Options(
            nodes=nodes,
            batch=batch,
            device=self.device,
            threads=self.threads,
            rounds=self.rounds,
            channels_last=True,
            generator_width=32,
            student_steps=1,
            student_batch=64,
        )


def times_the_fastest(timings: Mapping[str, Timing], engine: str) -> float:
    """Return the ratio of an engine's time to the fastest engine's in the same round, median over rounds."""
    rounds = zip(*(timings[each].seconds for each in step_time.ENGINES), strict=True)
    mine = zip(timings[engine].seconds, rounds, strict=True)
    return statistics.median(seconds / min(others) for seconds, others in mine)


def chosen_engine(options: step_time.Options, model: str, phase: str) -> str:
    """Return the engine that the library chooses; for distillation, with the nodes' convolutional critics."""
    compute = Compute(EngineConfig(device=options.device))
    nodes = step_time.make_nodes(options, model, compute, AuditLog())
    if phase == "distillation":
        method, task = options.fediod(), Classification(step_time.CLASSES)
        for node in nodes:
            method.prepare(node, NodeSetting(task, LocalConfig(), compute))
    return "stacked" if should_stack(compute, nodes) else "at-once"


def main(options: Options) -> int:
    """Measure, print, save; return 1 if the library's engine is slower somewhere."""
    Compute(options.one(3, 16).engine("one-by-one", "float32"))  # sets the number of threads
    where = step_time.machine(options.one(3, 16))
    print(f"{where['gpu'] or where['cpu']}, {where['threads']} threads, {where['date']}")
    print(f"Milliseconds per step (medians of {options.rounds} rounds).\n")
    print("| model | K | batch | phase | stacked | one by one | at once | chosen | times the fastest |")
    print("|---|---:|---:|---|---:|---:|---:|---|---:|")
    rows, slower = [], 0
    for model, nodes, batch in itertools.product(options.models, options.nodes, options.batch):
        for phase, make in PHASES.items():
            timings = step_time.measure(options.one(nodes, batch), make, model, "float32", step_time.ENGINES)
            engine = chosen_engine(options.one(nodes, batch), model, phase)
            times = times_the_fastest(timings, engine)
            slower += times > options.slower
            medians = {each: 1e3 * statistics.median(timings[each].seconds) for each in step_time.ENGINES}
            cells = " | ".join(f"{medians[each]:.1f}" for each in step_time.ENGINES)
            print(f"| {model} | {nodes} | {batch} | {phase} | {cells} | {engine} | {times:.2f} |", flush=True)
            case = {"model": model, "nodes": nodes, "batch": batch, "phase": phase}
            rows.append({**case, "way": engine, "milliseconds": medians, "times_the_quickest": times})
    print(f"\nMore than {options.slower:g} times the fastest: {slower} of {len(rows)}.")
    if options.save:
        content = {"machine": where, "options": asdict(options), "results": rows}
        path = step_time.result_file("grid", where)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"Saved as benchmarks/results/{Path(path).name}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
