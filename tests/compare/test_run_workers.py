"""Runs of a comparison in worker processes and in array jobs: equal results, and processes that die."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedstill.attacks.attack import ATTACKS
from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.cli.main import main
from fedstill.compare import comparison_runner, run_workers
from fedstill.compare.comparison import Comparison, plan_comparison, read_comparison_folder
from fedstill.compare.run_workers import visible_devices
from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.core.run_writer import lock_folder, read_object
from fedstill.report import write_report
from fedstill.report.comparison_page import write_comparison
from tests.support.comparison_files import QUICK, rows_without_seconds, run_rows
from tests.support.errors import raises_invalid
from tests.support.processes import PATIENCE

SLOW: Mapping[str, Any] = {**QUICK, "nodes.local.epochs": 400.0}  # a minute, if nothing stops it


def run_at_once(plan: Comparison, out: Path, jobs: int = 2, **options: Any) -> None:
    comparison_runner.compare(plan, out, command="", report=write_report, jobs=jobs, **options)
    write_comparison(out, read_comparison_folder(out))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def exit_code(*words: str) -> int:
    try:
        main(list(words))
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def worker_of(folder: Path) -> int | None:
    """Return the process that executes runs of a comparison's folder, or None."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    words = ("compare", "--resume", str(folder), "--only-run", "stdin")
    found = [line.split()[0] for line in listed.splitlines() if all(word in line.split() for word in words)]
    return int(found[0]) if found else None


LOUD = """
from dataclasses import dataclass
from fedstill.methods.standalone import Standalone
print("imported")

@dataclass(frozen=True, kw_only=True)
class Loud(Standalone):
    def queries(self, setting):
        print({"run": 1})
        return super().queries(setting)
"""


def test_runs_at_once_have_equal_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained models are shared by the methods of a seed, an attack follows each run, one method is refused,
    and another one prints."""
    (tmp_path / "loud_lab.py").write_text(LOUD)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"fedkd": {"levels": 7}}
    changes = {
        **QUICK,
        "nodes.models": ("mlp:8", "mlp:4"),
        "student.model": "mlp:8",
        "public.name": "held-out",
    }
    plan = plan_comparison(["loud_lab:Loud", "fedkd", "fedavg"], seeds=2, changes=changes, options=options)
    plan = dataclasses.replace(plan, leakage=LeakageConfig((ATTACKS["counts"](),)).to_table())
    run_at_once(plan, tmp_path / "two", devices=["cpu", "cpu"])
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split("  ")[0] for line in lines if line.startswith(("run", "attack"))) == sorted(
        [f"{phase} {number} of 4" for phase in ("run", "attack") for number in range(1, 5)]
    )
    assert sum("left" in line for line in lines) >= 3  # an estimate from the first finished run on
    run_at_once(plan, tmp_path / "one", jobs=1)
    assert rows_without_seconds(tmp_path / "two") == rows_without_seconds(tmp_path / "one")
    assert {row["method"]: row["status"] for row in run_rows(tmp_path / "two")}["fedavg"] == "refused"
    assert not (tmp_path / "two" / comparison_runner.TRAINED_FOLDER).exists()


def test_workers_that_never_start_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs get the reason, after a few new processes."""
    starts, popen = [], subprocess.Popen
    monkeypatch.setattr(
        run_workers.subprocess, "Popen", lambda *given, **how: starts.append(1) or popen(*given, **how)
    )
    monkeypatch.setattr(run_workers.sys, "executable", "false")
    plan = plan_comparison(["standalone"], seeds=2, changes=QUICK)
    comparison_runner.compare(
        plan, tmp_path / "out", command="", report=write_report, jobs=1, devices=["cpu"]
    )
    reasons = comparison_runner.read_not_run(tmp_path / "out")
    assert list(reasons) == ["standalone-seed0", "standalone-seed1"]
    assert all("exit code 1" in reason for reason in reasons.values())
    assert len(starts) == 2 + run_workers.MAX_FAILED_STARTS


