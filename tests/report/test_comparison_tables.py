"""Tables, page, CSV and LaTeX of a comparison, from handmade run folders and values computed by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedstill.compare import comparison as compare
from fedstill.core.run_writer import write_text
from fedstill.report.comparison_page import render_comparison_page, write_comparison
from fedstill.report.comparison_records import ComparedSetting, summarize
from fedstill.report.comparison_tables import comparison_latex, comparison_markdown
from fedstill.report.statistics import Spread
from tests.support.comparison_files import (
    ALONE,
    FEDAVG,
    FEDIOD,
    a_plan,
    a_run,
    method_table_lines,
    printed,
    records,
)
from tests.support.golden import Golden
from tests.support.result_files import Page, refuse_loading


def protect(folder: Path, run: str, *epsilons: float | None) -> None:
    """Give each node of a run an epsilon at delta 1e-5; None is no guarantee."""
    file = folder / "50-skew_ed" / run / "result.json"
    nodes = [
        {"name": f"{k}", "mechanism": "pate", "guarantee": value is not None, "epsilon": value, "delta": 1e-5}
        for k, value in enumerate(epsilons)
    ]  # fmt: skip
    file.write_text(json.dumps({**json.loads(file.read_text()), "privacy": {"nodes": nodes}}))


def test_spread_is_mean_and_sample_deviation() -> None:
    assert Spread.of([80.0, 84.0, 88.0]) == Spread(84.0, 4.0)  # sqrt((16 + 0 + 16) / 2)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, math.sqrt(0.5))
    assert Spread.of([7.0]) == Spread(7.0, None)
    assert Spread.of([]) is None
    assert Spread.of([7.0, None]) is None  # no mean over fewer seeds than planned
    assert Spread(93.04, 3.06).text() == "93.0 ± 3.1"
    assert Spread(93.04).text() == "93.0"


def test_decomposition_from_teachers_to_student(folder: Path) -> None:
    """Teachers have 60.5 and the ensemble 95 for each seed; students 87, 91 and 95. t(0.975, 2) is 4.303."""
    summary = summarize(folder, compare.read_comparison_folder(folder))
    parts = {part.entry.label: part for part in summary.settings[0].decompositions}
    assert "standalone" not in parts  # it has no student
    part = parts["fediod"]
    assert (part.teachers.mean, part.ensemble.mean, part.student) == (60.5, 95.0, Spread(91.0, 4.0))
    assert (part.gain.mean, part.gap.mean) == (34.5, -4.0)
    assert part.gap.half_width == pytest.approx(4.3027 * 4 / math.sqrt(3), abs=1e-3)
    assert "| FedIOD | 60.5 ± 0.0 | 95.0 ± 0.0 | 91.0 ± 4.0 | +34.5 ± 0.0 | -4.0 ± 9.9 |" in (
        comparison_markdown(summary)
    )
    assert "-4.0 ± 9.9" in printed(summary, 100)


def test_summary_csv_has_means_deviations_and_gaps(folder: Path) -> None:
    write_comparison(folder, compare.read_comparison_folder(folder))
    rows = {(row["setting"], row["method"]): row for row in records(folder / "compare-summary.csv")}
    assert len(rows) == 8
    fedavg = rows["50% skew_ed", "fedavg"]
    metrics = {key: float(value) for key, value in fedavg.items() if re.fullmatch(r"-?[0-9.]+", value)}
    t = 4.302653  # Student's t(0.975) with 2 degrees of freedom
    expected = {
        "seeds": 3, "accuracy_mean": 84, "accuracy_std": 4, "local_accuracy_mean": 72,
        "local_accuracy_std": 2,
        "local_accuracy_all_tests_mean": 72.5, "local_accuracy_all_tests_std": 2, "bytes_up_mean": 2000,
        "ensemble_mean": 95, "ensemble_std": 0, "ensembling": 22.5, "distilling": -11,
        "ensembling_half_width": t * 2 / math.sqrt(3), "distilling_half_width": t * 4 / math.sqrt(3),
        "bytes_down_mean": 500, "queries_mean": 41, "seconds_mean": 12.5, "paper_accuracy": 82.5,
        "paper_accuracy_std": 0.7, "accuracy_gap": 1.5, "paper_local_accuracy": 75, "local_accuracy_gap": -3,
    }  # fmt: skip
    assert metrics == pytest.approx(expected)
    assert fedavg["paper_accuracy_source"] == "A & B 2020, Table 3"
    assert fedavg["needs"] == "same architecture"
    assert rows["50% skew_ed", "fediod"]["paper_accuracy"] == ""  # that value is of the other setting
    assert rows["another", "fediod"]["paper_accuracy"] == "10.0"
    assert rows["another", "fediod"]["accuracy_gap"] == ""
    assert rows["50% skew_ed", "standalone"]["distilling"] == ""  # it has no student
    few = rows["50% skew_ed", "few"]
    assert (few["name"], few["seeds"], few["accuracy_mean"]) == ("fediod", "0", "")
    assert few["reason"] == "refused: few cannot run: node-1: <no> & never"


def test_csv_has_one_row_per_run(folder: Path) -> None:
    write_comparison(folder, compare.read_comparison_folder(folder))
    rows = records(folder / "compare.csv")
    assert len(rows) == 2 * 4 * 3
    status = [row["status"] for row in rows]
    assert [status.count(word) for word in ("finished", "refused", "not finished")] == [9, 3, 12]
    [third] = [row for row in rows if row["folder"] == "50-skew_ed/fedavg-seed2"]
    expected = {"accuracy": "88.0", "local_accuracy": "74.0", "bytes_up": "4000", "bytes_down": "500"}
    expected |= {
        "queries": "41",
        "iteration_unit": "round",
        "iterations": "20",
        "releases": "data sizes; parameters",
    }
    assert third.items() >= {**expected, "method": "fedavg", "seed": "2", "status": "finished"}.items()


def test_learning_curve_is_mean_over_seeds_by_fraction(folder: Path) -> None:
    rows = {
        row.label: row
        for row in summarize(folder, compare.read_comparison_folder(folder)).settings[0].entries
    }
    assert rows["fedavg"].learning_curve() == {
        0.5: Spread(41.0),
        1.0: Spread(84.0),
    }  # means of 40, 41, 42 and 80, 84, 88
    assert rows["fediod"].learning_curve() == {
        0.25: Spread(50.0),
        1.0: Spread(91.0),
    }  # steps and rounds share the axis
    assert rows["standalone"].learning_curve() == {}
    assert rows["fedavg"].total_bytes() == 2500
    assert rows["few"].total_bytes() is None


def test_best_is_within_kind_of_model_and_excludes_released_data(folder: Path) -> None:
    methods = ["standalone", "fedavg", "fediod", "centralized"]
    plan = a_plan(methods=methods, options={}, runs={}, settings=None, paper=[])
    for seed in range(3):
        for label, metrics in (("standalone", ALONE), ("fedavg", FEDAVG), ("fediod", FEDIOD)):
            a_run(folder, f"{label}-seed{seed}", metrics[seed], {1: 50.0})
        a_run(folder, f"centralized-seed{seed}", (99.0, 99.0, 1, 1), {1: 50.0})
    [setting] = summarize(folder, plan).settings
    # Standalone is the only one of its kind; centralized is no federated method.
    assert setting.significantly_best_labels(setting.metric) == {"fediod"}


def test_missing_seeds_have_reasons(folder: Path) -> None:
    (folder / "50-skew_ed" / "fedavg-seed1" / "result.json").unlink()
    write_text(folder / "not_run.json", json.dumps({"50-skew_ed/fedavg-seed2": "stopped: a limit"}))
    rows = {
        row.label: row
        for row in summarize(folder, compare.read_comparison_folder(folder)).settings[0].entries
    }
    assert rows["fedavg"].missing_reason() == "stopped: a limit (seed 2); not finished (seed 1)"
    assert rows["fedavg"].spread("accuracy") == Spread(80.0, None)


@pytest.mark.parametrize(
    ("width", "file"), [(80, "comparison-in-80-columns"), (190, "comparison-in-190-columns")]
)
def test_terminal_tables_show_methods_and_gaps(folder: Path, width: int, file: str, golden: Golden) -> None:
    text = printed(summarize(folder, compare.read_comparison_folder(folder)), width)
    golden(file, text)
    line = next(line for line in text.splitlines() if line.startswith(" FedAvg "))
    expected = ["FedAvg", "84.0±4.0", "72.0±2.0", "2.0 kB", "500 B", "41", "12.5"]
    assert re.split(r"\s{2,}", line.replace(" ± ", "±").strip()) == expected
    assert "paper 82.5 ± 0.7, gap +1.5" in text
    assert "paper 75.0, gap -3.0" in text
    assert "<no> & never" in " ".join(text.split())


def test_records_have_one_row_per_measured_value(folder: Path) -> None:
    write_comparison(folder, compare.read_comparison_folder(folder))
    rows = records(folder / "compare-records.csv")
    key = ("setting", "method", "seed", "model", "node", "site", "finding", "attack", "metric")
    assert len({tuple(row[name] for name in key) for row in rows}) == len(rows)
    of_models = [row for row in rows if row["model"] == "main" and row["metric"] == "accuracy"]
    by_run = records(folder / "compare.csv")
    # The same numbers are in the table of runs.
    assert sorted((row["setting"], row["method"], row["seed"], row["value"]) for row in of_models) == sorted(
        (row["setting"], row["method"], row["seed"], row["accuracy"]) for row in by_run if row["accuracy"]
    )


def test_latex_is_one_booktabs_table(folder: Path, golden: Golden) -> None:
    text = comparison_latex(summarize(folder, compare.read_comparison_folder(folder)))
    golden("comparison-latex", text)
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert body[0] == "\\begin{tabular}{lrrrrrrrrrr}"
    assert body[1] == "\\toprule"
    assert body[-2:] == ["\\bottomrule", "\\end{tabular}"]
    for line in body:
        assert text.count("{") == text.count("}")
        if line.endswith("\\\\"):  # as many columns as declared
            cells = re.split(r"(?<!\\)&", line)
            spans = [int(span) - 1 for span in re.findall(r"\\multicolumn\{(\d+)\}", line)]
            assert len(cells) + sum(spans) == 11, line
    assert "\\emph{50\\% skew\\_ed}" in text
    ours = "FedAvg & 84.0 $\\pm$ 4.0 & 72.0 $\\pm$ 2.0 & 2.0 kB & 500 B & 41 & 12.5"
    assert f"{ours} & 82.5 $\\pm$ 0.7 & $+1.5$ & 75.0 & $-3.0$ " in text
    assert "FedIOD & \\textbf{91.0 $\\pm$ 4.0}" in text
    assert "$<$no$>$ \\& never" in text


def test_markdown_has_the_same_table(folder: Path, golden: Golden) -> None:
    text = comparison_markdown(summarize(folder, compare.read_comparison_folder(folder)))
    golden("comparison-markdown", text)
    lines = text.splitlines()
    table = method_table_lines(text)
    assert "**50% skew_ed**" in lines
    assert {line.count("|") for line in table} == {13}
    ours = "| FedAvg | student | 84.0 ± 4.0 | 72.0 ± 2.0 | 2.0 kB | 500 B | 41 | 12.5 |"
    assert f"{ours} 82.5 ± 0.7 | +1.5 | 75.0 | -3.0 |" in table
    assert any(line.startswith("| FedIOD | student | **91.0 ± 4.0** |") for line in table)


def test_page_has_content_of_run_folders(folder: Path, golden: Golden) -> None:
    source = write_comparison(folder, compare.read_comparison_folder(folder)).read_text(encoding="utf-8")
    page = Page(source)
    refuse_loading(page, source)
    assert str(folder) not in source
    golden("comparison-page", page.lines)
    assert "84.0 ± 4.0 72.0 ± 2.0 2.0 kB 500 B 41 12.5 82.5 ± 0.7 +1.5 75.0 -3.0 " in page.text
    assert "fedstill compare <mine>.toml" in page.text
    labels = page.attributes("aria-label")
    assert (
        "Accuracy against bytes. Standalone 62.0%, 0 B; FedAvg 84.0%, 2.5 kB; FedIOD 91.0%, 40.0 kB."
        in labels
    )
    assert "Accuracy over the fraction of the run. Final values: FedAvg 84.0%; FedIOD 91.0%." in labels
    links = [link for link in page.attributes("href") if not link.startswith("data:")]
    assert links[0] == "50-skew_ed/standalone-seed0/report.html"
    assert len(links) == 9
    assert all((folder / link).parent.is_dir() for link in links)


def change_results(folder: Path, **changes: Any) -> None:
    """Change the results of FedIOD's runs."""
    for seed in range(3):
        file = folder / f"50-skew_ed/fediod-seed{seed}/result.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_notes_of_runs_appear_once_per_method(folder: Path) -> None:
    change_results(folder, notes=["perceptual loss is off (<no> weights)"])
    page = Page(write_comparison(folder, compare.read_comparison_folder(folder)).read_text(encoding="utf-8"))
    assert page.text.count("FedIOD: perceptual loss is off (<no> weights).") == 1  # not once per seed
    assert "Lower is better" not in page.text  # ECE is in the CSV only


