"""Nodes behind real messages in this process, and runs over them."""

from __future__ import annotations

import random
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedstill.core.checkpoint import load_state
from fedstill.core.config_tables import to_table
from fedstill.core.progress import ProgressBar
from fedstill.federation.transport import Link, LinkError
from fedstill.node.node_service import NodeService
from fedstill.protocol.wire_format import unpack
from fedstill.runs import deployment
from fedstill.runs.remote_run import RemoteRun
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import RunSpec, from_dict, to_dict
from tests.support.digits_world import config_of


class Loopback:
    """Nodes of this process behind real messages.

    Args:
        serve: by node, the function that replies to a message.
    """

    def __init__(self, serve: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.nodes: Sequence[str] = list(serve)
        self._serve = serve
        self._alone = threading.Lock()  # nodes of one process share torch's global generator

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        with self._alone:
            return self._serve[node](message)


Serve = Callable[[bytes], bytes]
NAMES = ("node-0", "node-1", "node-2")


def tiny(
    method: str,
    options: Mapping[str, Any] | None = None,
    privacy: Mapping[str, Any] | None = None,
    **link: Any,
) -> RunSpec:
    chosen = config_of(method, **(options or {}))
    needs = chosen.needs()
    are_rows, model = needs.table_rows or needs.vectors, "linear" if needs.vectors else "mlp:8"
    return from_dict(
        {
            "task": {"name": "tabular" if are_rows else "classification"},
            "data": {"name": "wine" if are_rows else "digits"},
            "split": {"nodes": 3},
            "nodes": {
                "models": [model],
                "local": {"epochs": 1, "batch": 32, "lr": 5e-3},
                "policy": {"outputs_only": False},
                "privacy": dict(privacy or {}),
            },
            "student": {"model": model},
            "public": {"name": "held-out"} if needs.public or needs.public_labels else {},
            "evaluation": {"centralized": False, "samples": 2},
            "engine": {"batching": "one-by-one"},
            "method": to_table(chosen),
            "link": link,
        }
    )


class Live(RemoteRun):
    """A run at the server with a fixed output folder."""

    def __init__(self, config: RunSpec, link: Link, name: str, folder: Path) -> None:
        super().__init__(config, link, name)
        self.folder = folder

    def run(self, out: Path | None = None, *, bars: ProgressBar | None = None) -> dict[str, Any]:
        return super().run(self.folder if out is None else out, bars=bars)


class Away:
    """The same run over messages: every node has its own folder and host.

    Args:
        config: configuration of the run.
        folder: folder of the nodes and the server.
        bend: by node, a function that wraps the node's ``serve`` and may change its replies.
    """

    def __init__(
        self, config: RunSpec, folder: Path, bend: Mapping[str, Callable[[Serve], Serve]] | None = None
    ) -> None:
        self.config, self.folder = config, folder
        deployment.write_nodes(config, build_simulation(config)[0], folder / "nodes")
        self.hosts = {name: NodeService(folder / "nodes" / name) for name in NAMES}
        serve = {name: host.serve for name, host in self.hosts.items()}
        self.serve = {name: (bend or {}).get(name, lambda each: each)(each) for name, each in serve.items()}
        (folder / "server").mkdir()

    def live(self, link: Link | None = None) -> Live:
        return Live(self.config, link or Loopback(self.serve), "one", self.folder / "server")

    def same_nodes(self, experiment: Simulation) -> None:
        """Assert that the nodes' networks equal those of the same run in one process."""
        checkpoint = load_state(self.folder / "server/state.safetensors")["checkpoint"]
        for node in experiment.nodes:
            path = self.folder / "nodes" / node.name / f"runs/one/checkpoint-{checkpoint}.safetensors"
            modules = load_state(path)["node"]["modules"]
            for role, module in node.modules.items():
                for key, value in module.state_dict().items():
                    assert torch.equal(modules[role][key], value), (node.name, role, key)


def here(config: RunSpec) -> tuple[Simulation, dict[str, Any]]:
    experiment, _ = build_simulation(config)
    return experiment, experiment.run()


class RecordingLink(Loopback):
    """Link that records the operations sent to each node; nodes in ``away`` are unreachable."""

    def __init__(self, hosts: dict[str, NodeService], away: tuple[str, ...] = ()) -> None:
        super().__init__({name: host.serve for name, host in hosts.items()})
        self.away, self.calls = away, list[tuple[str, str]]()

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        self.calls.append((node, unpack(message)[0]["operation"]))
        if node in self.away:
            raise LinkError("no way")
        return super().call(node, message, seconds)

    def times(self, do: str) -> int:
        return sum(operation == do for _, operation in self.calls)


def nodes(config: RunSpec, folder: Path, **changes: Any) -> dict[str, NodeService]:
    """Return hosts of a simulation's nodes; ``changes`` replace values in their node.toml."""
    deployment.write_nodes(config, build_simulation(config)[0], folder / "nodes")
    for node in NAMES:
        file = folder / "nodes" / node / "node.toml"
        text = file.read_text()
        for name, value in changes.items():
            text, count = re.subn(rf"(?m)^{name} = (\[[^\]]*\]|.*)$", f"{name} = {value}", text)
            assert count == 1
        file.write_text(text)
    return {name: NodeService(folder / "nodes" / name) for name in NAMES}


def live(config: RunSpec, link: Loopback, folder: Path) -> Live:
    (folder / "server").mkdir(exist_ok=True)
    return Live(config, link, "one", folder / "server")


def changed(config: RunSpec, **tables: dict[str, Any]) -> RunSpec:
    """Return a configuration with some values of some tables replaced."""
    table = to_dict(config)
    for name, values in tables.items():
        table[name] = {**table[name], **values}
    return from_dict(table)


SCHEMA = """
target = "ill"
columns = [
    { name = "age", range = [0, 100], missing = true },
    { name = "ward", type = "category", categories = ["a", "b", "c"] },
    { name = "ill", type = "category", categories = ["no", "yes"] },
]
"""


def run_of(folder: Path, method: str) -> RunSpec:
    """Return a run on a folder of tables, one per node, with a quarter of the rows as test data."""
    draw, tables = random.Random(0), folder / "hospitals"
    tables.mkdir()
    (tables / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    for name in NAMES:
        rows = ["age,ward,ill,split"]
        for number in range(40):
            age = draw.randrange(101)
            ill, part = "yes" if age > 50 else "no", "test" if number % 4 == 0 else "train"
            rows.append(f"{age if number % 9 else ''},{draw.choice('abc')},{ill},{part}")
        (tables / f"{name}.csv").write_text("\n".join(rows), encoding="utf-8")
    local = {"epochs": 3, "batch": 8}
    options = {"fediod": {"steps": 4, "batch": 8}, "fedavg": {"rounds": 2}}[method]
    return from_dict(
        {
            "task": {"name": "tabular"},
            "data": {"name": str(tables)},
            "split": {"name": "column", "column": "site", "nodes": 0},
            "nodes": {"models": ["mlp:8"], "local": local, "policy": {"outputs_only": method == "fediod"}},
            "student": {"model": "mlp:8"},
            "method": {"name": method, **options},
            "engine": {"batching": "one-by-one"},
            "evaluation": {"every": 0, "centralized": False},
        }
    )


def hosts(config: RunSpec, folder: Path) -> dict[str, NodeService]:
    """Return the hosts of a run's nodes, each with its own csv in its own folder."""
    made = nodes(config, folder, source='"csv"', path='"own.csv"')
    for name in made:
        shutil.copy(folder / "hospitals" / f"{name}.csv", folder / "nodes" / name / "own.csv")
    return made
