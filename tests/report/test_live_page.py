"""The report of an unfinished run: progress, escaped texts, and the full report at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstill.core.errors import RunFolderError
from fedstill.core.progress import PROGRESS_FILE
from fedstill.report import write_report
from fedstill.report.figures import MAX_POINTS
from fedstill.report.tables import sparkline
from fedstill.runs import run
from tests.support.links import tiny
from tests.support.result_files import HOSTILE, a_result, measured, read, unfinished_run


def test_page_shows_progress_and_metrics(tmp_path: Path) -> None:
    steps = [(10, 60.0), (20, 81.5), (30, 80.0)]
    lines = [
        {"phase": "distillation", "step": step, "losses": {"gan": 1.0 / step}, "accuracy": value}
        for step, value in steps
    ]
    lines[-1] |= {"link_seconds_each": 0.12, "link_link": 3.0, "link_waiting": 0.0}
    page = read(measured(unfinished_run(tmp_path), lines))
    # a later snapshot
    assert "Accuracy so far 82.0%" in read(unfinished_run(tmp_path, note="accuracy 82.0 %")).text
    assert "not finished" in page.text
    assert "continues without west" in read(unfinished_run(tmp_path, excluded=["west"])).text
    assert "31 of 400" in page.text
    assert "Accuracy so far 80.0% best so far 81.5%" in page.text
    assert "about 6 min 9 s" in page.text  # 369 steps at 30 s for 30
    assert "120 ms in total: link 3.0 s" in page.text
    assert page.attributes("http-equiv") == ["Content-Security-Policy", "refresh"]
    assert "script" not in {tag for tag, _ in page.tags}


def test_page_of_stopped_run_shows_error(tmp_path: Path) -> None:
    assert (
        "The run stopped: node 'a' says no" in read(unfinished_run(tmp_path, error="node 'a' says no")).text
    )


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run"
    folder.mkdir()
    hostile = {
        "phase": HOSTILE,
        "note": HOSTILE,
        "waiting_for": [HOSTILE],
        "error": HOSTILE,
        "without": [HOSTILE],
    }
    about = dict.fromkeys(("title", "metric", "unit"), HOSTILE)
    losses = {"phase": "distillation", "step": 1, "losses": {HOSTILE: 1.0}, "accuracy": 3.0}
    local = [{"phase": "local", "node": HOSTILE, "step": step, "loss": 1.0} for step in (1, 2)]
    page = read(measured(unfinished_run(folder, **hostile, run_info=about), [losses, *local]))
    assert {"script", "img", "b"}.isdisjoint(tag for tag, _ in page.tags)
    assert page.text.count("<script>alert(1)</script>") > 5


def test_finished_run_has_full_report(tmp_path: Path) -> None:
    folder = unfinished_run(tmp_path)
    write_report(folder)
    (folder / "result.json").write_text(json.dumps(a_result()))
    assert "refresh" not in read(folder).attributes("http-equiv")
    assert not list(folder.glob("*.part"))


def test_rejects_folder_without_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        write_report(tmp_path)
    (tmp_path / PROGRESS_FILE).write_text("{")
    with pytest.raises(RunFolderError, match="progress file"):
        write_report(tmp_path)


def test_run_writes_progress_page(tmp_path: Path) -> None:
    results_exist = []

    def report(folder: Path) -> None:
        results_exist.append((folder / "result.json").exists())
        write_report(folder)

    out = tmp_path / "out"
    run.run(tiny("fedavg", {"rounds": 2}), out, command="", progress=False, report=report)
    assert set(results_exist) == {False}  # during the run only
    assert "FedAvg" in (out / "report.html").read_text()
    assert "not finished" in (out / "report.html").read_text()
    assert not (out / PROGRESS_FILE).exists()


def test_sparkline_has_limited_points_and_the_last_value() -> None:
    svg = sparkline([float(value) for value in range(1000)])
    points = svg.partition('points="')[2].partition('"')[0].split()
    assert len(points) <= MAX_POINTS + 1
    assert (points[0], points[-1]) == ("0.00,35.00", "100.00,5.00")
    assert sparkline([2.0, 2.0]).count(",35.00") == 2