def test_number_of_nodes_of_column_split_comes_from_runs(folder: Path) -> None:
    change_results(folder, split={"name": "column", "nodes": 4})
    sites = {"name": "column", "nodes": 0, "column": "site"}
    plan = a_plan(runs={}, paper=[], settings=[{"name": "50% skew_ed", "split": sites}])
    context = summarize(folder, plan).settings[0].context
    assert context.startswith("digits, 4 nodes, one for each site; ")


# --- privacy ---


def test_epsilon_is_maximum_over_nodes_and_seeds(folder: Path) -> None:
    protect(folder, "fedavg-seed0", 2.0, 3.0)
    protect(folder, "fedavg-seed1", 2.5, 2.5)
    protect(folder, "fedavg-seed2", 1.0, 4.0)
    protect(folder, "fediod-seed0", 2.0, None)  # one node has no guarantee, so the run has none
    protect(folder, "fediod-seed1", 2.0, 2.0)
    protect(folder, "fediod-seed2", 2.0, 2.0)
    summary = summarize(folder, a_plan())
    by_label = {row.label: row for row in summary.settings[0].entries}
    assert by_label["fedavg"].privacy_bound() == (4.0, 1e-5)
    assert by_label["fediod"].privacy_bound() is None
    assert by_label["fediod"].epsilon_text() == "no guarantee"
    assert by_label["standalone"].epsilon_text() == "nothing released"
    assert "5 of 6 runs" in str(summary.privacy_sentence())
    write_comparison(folder, a_plan())
    page = Page((folder / "compare.html").read_text(encoding="utf-8")).text
    assert summary.privacy_sentence() in page
    assert "There is no formal privacy guarantee" not in page
    finished = [row for row in records(folder / "compare.csv") if row["status"] == "finished"]
    runs = {(row["method"], row["seed"]): row for row in finished}
    assert [runs["fedavg", str(seed)]["epsilon"] for seed in range(3)] == ["3.0", "2.5", "4.0"]
    assert runs["fediod", "0"]["epsilon"] == runs["fediod", "0"]["delta"] == ""
    means = {row["method"]: row for row in records(folder / "compare-summary.csv") if row["seeds"] == "3"}
    assert (means["fedavg"]["epsilon_max"], means["fedavg"]["delta"]) == ("4.0", "1e-05")
    assert means["fediod"]["epsilon_max"] == ""


