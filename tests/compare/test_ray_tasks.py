"""Runs of a comparison as tasks of Ray: equal results, processes that die, and tasks that are stopped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedstill.attacks.attack import ATTACKS
from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.compare import comparison_runner
from fedstill.compare.comparison import Comparison, plan_comparison, read_comparison_folder
from fedstill.compare.ray_tasks import RayTasks, run_on_ray
from fedstill.compare.run_workers import RunOutcome, RunStart
from fedstill.core.errors import ArgumentError, DeployError, RunFolderError
from fedstill.core.run_writer import lock_folder
from fedstill.report import write_report
from fedstill.report.comparison_page import write_comparison
from tests.support.comparison_files import QUICK, rows_without_seconds, run_rows
from tests.support.errors import raises_invalid
from tests.support.processes import PATIENCE

MORTAL = """
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from fedstill.methods.fedavg import FedAvg

@dataclass(frozen=True, kw_only=True)
class Mortal(FedAvg):
    marker: str = "none"
    def step(self, server, state, t):
        if self.marker == "none" or not Path(self.marker).exists():
            if self.marker != "none":
                Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(server, state, t)
"""


def compare(plan: Comparison, out: Path, jobs: int | str) -> None:
    comparison_runner.compare(plan, out, command="", report=write_report, jobs=jobs)
    write_comparison(out, read_comparison_folder(out))


@pytest.mark.usefixtures("ray_cluster")
def test_tasks_have_equal_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An attack follows each run, and one method is refused."""
    changes = {
        **QUICK,
        "nodes.models": ("mlp:8", "mlp:4"),
        "student.model": "mlp:8",
        "public.name": "held-out",
    }
    plan = plan_comparison(["fedkd", "standalone", "fedavg"], seeds=1, changes=changes)
    plan = dataclasses.replace(plan, leakage=LeakageConfig((ATTACKS["counts"](),)).to_table())
    compare(plan, tmp_path / "ray", jobs="ray")
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split("  ")[0] for line in lines if line.startswith(("run", "attack"))) == sorted(
        [f"{phase} {number} of 2" for phase in ("run", "attack") for number in (1, 2)]
    )
    compare(plan, tmp_path / "one", jobs=1)
    assert rows_without_seconds(tmp_path / "ray") == rows_without_seconds(tmp_path / "one")
    assert {row["method"]: row["status"] for row in run_rows(tmp_path / "ray")}["fedavg"] == "refused"
    assert not (tmp_path / "ray" / comparison_runner.TRAINED_FOLDER).exists()


@pytest.mark.usefixtures("ray_cluster")
def test_run_of_killed_process_starts_again_until_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method of the test's own module is found in Ray's processes."""
    (tmp_path / "mortal_lab.py").write_text(MORTAL)
    monkeypatch.syspath_prepend(tmp_path)
    options: dict[str, dict[str, Any]] = {
        "dies-once": {"name": "mortal_lab:Mortal", "marker": str(tmp_path / "marker")},
        "dies": {"name": "mortal_lab:Mortal"},
    }
    base = plan_comparison(["fedavg"], seeds=1, changes=QUICK)
    plan = dataclasses.replace(base, methods={**base.methods, **options})
    compare(plan, tmp_path / "out", jobs="ray")
    rows = {row["method"]: row for row in run_rows(tmp_path / "out")}
    assert (tmp_path / "marker").exists()
    assert rows["dies-once"]["status"] == rows["fedavg"]["status"] == "finished"
    assert rows["dies-once"]["accuracy"] == rows["fedavg"]["accuracy"]
    assert [*comparison_runner.read_not_run(tmp_path / "out")] == ["dies-seed0"]


@pytest.mark.usefixtures("ray_cluster")
def test_folder_in_use_stops_the_comparison(tmp_path: Path) -> None:
    plan = plan_comparison(["standalone"], seeds=1, changes=QUICK)
    (tmp_path / "out" / "standalone-seed0").mkdir(parents=True)
    (tmp_path / "out" / "compare.toml").write_text(f"# \n\n{plan.to_toml()}")
    with (
        lock_folder(tmp_path / "out" / "standalone-seed0", "run"),
        pytest.raises(RunFolderError, match="in use"),
    ):
        compare(plan, tmp_path / "out", jobs="ray")


def _wait_for_interrupt(folder: Path, number: int, start: Callable[[str], None]) -> RunOutcome:
    try:
        start("run")  # the comparison may stop before this returns
        for _ in range(int(PATIENCE / 0.05)):
            time.sleep(0.05)  # an interrupt comes between two calls
    except KeyboardInterrupt:
        (folder / f"{number}").touch()
    return RunOutcome()


@pytest.mark.usefixtures("ray_cluster")
def test_stopped_comparison_interrupts_its_tasks(tmp_path: Path) -> None:
    """A third task, for which there is no CPU, never starts. Ray chooses the two that do."""
    events = run_on_ray([1, 2, 3], partial(_wait_for_interrupt, tmp_path), RayTasks("ray"))
    started = [next(events) for _ in range(2)]
    assert [event for _, event in started] == 2 * [RunStart("run")]
    events.close()
    assert {int(file.name) for file in tmp_path.iterdir()} == {number for number, _ in started}


@pytest.mark.usefixtures("ray_cluster")
def test_refuses_runs_that_no_machine_can_hold() -> None:
    with raises_invalid("--jobs", "ray", "1000 CPUs"):
        next(run_on_ray([1], partial(_wait_for_interrupt, Path()), RayTasks("ray", cpus=1000)))


def test_refuses_what_ray_cannot_place(tmp_path: Path) -> None:
    for jobs, changes in (("two", {}), ("ray", {"engine.backend": "flare"})):
        plan = plan_comparison(["standalone"], seeds=1, changes={**QUICK, **changes})
        with raises_invalid("--jobs", jobs):
            compare(plan, tmp_path / "out", jobs=jobs)
    plan = plan_comparison(["standalone"], seeds=1, changes=QUICK)
    with pytest.raises(ArgumentError, match="devices"):
        comparison_runner.compare(
            plan, tmp_path / "out", command="", report=write_report, jobs="ray", devices=["cuda:0"]
        )
    assert not (tmp_path / "out").exists()


def test_missing_cluster_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nUse --address")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    plan = plan_comparison(["standalone"], seeds=1, changes=QUICK)
    with pytest.raises(DeployError, match="ray start"):
        compare(plan, tmp_path / "out", jobs="ray")