@pytest.mark.slow
def test_worker_that_dies_loses_its_run_only(tmp_path: Path) -> None:
    """The run that was killed resumes to the result of an uninterrupted one."""
    changes = {**QUICK, "nodes.local.epochs": 30.0}
    plan = plan_comparison(["standalone"], seeds=2, changes=changes)
    folder = tmp_path / "out"

    def kill_first() -> None:
        wait_until((folder / "standalone-seed0" / "config.toml").exists)
        pid = worker_of(folder)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_first)
    killer.start()
    run_at_once(plan, folder, devices=["cpu"], jobs=2)
    killer.join()
    lost = [row["seed"] for row in run_rows(folder) if row["status"] != "finished"]
    assert len(lost) == 1
    reason = read_object(folder / comparison_runner.NOT_RUN_FILE)[f"standalone-seed{lost[0]}"]
    assert "SIGKILL" in reason
    run_at_once(plan, folder, jobs=1)
    run_at_once(plan, tmp_path / "whole", jobs=1)
    assert rows_without_seconds(folder) == rows_without_seconds(tmp_path / "whole")


@pytest.mark.sample(1)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_workers_stop_with_their_parent(tmp_path: Path, sent: signal.Signals) -> None:
    folder = tmp_path / "out"
    file = tmp_path / "plan.toml"
    file.write_text(plan_comparison(["standalone"], changes=SLOW).to_toml())
    command = [sys.executable, "-m", "fedstill", "compare", str(file), "--out", str(folder), "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:
        wait_until(lambda: (folder / "standalone-seed0" / "config.toml").exists())
        parent.send_signal(sent)
        _, errors = parent.communicate(timeout=PATIENCE)
    wait_until(lambda: worker_of(folder) is None)
    if sent != signal.SIGKILL:
        assert parent.returncode == 130
        assert f"fedstill compare --resume {folder}" in errors


def test_run_in_use_stops_a_comparison(tmp_path: Path) -> None:
    plan, out = plan_comparison(["standalone", "fedavg"], changes=QUICK), tmp_path / "out"
    run_at_once(plan, out, jobs=1, only=["standalone"])
    (out / "fedavg-seed0").mkdir()
    with lock_folder(out / "fedavg-seed0", "run"), pytest.raises(RunFolderError, match="in use"):
        run_at_once(plan, out, only=["fedavg"])


def test_tasks_of_an_array_job_make_one_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs in one folder and one in another are merged, and are as those of one process."""
    file = tmp_path / "plan.toml"
    plan = plan_comparison(["standalone", "fedavg"], seeds=2, changes=QUICK)
    file.write_text(plan.to_toml())
    assert exit_code("compare", str(file), "--list", "--json") == 0
    assert '"run": 3' in capsys.readouterr().out
    here, there, whole = (str(tmp_path / name) for name in ("here", "there", "whole"))
    for number, out in ((1, here), (4, here), (2, there)):
        assert exit_code("compare", str(file), "--out", out, "--only-run", str(number), "--quiet") == 0
    assert not Path(here, comparison_runner.TRAINED_FOLDER).exists()
    assert exit_code("compare", str(file), "--out", here, "--merge", there) == 0  # run 3 is missing
    assert exit_code("compare", "--resume", here, "--only-run", "3", "--quiet") == 0
    assert exit_code("compare", str(file), "--out", whole, "--quiet") == 0
    assert exit_code("compare", "--resume", here, "--quiet") == 0
    assert rows_without_seconds(Path(here)) == rows_without_seconds(Path(whole))


def test_merge_refuses_another_comparison(tmp_path: Path) -> None:
    plans = [plan_comparison(["standalone"], changes={**QUICK, "split.nodes": n}) for n in (2, 3)]
    for plan in plans:
        run_at_once(plan, tmp_path / str(plan.base["split"]["nodes"]), jobs=1)
    with pytest.raises(RunFolderError, match=r"split\.nodes was 2 and is now 3"):
        comparison_runner.merge_comparisons(plans[0], tmp_path / "2", [tmp_path / "3"], command="")


def test_merge_refuses_other_data(tmp_path: Path) -> None:
    plan = plan_comparison(["standalone"], changes=QUICK)
    for name in ("a", "b"):
        run_at_once(plan, tmp_path / name, jobs=1)
    digests = tmp_path / "b" / comparison_runner.FINGERPRINTS_FILE
    digests.write_text(digests.read_text().replace('": "', '": "0'))
    with pytest.raises(RunFolderError, match="other data"):
        comparison_runner.merge_comparisons(plan, tmp_path / "a", [tmp_path / "b"], command="")


def write_folder(plan: Comparison, out: Path, finished: tuple[str, ...] = (), **reasons: str) -> Path:
    """Write a comparison's folder with empty results, and reasons of runs without one."""
    out.mkdir()
    (out / "compare.toml").write_text(f"# Made by: fedstill\n\n{plan.to_toml()}")
    for run in finished:
        (out / run).mkdir()
        (out / run / "result.json").write_text("{}")
    named = {name.replace("_", "-"): reason for name, reason in reasons.items()}
    (out / comparison_runner.NOT_RUN_FILE).write_text(json.dumps(named))
    return out


def test_merge_keeps_reasons_and_takes_all_seeds(tmp_path: Path) -> None:
    """The first folder's run was stopped, and the second has none; the third has another seed."""
    plan, more = (plan_comparison(["standalone"], seeds=count, changes=QUICK) for count in (1, 2))
    sources = [
        write_folder(plan, tmp_path / "a", standalone_seed0="stopped: no memory"),
        write_folder(plan, tmp_path / "b"),
        write_folder(more, tmp_path / "c", ("standalone-seed1",)),
    ]
    out = tmp_path / "out"
    assert comparison_runner.merge_comparisons(plan, out, sources, command="") == 1
    assert read_comparison_folder(out).seeds == (0, 1)
    assert comparison_runner.read_not_run(out) == {"standalone-seed0": "stopped: no memory"}
    finished = write_folder(plan, tmp_path / "d", ("standalone-seed0",))
    assert comparison_runner.merge_comparisons(more, out, [finished], command="") == 1
    assert comparison_runner.read_not_run(out) == {}


def test_wrong_numbers_of_processes_and_unused_devices_are_refused(tmp_path: Path) -> None:
    plan = plan_comparison(["standalone"], changes=QUICK)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"jobs": 0}, "--jobs"),
        ({"devices": "cuda:0"}, "devices"),
        ({"devices": ["cuda:0"]}, "devices"),  # the runs compute on the processor
    ]
    for options, name in wrong:
        with raises_invalid(name):
            comparison_runner.compare(plan, tmp_path / "out", command="", report=write_report, **options)
    assert not (tmp_path / "out").exists()


