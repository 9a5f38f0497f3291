"""Tables of a run and a comparison for tasks with several metrics, and time spent on communication."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedstill.compare import comparison as compare
from fedstill.compare.comparison import Comparison
from fedstill.core.run_writer import write_text
from fedstill.report import run_tables, write_report
from fedstill.report.comparison_page import write_comparison
from fedstill.report.comparison_records import summarize
from fedstill.report.comparison_tables import comparison_latex, comparison_markdown
from fedstill.report.records import MAIN, Record, Result
from fedstill.report.tables import format_difference, format_record
from fedstill.report.terminal import print_table
from fedstill.runs.spec import PaperMetric
from fedstill.tasks.classification import ClassificationConfig
from tests.support import audit_logs
from tests.support.comparison_files import printed as print_comparison
from tests.support.comparison_files import records
from tests.support.golden import Golden
from tests.support.result_files import Page, a_folder, a_result, measured, printed, read

FIGURES = [
    {"key": "dice", "title": "Dice", "unit": "%", "digits": 1, "better": "higher"},
    {"key": "sensitivity", "title": "Sens.", "unit": "%", "digits": 1, "better": "higher"},
    {"key": "specificity", "title": "Spec.", "unit": "%", "digits": 1, "better": "higher"},
    {"key": "hd95", "title": "HD95", "unit": "px", "digits": 1, "better": "lower"},
]


def by_key(*values: float | None) -> dict[str, float | None]:
    return dict(zip((metric["key"] for metric in FIGURES), values, strict=True))  # type: ignore[misc]


def over_nodes(*metrics: tuple[float, float]) -> dict[str, Any]:
    each = {"mean": 0.0, "std": 0.0, "per_node": [None, None]}
    return {
        str(metric["key"]): {**each, "mean": mean, "std": std, "per_node": [mean - std, mean + std]}
        for metric, (mean, std) in zip(FIGURES, metrics, strict=True)
    }


def segmented() -> dict[str, Any]:
    """Return FedIOD's Table 2 as a run's result; the student's specificity is missing."""
    result = a_result()
    student = by_key(75.38, 79.47, None, 11.76)
    result.update(kind="map", metric="dice", metrics=FIGURES, **student)
    result["student"] = {"model": "unet", "parameters": 9, **student}
    result["standalone"] = over_nodes((65.03, 3.31), (69.27, 4.72), (99.35, 0.15), (24.61, 3.62))
    result["ensemble"] = None
    result["centralized"] = by_key(74.85, 79.83, 99.55, 12.85)
    return result


def test_terminal_shows_all_metrics_of_the_paper() -> None:
    text = printed(segmented())
    assert re.search(r"Dice % +sens\. % +spec\. % +HD95 ↓ px", text)
    assert re.search(r"standalone mean +65\.0 ± 3\.3 +69\.3 ± 4\.7 +99\.3 ± 0\.1 +24\.6 ± 3\.6", text)
    assert re.search(r"student \(FedIOD\) +75\.4 +79\.5 +- +11\.8", text)
    assert re.search(r"centralized +74\.8 +79\.8 +99\.5 +12\.8", text)
    assert "accuracy" not in text.lower()


def test_page_shows_metrics_of_the_task(tmp_path: Path, golden: Golden) -> None:
    folder = a_folder(tmp_path, segmented())
    lines = [{"phase": "distillation", "step": step, "losses": {}, "dice": 60.0 + step} for step in (1, 2)]
    measured(folder, lines)
    page = read(folder)
    golden("run-page-of-maps", page.lines)
    for expected in (
        "Student Dice 75.4%",
        "Gain over standalone +10.3 points",
        "65.0% ± 3.3 69.3% ± 4.7 99.3% ± 0.1 24.6 px ± 3.6",
        "75.4% 79.5% not measured 11.8 px",
        "north small-cnn 24,330 703 61.7%",
    ):
        assert expected in page.text, expected
    assert "ccuracy" not in page.text
    assert any(
        label.startswith("Dice on the test data over 2 steps.") for label in page.attributes("aria-label")
    )


