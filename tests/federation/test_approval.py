"""Approval of runs by owners, on real processes: unapproved runs, changed runs, small nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedstill.node.audit_log import FILE
from tests.support.audit_logs import edit, entries, security_events
from tests.support.processes import Command, Sites, sites, small

pytestmark = pytest.mark.waits
FEDKD = """
[method]
name = "fedkd"
student.epochs = 1
z_max = 10.0
[public]
name = "noise"
limit = 40
"""
OWNERS = '[nodes.policy]\napprove = "each run"\nmin_records = 100\nmin_nodes = 3\n'


def run(here: Sites, name: str = "first") -> str | dict[str, object]:
    """Run on a new server process, or resume; return the result or the reason that it stopped."""
    here.served = here.folder / f"server-{name}"
    here.served.mkdir(exist_ok=True)
    here.begin()
    return here.end()


def owner(here: Sites, node: str, *words: str) -> tuple[int, str]:
    """Return the output of ``fedstill node`` for a node's owner."""
    first, *others = words
    command = ["node", first, here.folder / "nodes" / node, *others]
    return Command(command, here.folder, [Path(__file__).parents[2]]).end()


def test_run_needs_approval_of_each_owner(tmp_path: Path) -> None:
    config = small(FEDKD + OWNERS)
    with sites(tmp_path, config) as here:
        here.start()
        value = run(here)
        assert isinstance(value, str)
        assert value.startswith("QueryRefused: ")
        for node in here.names:
            assert node in value
            assert entries(here.folder / "nodes" / node) == []
        (sha256,) = {
            run_id.replace(" ", "") for run_id in re.findall(r"run ((?:[0-9a-f]{4} ){16})waits", value)
        }
        assert len(sha256) == 64
        for node in here.names:
            code, out = owner(here, node, "approve", sha256[:32])
            assert (code, "approved" in out) == (0, True), out
        # A run with one changed option is another run, which no owner has approved.
        here.config = small(FEDKD.replace("epochs = 1", "epochs = 2") + OWNERS)
        value = run(here, "changed")
        assert isinstance(value, str)
        assert "waits until its owner approves it" in value
        assert sha256 not in value.replace(" ", "")
        here.config = config
        result = run(here)
        assert isinstance(result, dict), result
        for node in here.names:
            folder = here.folder / "nodes" / node
            assert {entry["query"] for entry in entries(folder, "response")} == {"count_labels", "predict"}
            value = [event["event"] for event in security_events(folder)]
            assert value == ["policy", "waits", "refused", "approved", "waits", "refused", "joined"]
        # A modified line of the log is reported by `log` and `check`.
        log = here.folder / "nodes" / here.names[0] / FILE
        edit(log, 'UPDATE entries SET line = replace(line, \'"part":"approved"\', \'"part":"rejected"\')')
        code, out = owner(here, here.names[0], "log")
        assert (code, "entry 4 is not as it was written" in out) == (2, True)
        code, out = owner(here, here.names[0], "check")
        assert (code, "entry 4 is not as it was written" in out) == (2, True)


def test_node_refuses_run_below_min_nodes(tmp_path: Path) -> None:
    with sites(
        tmp_path, small(FEDKD + OWNERS.replace("100", "100000").replace("each run", "policy"))
    ) as here:
        here.start()
        result = run(here)
        assert isinstance(result, str)
        assert "query 'join' by rule min_records: 100000, and this node has fewer" in result
        for node in here.names:
            assert node in result
            assert entries(here.folder / "nodes" / node) == []
            assert not list((here.folder / "nodes" / node / "runs").glob("*/*.safetensors"))