def test_all_formats_have_epsilon_column(folder: Path) -> None:
    for seed in range(3):
        for method in ("fedavg", "fediod"):
            protect(folder, f"{method}-seed{seed}", 2.0)
    plan = a_plan()
    summary = summarize(folder, plan)
    assert str(summary.privacy_sentence()).startswith("All runs ")
    head, _, *rows = method_table_lines(comparison_markdown(summary))
    assert "| seconds | epsilon | paper |" in head
    assert all(row.count("|") == head.count("|") for row in rows)
    assert any(row.startswith("| FedAvg |") and "| 12.5 | 2 |" in row for row in rows)
    assert all("epsilon" in printed(summary, width) for width in (80, 200))
    assert any(note.startswith("Epsilon: ") and "delta 1e-05" in note for note in summary.notes)


# --- significance ---


def write_resamples(folder: Path, run: str, draws: list[float], cases: int = 20) -> None:
    """Give a run resamples of its test cases."""
    save_file({"judged": np.array(draws)}, folder / run / "draws.safetensors")
    file = folder / run / "result.json"
    intervals = {"level": 95, "draws": len(draws), "cases": cases, "global_model": [0.0, 1.0]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "intervals": intervals}))


def two_methods(folder: Path, first: list[float], second: list[float]) -> ComparedSetting:
    for seed, values in enumerate(zip(first, second, strict=True)):
        for label, value in zip(("fedavg", "fediod"), values, strict=True):
            a_run(folder, f"{label}-seed{seed}", (value, value, 1, 1), {1: 50.0})
    plan = a_plan(methods=["fedavg", "fediod"], options={}, runs={}, settings=None, paper=[])
    [setting] = summarize(folder, plan).settings
    return setting