def test_page_counts_test_patients(tmp_path: Path) -> None:
    result = segmented()
    result["data"] |= {"test_cases": 22, "case": "patient"}
    text = read(a_folder(tmp_path, result)).text
    assert "Student Dice 75.4% on 22 test patients (360 examples)" in text


def test_site_tables_have_columns_of_sites(tmp_path: Path) -> None:
    own = {"breast": by_key(77.92, 1, 2, 12.34), "<liver>": by_key(None, 1, 2, None)}
    sites = {"names": ["breast", "<liver>"], "global_model": {"breast": by_key(80.48, 1, 2, 11.22)},
             "nodes": {"north": own}, "centralized": None}  # fmt: skip
    text = read(a_folder(tmp_path, {**segmented(), "sites": sites})).text
    assert "Dice % breast <liver> student 80.5 not measured north 77.9 not measured" in text
    assert "HD95 ↓ px breast <liver> student 11.2 not measured north 12.3 not measured" in text
    assert "centralized 7" not in text[text.index("Metrics by site") : text.index("Other metrics by site")]


def test_findings_table_shows_each_finding(tmp_path: Path, golden: Golden) -> None:
    labels = {"names": ["Effusion", "<Mass>"], "global_model": [70.0, None], "centralized": [80.0, 60.0],
              "nodes": {"north": [60.0, None], "south": [50.0, 40.0]}}  # fmt: skip
    auc = [{"key": "auc", "title": "AUC", "unit": "%", "digits": 1, "better": "higher"}]
    result = {**a_result(), "kind": "labels", "metric": "auc", "metrics": auc, "labels": labels}
    source = write_report(a_folder(tmp_path, result)).read_text(encoding="utf-8")
    page = Page(source)
    golden("run-page-of-findings", page.part("AUC of each finding", "AUC over"))
    text = page.text
    assert "Effusion 70.0% 80.0% 55.0%" in text  # the mean of 60 and 50
    assert "<Mass> not measured 60.0% 40.0%" in text  # of the one node that has a value
    row = source[source.index(">Effusion<") : source.index("&lt;Mass&gt;</th>")]
    assert 'width="70.00%"' in row
    assert '<line class="centralized" x1="80.00%" x2="80.00%"' in row
    assert '<line class="mean" x1="55.00%" x2="55.00%"' in row
    assert row.count('class="node"') == 2


def test_result_without_metrics_has_accuracy() -> None:
    assert Result().metric.title == "Accuracy"
    metrics = Result.from_record({"metric": "hd95", "metrics": FIGURES}).metrics
    assert [metric.key for metric in metrics] == ["hd95", "dice", "sensitivity", "specificity"]
    hd95 = Result.from_record({"metric": "dice", "metrics": FIGURES}).metrics[3]
    assert format_record(hd95, None) == "not measured"
    assert format_record(hd95, Record(model=MAIN, metric="hd95", value=24.61, std=3.62)) == "24.6 px ± 3.6"
    assert format_difference(hd95, -1.09) == "-1.1"


# --- comparisons ---

PAPER = (
    PaperMetric(method="fediod", metric="dice", value=75.38, source="FedIOD, Table 2"),
    PaperMetric(method="fediod", metric="hd95", value=111.76, source="FedIOD, Table 2"),
)


def a_plan(seeds: int) -> Comparison:
    table = {
        "methods": ["standalone", "fedavg", "fediod"],
        "seeds": seeds,
        "base": {"task": {"name": "segmentation"}, "data": {"name": "mine"}},
        "paper": [vars(metric) for metric in PAPER],
    }
    return compare._build_comparison(table, "mri", {})


