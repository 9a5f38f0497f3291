"""Real faults: killed processes, frozen processes, full disks.

Nodes and server are separate processes; see support/processes.py. The handling of faults does not depend on
the transport; test_flare.py kills processes of NVIDIA FLARE.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.links import changed
from tests.support.processes import (
    FEDIOD,
    FEDKD,
    PATIENCE,
    STEPS,
    Sites,
    Unbroken,
    assert_same_metrics,
    report_time,
    sites,
    small,
    until,
)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Sites]:
    """Start three sites of a run with unlimited ``link.wait``, so that restarted nodes always respond."""
    # Delay each message, so that faults happen in the middle of a run.
    with sites(tmp_path, small(wait=PATIENCE), delay=0.01) as made:
        made.start()
        yield made


def stopped(three: Sites, *why: str) -> None:
    """Assert that the run has stopped, with the reason in one line."""
    text = three.end()
    assert isinstance(text, str), "the run did not stop"
    assert "\n" not in text
    assert not (three.served / "result.json").exists()
    for part in why:
        assert part in text


def marked(three: Sites) -> Callable[[], bool]:
    """Return whether the server has saved a checkpoint."""
    return (three.served / "state.safetensors").exists


def queries(three: Sites, least: int) -> Callable[[], bool]:
    return lambda: three.steps() >= least


def test_run_over_sockets_equals_simulation(three: Sites, unbroken: Unbroken) -> None:
    three.begin()
    assert_same_metrics(three, three.end(), unbroken)


# --- 1: a node is killed ------------------------------------------------------------------------------


@pytest.mark.slow
def test_node_killed_in_local_training_resumes(three: Sites, unbroken: Unbroken) -> None:
    three.begin()
    until((three.run_folder("node-2") / "training.safetensors").exists)
    three.kill("node-2")
    assert not three.steps()
    since = time.monotonic()
    three.start("node-2")
    stopped(three, "node-2", "train_locally")
    three.begin()
    assert_same_metrics(three, three.end(), unbroken)
    report_time("node killed in local training", since)


def test_node_killed_repeatedly_in_distillation_resumes(three: Sites, unbroken: Unbroken) -> None:
    for name, late in (("node-0", False), ("node-1", True)):
        three.begin()
        if late:  # responses since the checkpoint are repeated, without being counted
            until(marked(three))
        until(queries(three, three.steps() + (3 if late else 2)))
        three.kill(name)
        since = time.monotonic()
        three.start(name)
        stopped(three, name)
    three.begin()
    assert_same_metrics(three, three.end(), unbroken)
    report_time("node killed in distillation", since)


def test_node_killed_while_it_computes_features_resumes_with_those_in_its_cache(tmp_path: Path) -> None:
    """Its owner's node.toml names the backbone; each file of the cache has two examples."""
    features = {"backbone": "random-conv:8", "normalize": "public", "cache": str(tmp_path / "cache")}
    tables = {"nodes": {"models": ["linear"]}, "student": {"model": "linear"}, "features": features}
    config = changed(small(FEDKD, wait=PATIENCE), **tables)
    unbroken = Unbroken(config, tmp_path)
    with sites(tmp_path, config) as three:
        cached = lambda: {path.stat().st_ino for path in three.feature_files("node-1")}  # noqa: E731
        three.start()
        three.begin()
        until(cached)
        three.kill("node-1")
        before = cached()
        assert before
        assert not three.steps()
        three.start("node-1")
        assert_same_metrics(three, three.end(), unbroken)
        assert before < cached()


# --- 2: the server is killed --------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", ["local training", "before its first save", "late"])
def test_killed_server_resumes(three: Sites, unbroken: Unbroken, moment: str) -> None:
    three.begin(every=PATIENCE if moment == "before its first save" else 0.3)
    if moment == "local training":
        until((three.run_folder("node-1") / "training.safetensors").exists)
    elif moment == "before its first save":
        until(queries(three, 10))
        assert not marked(three)()
    else:
        until(marked(three))
        until(queries(three, 30))
    three.kill("server")
    since = time.monotonic()
    three.begin()
    assert_same_metrics(three, three.end(), unbroken)
    report_time(f"server killed, {moment}", since)


def test_server_killed_between_node_and_server_checkpoints_resumes(three: Sites, unbroken: Unbroken) -> None:
    three.begin(die_at_save=2)
    assert three.server is not None
    three.server.join(PATIENCE)
    assert three.server.exitcode == -signal.SIGKILL
    assert len(list(three.run_folder("node-0").glob("checkpoint-*"))) == 2
    assert (three.served / "state.safetensors").exists()
    three.begin()
    assert_same_metrics(three, three.end(), unbroken)


def test_resumes_after_all_processes_are_killed(three: Sites, unbroken: Unbroken) -> None:
    three.begin()
    until(marked(three))
    until(queries(three, 15))
    for name in ("server", *three.names):
        three.kill(name)
    since = time.monotonic()
    three.start()
    three.begin()
    assert_same_metrics(three, three.end(), unbroken)
    report_time("server and all nodes killed", since)