def test_options_of_which_one_would_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--list", "--jobs", "2"), ("--merge", "x", "--only-run", "1")):
        assert exit_code("compare", "standalone", "--out", str(tmp_path / "out"), *words) == 2
        assert f"none with {words[0]}" in capsys.readouterr().err
    assert exit_code("reproduce", "fediod-fig4", "--jobs", "2", "--out", str(tmp_path / "out")) == 2
    assert "a program computes fediod-fig4" in capsys.readouterr().err


def test_number_of_a_run_outside_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "standalone", "--out", str(tmp_path / "out"), "--only-run"]
    assert exit_code(*arguments, "2") == 2
    assert "expected 1 to 1" in capsys.readouterr().err
    assert exit_code(*arguments, "x") == 2
    assert not (tmp_path / "out").exists()


def test_worker_takes_its_own_group_then_a_free_one() -> None:
    """Three runs of seed 0 and two of seed 1 for two workers: both seeds' models are trained once."""

    class Unstarted(run_workers._Worker):
        def __init__(self) -> None:
            self.current, self._group = None, None
            self._process = subprocess.Popen(["true"], stdin=subprocess.PIPE, text=True)

    groups = {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    pending, workers = dict(groups), [Unstarted(), Unstarted()]
    taken = []
    for worker in (*workers, *workers, workers[1]):
        worker.start_next(pending, groups, workers)
        taken.append(worker.current)
    assert taken == [1, 4, 2, 5, 3]
    for worker in workers:
        worker._process.communicate()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert visible_devices("cuda:1") == {"CUDA_VISIBLE_DEVICES": "7"}
    for wrong in ("cuda:2", "gpu", "cuda:", "cuda:-1"):
        with pytest.raises(ArgumentError):
            visible_devices(wrong)