def test_no_method_is_best_without_significance(folder: Path) -> None:
    # Differences 4, 1 and 7: 4 +- 4.303 * 3 / sqrt(3)
    setting = two_methods(folder, [80.0, 84.0, 88.0], [84.0, 85.0, 95.0])
    assert setting.significantly_best_labels(setting.metric) == set()
    assert setting.verdicts() == [
        "Accuracy: FedIOD is not significantly better than FedAvg (4.0 [-3.5, 11.5])."
    ]


def test_two_seeds_are_reported_as_too_few(folder: Path) -> None:
    few = two_methods(folder, [80.0, 84.0], [84.0, 90.0])  # 5 +- 12.706
    [verdict] = few.verdicts()
    start = (
        "Accuracy: FedIOD is not significantly better than FedAvg (5.0 [-7.7, 17.7]). Two seeds are too few"
    )
    assert verdict.startswith(start)


def test_best_mean_behind_on_common_seeds_is_not_best(folder: Path) -> None:
    for seed, value in enumerate((80.0, 80.1, 79.9, 99.0)):
        a_run(folder, f"fediod-seed{seed}", (value, value, 1, 1), {1: 50.0})
    for seed, value in enumerate((82.0, 82.2, 81.9)):
        a_run(folder, f"fedavg-seed{seed}", (value, value, 1, 1), {1: 50.0})
    plan = a_plan(
        methods=["fedavg", "fediod"], options={}, runs={}, settings=None, paper=[], seeds=[0, 1, 2, 3]
    )
    [setting] = summarize(folder, plan).settings
    [verdict] = setting.verdicts()
    assert verdict.startswith("Accuracy: FedIOD is not significantly better than FedAvg (-2.0 [")
    assert setting.significantly_best_labels(setting.metric) == set(), "not bold either"