# --- 3 and 4: an absent or frozen node ----------------------------------------------------------------


@pytest.mark.slow
def test_suspended_node_stops_run_with_full_quorum(tmp_path: Path, unbroken: Unbroken) -> None:
    with sites(tmp_path, small(wait=6.0), delay=0.01) as three:
        three.start()
        three.begin()
        until(marked(three))
        three.signal("node-1", signal.SIGSTOP)
        since = time.monotonic()
        stopped(three, "node-1", "no answer within 6 s", "link.quorum wants 3")
        assert time.monotonic() - since < 60
        three.signal("node-1", signal.SIGCONT)
        three.begin()
        assert_same_metrics(three, three.end(), unbroken)
        report_time("node frozen, quorum 1", since)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_run_continues_without_node_and_readmits_it(tmp_path: Path, how: str) -> None:
    longer = FEDIOD.replace(f"steps = {STEPS}", "steps = 60")  # so that it returns before the end
    with sites(tmp_path, small(longer, wait=6.0, quorum=0.6), delay=0.03) as three:
        three.start()
        three.begin()
        until(marked(three))
        if how == "frozen":
            three.signal("node-1", signal.SIGSTOP)
        else:
            three.kill("node-1")
        since, before = time.monotonic(), three.steps()
        until(queries(three, before + 8))
        report_time(f"node {how}, quorum 0.6, until the others go on", since)
        without = {line["number"] for line in three.audit("server") if line["node"] == "node-0"}
        if how == "frozen":
            three.signal("node-1", signal.SIGCONT)
        else:
            three.start("node-1")
        since = time.monotonic()
        result = three.end()
        assert isinstance(result, dict), result
        excluded, back = result["events"]
        assert (excluded["node"], excluded["event"]) == ("node-1", "excluded")
        assert (back["node"], back["event"]) == ("node-1", "rejoined")
        # The events have the numbers of the first query without the node and of the first one with it again.
        numbers = {line["number"] for line in three.audit("server") if line["node"] == "node-1"}
        everyone = {line["number"] for line in three.audit("server") if line["node"] == "node-0"}
        away = everyone - numbers
        assert away
        assert away == set(range(excluded["number"], back["number"]))
        assert without - numbers <= away
        assert numbers | away == everyone == set(range(61))
        assert all(torch.isfinite(value).all() for value in three.student().values())
        # No query has released or trained its critic twice.
        mine = [(line["number"], line["part"]) for line in three.audit("node-1")]
        assert len(mine) == len(set(mine))


@pytest.mark.slow
def test_run_stops_below_quorum_and_resumes(tmp_path: Path, unbroken: Unbroken) -> None:
    with sites(tmp_path, small(wait=6.0, quorum=0.6), delay=0.01) as three:
        three.start()
        three.begin()
        until(marked(three))
        for name in ("node-0", "node-2"):
            three.kill(name)
        stopped(three, "1 of 3 nodes are left, link.quorum wants 2")
        three.start("node-0", "node-2")
        three.begin()
        # After one node was lost, the third may have received a query that the uninterrupted run does not
        # send.
        assert_same_metrics(three, three.end(), unbroken, audits=False)


@pytest.mark.slow
def test_resumed_run_excludes_unreachable_node(tmp_path: Path) -> None:
    with sites(tmp_path, small(wait=6.0, quorum=0.6), delay=0.01) as three:
        three.start()
        three.begin()
        until(marked(three))
        three.kill("server")
        three.kill("node-2")
        three.begin()
        result = three.end()
        assert isinstance(result, dict), result
        assert [(event["node"], event["event"]) for event in result["events"]] == [("node-2", "excluded")]
        assert "checkpoint" not in result["events"][0]["reason"]


# --- 7: the disk is full -------------------------------------------------------------------------------


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 128)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_node_with_full_disk_releases_nothing(three: Sites, unbroken: Unbroken, small_disk: Path) -> None:
    runs = three.folder / "nodes" / "node-1" / "runs"
    runs.symlink_to(small_disk)
    three.begin()
    until(marked(three))
    ballast = small_disk / "ballast"
    fill(ballast)
    since = time.monotonic()
    stopped(three, "node-1", "No space left on device")
    # The server has exactly the releases in the node's audit log.
    server_entries = [
        (line["number"], line["part"]) for line in three.audit("server") if line["node"] == "node-1"
    ]
    assert server_entries == [(line["number"], line["part"]) for line in three.audit("node-1")]
    assert "No space left on device" in three.log("node-1")
    three.begin()  # still full
    stopped(three, "node-1", "No space left on device")
    ballast.unlink()
    three.begin()
    assert_same_metrics(three, three.end(), unbroken)
    report_time("disk full, and space made", since)