def write_run(folder: Path, central: dict[str, float | None], **changes: Any) -> None:
    folder.mkdir(parents=True)
    result = {**segmented(), "standalone": None, **central, "student": central, "queries": 3, **changes}
    (folder / "result.json").write_text(json.dumps(result))
    line = {"phase": "distillation", "step": 4, "dice": central["dice"]}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path / "compare.toml", f"# Made by: fedstill compare mri.toml\n\n{a_plan(1).to_toml()}")
    own = over_nodes((65.0, 3.0), (69.0, 4.0), (99.0, 0.5), (24.0, 3.5))
    write_run(tmp_path / "standalone-seed0", by_key(65.0, 69.0, 99.0, 24.0), local=own, student=None)
    own_fedavg = {**over_nodes((70.0, 1), (71.0, 1), (98.0, 1), (20.0, 1)), "share": {"mean": 72.5}}
    write_run(tmp_path / "fedavg-seed0", by_key(74.0, 79.0, None, 10.0), local=own_fedavg)
    write_run(tmp_path / "fediod-seed0", by_key(75.0, 78.0, 99.6, 11.0), local=None)
    return tmp_path


def test_best_method_is_per_metric(folder: Path) -> None:
    for method in ("standalone", "fedavg", "fediod"):  # equal in all seeds: no variance between seeds
        shutil.copytree(folder / f"{method}-seed0", folder / f"{method}-seed1")
    [two] = summarize(folder, a_plan(2)).settings
    assert not any(two.significantly_best_labels(metric) for metric in two.metrics), (
        "two seeds may agree by chance"
    )
    for method in ("standalone", "fedavg", "fediod"):
        shutil.copytree(folder / f"{method}-seed0", folder / f"{method}-seed2")
    [setting] = summarize(folder, a_plan(3)).settings
    best = {metric.key: setting.significantly_best_labels(metric) for metric in setting.metrics}
    # Lower HD95 is better; only one student has a specificity, so there is no best.
    assert best == {"dice": {"fediod"}, "sensitivity": {"fedavg"}, "specificity": set(), "hd95": {"fedavg"}}


def test_markdown_has_all_metrics_and_published_ones(folder: Path) -> None:
    lines = comparison_markdown(summarize(folder, a_plan(1))).splitlines()
    head = (
        "| method | evaluated model | Dice | local Dice | sens. | spec. | HD95 ↓ px | bytes up | down "
        "| queries |"
    )
    assert any(line.startswith(head) and "paper, HD95 | gap, HD95 |" in line for line in lines)
    start = "| Standalone | nodes | 65.0 ± 3.0 | - | 69.0 ± 4.0 | 99.0 ± 0.5 | 24.0 ± 3.5 |"
    assert any(line.startswith(start) for line in lines)  # over nodes, as there is one seed
    assert any(line.startswith("| FedAvg | student | 74.0 | 72.5 | 79.0 | - | 10.0 |") for line in lines)
    [fediod] = [line for line in lines if line.startswith("| FedIOD |")]
    assert fediod.endswith(" 75.4 | -0.4 | 111.8 | -100.8 |")


def test_latex_and_page_have_a_column_per_metric(folder: Path, golden: Golden) -> None:
    summary = summarize(folder, a_plan(1))
    text = comparison_latex(summary)
    golden("comparison-of-maps", f"{text}\n\n{comparison_markdown(summary)}")
    assert "Dice & Local Dice & Sens. & Spec. & HD95" in text
    assert "\\textbf" not in text  # one seed gives no significance
    path = write_comparison(folder, a_plan(1))
    page = Page(path.read_text(encoding="utf-8"))
    assert "75.0 - 78.0 99.6 11.0 80.2 kB 72.0 kB 3 192 75.4 -0.4 111.8 -100.8" in page.text
    golden("comparison-page-of-maps", page.lines)
    assert "ccuracy" not in page.text