def test_significantly_better_method_is_best(folder: Path) -> None:
    # Differences 4, 3 and 5: 4 +- 4.303 / sqrt(3), although both methods vary more between seeds
    first = two_methods(folder, [80.0, 84.0, 88.0], [84.0, 87.0, 93.0])
    assert first.significantly_best_labels(first.metric) == {"fediod"}
    assert first.verdicts() == [
        "Accuracy: FedIOD is significantly better than all other methods; the smallest difference is "
        "4.0 [1.5, 6.5], to FedAvg."
    ]
    plan = a_plan(methods=["fedavg", "fediod"], options={}, runs={}, settings=None, paper=[])
    summary = summarize(folder, plan)
    assert first.verdicts()[0] in " ".join(printed(summary, 80).split())
    assert first.verdicts()[0] in comparison_markdown(summary)
    remarks = [
        line.removeprefix("% ") for line in comparison_latex(summary).splitlines() if line.startswith("%")
    ]
    assert first.verdicts()[0] in remarks, "no prefix for a setting without a name"
    assert first.verdicts()[0] in Page(render_comparison_page(summary)).text
    write_comparison(folder, plan)
    pair = next(row for row in records(folder / "compare-pairs.csv") if row["metric"] == "accuracy")
    assert (pair["method"], pair["other_method"], pair["seeds"], pair["significant"]) == (
        "fedavg",
        "fediod",
        "3",
        "True",
    )
    assert [round(float(pair[name]), 1) for name in ("difference", "ci_low", "ci_high")] == [-4.0, -6.5, -1.5]


