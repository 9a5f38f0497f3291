"""Overhead of the library per query: calls, copies and transactions, counted and timed.

The response costs nothing to compute: a node slices its input. Inputs and gradients pass through federation,
request handler, gate and audit log. Counts are the same on every machine, so that a test can check them
(tests/test_overhead.py); times are not.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.federation.inprocess import InProcess
from fedstill.node.audit_entries import Entry
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.digests import digest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting, NodeSide
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.protocol.queries import Query
from fedstill.tasks.classification import Classification

CLASSES = 10
COPIES = ("clone", "_to_copy", "copy_", "cat", "stack")  # torch operations


@dataclass(frozen=True)
class Options:
    """Overhead of a query whose response costs nothing to compute."""

    nodes: int = 20
    """Number of queried nodes."""
    batch: int = 64
    """Inputs of 1 x 28 x 28 in the query."""
    rounds: int = 30
    """Queries that are timed."""


@dataclass(frozen=True)
class Counts:
    """Counts of one query to one node, forward and backward."""

    calls: float
    """Calls of Python functions."""
    operations: float
    """torch operations."""
    copied: float
    """Bytes that torch copies, relative to the bytes of the query."""
    transactions: float
    """Transactions of the audit log that write."""


class _Operations(TorchDispatchMode):
    """Counts torch operations, and the bytes of those that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if func.overloadpacket.__name__ in COPIES and isinstance(out, torch.Tensor):
            self.copied += out.nbytes
        return out


@contextmanager
def free_query(nodes: int, batch: int) -> Iterator[tuple[Callable[[], None], torch.Tensor, AuditLog]]:
    """Yield a function that queries nodes and backpropagates, its input, and the audit log.

    The nodes' response costs nothing to compute.
    """
    with tempfile.TemporaryDirectory() as folder:
        compute = Compute(EngineConfig(batching="one-by-one", precision="float32"))
        audit = AuditLog(Path(folder) / "overhead.sqlite", durable=False)
        data = TensorData(torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64))
        all_nodes = []
        for k in range(nodes):
            name = f"node-{k}"
            all_nodes.append(Node(name, data, torch.nn.Identity(), Gate(name, PolicyConfig(), audit), k))

        def echo(node: NodeView, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"logits": x.flatten(1)[:, :CLASSES] * 1.0}

        query = Query(echo, {"x": INPUTS}, {"logits": LOGITS}, ("x",))
        setting = NodeSetting(Classification(CLASSES), LocalConfig(), compute)
        side = NodeSide({"echo": query}, setting=setting)
        federation = InProcess(all_nodes, [[node] for node in all_nodes], side, compute)
        x = torch.zeros(batch, 1, 28, 28, requires_grad=True)

        def call() -> None:
            federation.query("echo", x=x)["logits"].sum().backward()  # type: ignore[no-untyped-call]

        yield call, x, audit
        audit.close()


def count(nodes: int, batch: int = 8) -> Counts:
    """Return the counts of one query to this many nodes."""
    calls = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler does not see calls in other threads
    try:
        with free_query(nodes, batch) as (call, x, audit):
            call()  # the first call creates what later calls reuse
            statements: list[str] = []
            audit._database.connection.set_trace_callback(statements.append)
            with _Operations() as operations:
                call()
            audit._database.connection.set_trace_callback(None)
            collecting = gc.isenabled()
            gc.disable()  # garbage collection, with callbacks of other packages, is not part of a query
            sys.setprofile(called)
            try:
                call()
            finally:
                sys.setprofile(None)
                if collecting:
                    gc.enable()
    finally:
        torch.set_num_threads(threads)
    copied, transactions = operations.copied / x.nbytes, statements.count("BEGIN IMMEDIATE")
    return Counts(calls, operations.operations, copied, transactions)


def counts_a_node(few: int = 4, many: int = 12) -> Counts:
    """Return the counts that one more node adds."""
    less, more = asdict(count(few)), asdict(count(many))
    return Counts(**{name: (more[name] - less[name]) / (many - few) for name in less})


def times(options: Options, now: Callable[[], float] = time.process_time) -> dict[str, float]:
    """Return microseconds of the processor per node: of the query, its parts, and the same without a
    federation. One thread, and the minimum over rounds, as other work on the machine only adds.
    """
    torch.set_num_threads(1)
    with free_query(options.nodes, options.batch) as (call, x, audit):

        def by_hand() -> None:
            z = torch.stack([x.flatten(1)[:, :CLASSES] * 1.0 for _ in range(options.nodes)])
            z.sum().backward()  # type: ignore[no-untyped-call]

        def write() -> None:
            for k in range(options.nodes):
                for part in ("response", "gradient"):
                    about = ("run", f"node-{k}", f"node-{k}", -1, "echo", part)
                    audit.append(Entry(*about, down={"inputs": 1}, up={"logits": 1}))

        parts: dict[str, Callable[[], object]] = {
            "query": call,
            "the same by hand": by_hand,
            "of it two entries of the log": write,
            "of it digest of x": lambda: digest("predict_logits", {"x": x}),
        }
        seconds: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(options.rounds):
            for name, part in parts.items():
                start = now()
                part()
                seconds[name].append(now() - start)
    return {name: min(each) / options.nodes * 1e6 for name, each in seconds.items()}


def main(options: Options) -> None:
    """Count, time and print."""
    for name, value in asdict(counts_a_node()).items():
        print(f"{name:>12} per additional node: {value:.1f}")
    for name, value in times(options).items():
        print(f"{name}: {value:.0f} us per node")


if __name__ == "__main__":
    main(tyro.cli(Options))