def test_csv_has_a_column_per_metric(folder: Path) -> None:
    write_comparison(folder, a_plan(1))
    [run] = [row for row in records(folder / "compare.csv") if row["method"] == "fedavg"]
    expected = {"dice": "74.0", "local_dice": "72.5", "local_dice_all_tests": "70.0", "centralized": "74.85"}
    assert (
        run.items() >= {**expected, "hd95": "10.0", "local_hd95": "20.0", "centralized_hd95": "12.85"}.items()
    )
    assert run["specificity"] == ""  # not measured, so there is no number
    [row] = [row for row in records(folder / "compare-summary.csv") if row["method"] == "fediod"]
    assert (row["hd95_mean"], row["paper_hd95"], row["dice_mean"]) == ("11.0", "111.76", "75.0")
    assert float(row["hd95_gap"]) == pytest.approx(-100.76)


@pytest.mark.parametrize("width", [80, 240])
def test_terminal_prints_every_metric(folder: Path, width: int) -> None:
    text = print_comparison(summarize(folder, a_plan(1)), width)
    for metric in ("99.6", "11.0", "24.0 ± 3.5", "111.8", "-100.8"):
        assert metric in text, metric


# --- one class per input ---


def classified() -> dict[str, Any]:
    """Return the result of a two-class task with AUC as main metric; most of 20 examples are ill."""
    task = ClassificationConfig(metric="auc").make(2)
    metrics = [asdict(metric) for metric in task.metrics]
    keys = [metric.key for metric in task.metrics]
    result = a_result()
    student = dict(zip(keys, (88.0, 90.0, 77.0, 76.0, 85.0, 4.0), strict=True))
    majority = dict(zip(keys, (50.0, 85.0, 50.0, 46.0, 85.0, 0.0), strict=True))
    result.update(metric="auc", metrics=metrics, **student, majority=majority, standalone=None, ensemble=None)
    result["centralized"] = dict.fromkeys(keys)
    result["data"] |= {"classes": ["clear", "<ill>"]}
    result["confusion"] = [[2, 1], [0, 17]]
    result["calibration"] = [
        {"confidence": 55.0, "accuracy": 50.0, "examples": 2},
        {"confidence": 98.0, "accuracy": 100.0, "examples": 18},
    ]
    return result


def test_main_metric_is_first_and_majority_class_is_baseline(tmp_path: Path) -> None:
    text = printed(classified())
    # The terminal shows short names, with the main metric first.
    assert re.search(r"AUC % +accuracy % +balanced acc\. %\s", text)
    assert re.search(r"student \(FedIOD\) +88\.0 +90\.0 +77\.0\s", text)
    assert re.search(r"majority class +50\.0 +85\.0 +50\.0\s", text)
    page = read(a_folder(tmp_path, classified()))
    assert "Student AUC 88.0%" in page.text
    assert "50.0% 85.0% 50.0% 46.0% 85.0% 0.0%" in page.text


def test_page_has_confusion_matrix_and_reliability_diagram(tmp_path: Path, golden: Golden) -> None:
    page = read(a_folder(tmp_path, classified()))
    golden("run-page-of-classes", page.lines)
    assert "True class clear <ill> Recall clear 2 1 66.7% <ill> 0 17 100.0%" in page.text
    expected = "Reliability diagram: confidence 55.0%, accuracy 50.0%; confidence 98.0%, accuracy 100.0%."
    assert expected in page.attributes("aria-label")
    del (result := classified())["confusion"], result["calibration"]
    (other := tmp_path / "older").mkdir()
    assert "Predictions of the student" not in read(a_folder(other, result)).text


def test_intervals_are_below_main_metric_and_terminal_table(tmp_path: Path) -> None:
    intervals = {"level": 95, "draws": 400, "cases": 20, "global_model": [71.25, 97.04], "nodes": None,
            "ensemble": None, "centralized": None}  # fmt: skip
    result = {**classified(), "intervals": intervals}
    assert "intervals: student (FedIOD) 71.2 to 97.0 (95% interval over 20 test cases)" in " ".join(
        printed(result).split()
    )
    text = read(a_folder(tmp_path, result)).text
    assert "Student AUC 88.0% on 360 test examples; 95% interval 71.2 to 97.0" in text
    assert "88.0% 71.2 to 97.0 90.0% 77.0%" in text
    assert "95% interval over 20 test cases" in text
    assert "intervals" not in printed(classified())