def test_significance_includes_variance_over_test_cases(folder: Path) -> None:
    same = [80.0, 84.0, 88.0]
    for_all = {"fedavg": [80.0, 90.0, 70.0], "fediod": [83.0, 93.0, 73.0]}
    two_methods(folder, same, [value + 3.0 for value in same])
    for seed in range(3):  # resamples that are hard for one are hard for both: the difference is always 3
        for label, draws in for_all.items():
            write_resamples(folder, f"{label}-seed{seed}", draws)
    plan = a_plan(methods=["fedavg", "fediod"], options={}, runs={}, settings=None, paper=[])
    [setting] = summarize(folder, plan).settings
    assert setting.significantly_best_labels(setting.metric) == {"fediod"}
    for seed in range(3):  # now it is 1, 3 and 5 by resample: a standard error of 2, times 4.303
        write_resamples(folder, f"fediod-seed{seed}", [81.0, 93.0, 75.0])
    [setting] = summarize(folder, plan).settings
    assert setting.significantly_best_labels(setting.metric) == set()
    assert setting.verdicts() == [
        "Accuracy: FedIOD is not significantly better than FedAvg (3.0 [-5.6, 11.6])."
    ]
    write_resamples(
        folder, "fediod-seed0", [81.0, 93.0, 75.0], cases=19
    )  # with other cases, resamples cannot be paired
    [setting] = summarize(folder, plan).settings
    assert setting.significantly_best_labels(setting.metric) == {"fediod"}


def test_custom_method_is_named_by_title_or_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "from dataclasses import dataclass\nfrom fedstill.methods.fedprox import FedProx\n"
    kind = "@dataclass(frozen=True, kw_only=True)\nclass {}(FedProx):\n    "
    lines = head + kind.format("Titled") + 'title = "Mean teacher"\n' + kind.format("Untitled") + "pass\n"
    (tmp_path / "own_methods.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    plan = compare.plan_comparison(["fedprox", "own_methods:Titled", "own_methods:Untitled"])
    (tmp_path / "compare.toml").write_text(plan.to_toml())
    [setting] = summarize(tmp_path, plan).settings
    assert [entry.name for entry in setting.entries] == ["FedProx", "Mean teacher", "Untitled"]


def test_rows_are_grouped_by_form_in_each_medium(folder: Path) -> None:
    forms = {
        "fediod": {"form": "fedstill", "differs": "tau = 1 (printed: inf)"},
        "fedavg": {"form": "printed"},
    }
    write_text(folder / "compare.toml", a_plan(forms=forms).to_toml())
    write_comparison(folder, compare.read_comparison_folder(folder))
    summary = summarize(folder, compare.read_comparison_folder(folder))
    expected = ["Standalone", "few", "as printed", "FedAvg", "fedstill's form", "FedIOD"]
    texts = {
        "terminal": printed(summary, 120).partition("another")[0],
        "Markdown": (folder / "compare.md").read_text(encoding="utf-8").partition("**another**")[0],
        "LaTeX": (folder / "compare.tex").read_text(encoding="utf-8").partition("\\begin{tabular}")[2],
        "page": Page(render_comparison_page(summary)).text.partition("another")[0].partition("Method")[2],
    }
    for medium, text in texts.items():
        place = 0
        for word in expected:
            place = text.find(word, place)
            assert place >= 0, (medium, word)
    assert "FedIOD: fedstill's form; tau = 1 (printed: inf)." in summary.notes
    rows = records(folder / "compare-summary.csv")
    assert {row["method"]: row["form"] for row in rows}["fediod"] == "fedstill's form"