# --- communication with nodes in the report and the terminal -----------------------------------------


RESULT: dict[str, Any] = {
    "name": "clinics",
    "title": "FedIOD",
    "evaluated_model": "student",
    "accuracy": 90.0,
    "link": {
        "messages": 10,
        "seconds_each": 0.5,
        "bytes_each": 2000.0,
        "share": 0.125,
        "starting": 4.0,
        "training": 1.0,
        "nodes": 2.0,
        "waiting": 0.5,
        "link": 2.5,
        "server": 10.0,
    },
    "events": [
        {"node": "north", "number": 7, "event": "excluded", "reason": "logits hold <NaN>"},
        {"node": "east", "number": 9, "event": "rejoined", "reason": ""},
    ],
}


def test_run_in_one_process_has_no_communication_time() -> None:
    assert run_tables.time_parts(Result()) == []
    assert run_tables.message_cost_text(Result()) is None
    assert run_tables.time_parts_text(Result()) is None


def test_time_bar_has_parts_and_accessible_text() -> None:
    bar = str(run_tables.time_bar(Result.from_record(RESULT)))
    assert 'class="part link" x="37.50%" width="12.50%"' in bar
    assert 'class="part server" x="50.00%" width="50.00%"' in bar
    assert 'aria-label="start and end 20.0%; local training 5.0%; nodes 10.0%; waiting 2.5%' in bar


def test_terminal_prints_time_by_activity_and_excluded_nodes(golden: Golden) -> None:
    console = Console(record=True, width=200)
    print_table(RESULT, console)
    output = console.export_text()
    golden("terminal-with-communication", output)
    for part in ("12.5%", "500 ms", "2.0 kB", "logits hold <NaN>", "query 7", "query 9"):
        assert part in output, part


def test_page_shows_communication_and_escapes_events(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    page = write_report(tmp_path).read_text()
    assert "Communication with nodes" in page
    assert "logits hold &lt;NaN&gt;" in page
    assert "<NaN>" not in page
    quiet = {key: value for key, value in RESULT.items() if key not in ("link", "events")}
    (tmp_path / "result.json").write_text(json.dumps(quiet))
    assert "Communication with nodes" not in write_report(tmp_path).read_text()


def test_refused_query_is_not_traffic(tmp_path: Path) -> None:
    released = {
        "node": "north",
        "number": 0,
        "query": "predict_logits",
        "part": "response",
        "up": {"logits": 8},
    }
    refused = {"node": "north", "number": 1, "part": "refused", "rule": "max_rows: 10, and x has 11"}
    audit_logs.write(tmp_path, [released, refused])
    from fedstill.report.records import AuditTotals

    totals = AuditTotals.read(tmp_path / "audit.sqlite")
    assert totals is not None
    assert totals.nodes["north"].queries == {0}
    assert totals.bytes_by_kind("up") == {"logits": 8}


def test_waiting_for_absent_nodes_is_not_link_time() -> None:
    waited = {**RESULT, "link": {**RESULT["link"], "absent": 5.0}}
    parts = {part.key: part for part in run_tables.time_parts(Result.from_record(waited))}
    assert (parts["absent"].seconds, parts["absent"].share) == (5.0, 0.2)
    assert parts["link"].share == 0.1
    assert "absent nodes 5.0 s, link 2.5 s" in str(run_tables.time_parts_text(Result.from_record(waited)))
    assert 'class="part absent" x="30.00%" width="20.00%"' in str(
        run_tables.time_bar(Result.from_record(waited))
    )
