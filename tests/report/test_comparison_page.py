"""Page of a comparison over budgets and with attacks, from handmade run folders."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedstill.attacks.attack import ComparisonColumn, Leakage, skipped_texts
from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.compare import comparison as compare
from fedstill.compare.comparison import Comparison
from fedstill.core.config_tables import read_received_dataclass
from fedstill.core.run_writer import write_text
from fedstill.report.comparison_page import describe_attacks, render_comparison_page, write_comparison
from fedstill.report.comparison_records import ComparedMethod, MethodCurve, summarize
from fedstill.report.comparison_tables import comparison_markdown
from fedstill.report.statistics import Spread
from tests.support import attack_results
from tests.support.attack_results import interval
from tests.support.comparison_files import (
    ALONE,
    FEDAVG,
    FEDIOD,
    a_run,
    method_table_lines,
    printed,
    records,
)
from tests.support.result_files import Page

pytestmark = pytest.mark.all_widths

ATTACKED = {"attacks": ["inversion", "membership", "memorization", "counts", "labels"]}
CONFIG = LeakageConfig.from_table(ATTACKED).to_table()
LEAKS = LeakageConfig.from_table(ATTACKED).comparison_columns
AUC, TPR, ANSWERS, PSNR, COPYING, SHARES = LEAKS


def an_attack(title: str, auc: float, rate: float | None = None) -> dict[str, Any]:
    rates = [attack_results.rate_record(0.001, interval(0.5))] + (
        [] if rate is None else [attack_results.rate_record(0.01, interval(rate))]
    )
    return attack_results.member_attack(title, interval(auc), *rates)


def a_leakage(*attacks: dict[str, Any], **parts: Any) -> dict[str, Any]:
    responses = attack_results.target("responses of node-0", an_attack("LiRA", 0.99, 0.99))
    attacked = {name: parts.pop(name, None) for name in ("inversion", "memorization")}
    entries = attack_results.attack_entries(
        membership=[attack_results.target("student", *attacks), responses], **attacked
    )
    return {"config": CONFIG, "attacks": entries, "sentence": "<one> left.", "audit": None, **parts}


# Means: LiRA (0.50 + 0.70 + 0.72) / 3 = 0.64, loss 0.62. At 1 %, loss finds 0.03 and LiRA 0.02.
MEMBERS = [
    [an_attack("Loss", 0.60, 0.02), an_attack("LiRA", 0.50, 0.01)],
    [an_attack("Loss", 0.62, 0.03), an_attack("LiRA", 0.70, 0.02)],
    [an_attack("Loss", 0.64, 0.04), an_attack("LiRA", 0.72, 0.03)],
]


def psnrs(**values: float) -> dict[str, Any]:
    return attack_results.inversion(
        *(attack_results.inversion_result(title, value) for title, value in values.items())
    )


def memorization(**values: float) -> dict[str, Any]:
    return attack_results.memorization(
        *(attack_results.space(space, p_value=value) for space, value in values.items())
    )


def a_plan(**changes: Any) -> Comparison:
    table = {"methods": ["standalone", "fedavg", "fediod"], "seeds": 3}
    return dataclasses.replace(compare._build_comparison({**table, **changes}, "mine", {}), leakage=CONFIG)


def leak(folder: Path, run: str, leakage: dict[str, Any]) -> None:
    (folder / run / "leakage.json").write_text(json.dumps(leakage))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return runs of FedAvg with all attacks, FedIOD without inversion, and standalone without attacks."""
    write_text(tmp_path / "compare.toml", "# Made by: fedstill compare mine.toml --leakage\n\n")
    for seed in range(3):
        a_run(tmp_path, f"standalone-seed{seed}", ALONE[seed], {})
        a_run(tmp_path, f"fedavg-seed{seed}", FEDAVG[seed], {20: FEDAVG[seed][0]})
        a_run(tmp_path, f"fediod-seed{seed}", FEDIOD[seed], {400: FEDIOD[seed][0]})
        inversion = psnrs(DLG=[30.0, 10.0, 20.0][seed], iDLG=21.0)
        leak(tmp_path, f"fedavg-seed{seed}", a_leakage(*MEMBERS[seed], inversion=inversion))
        parts = {"inversion": None, "memorization": memorization(pixels=0.5, features=0.25)}
        parts["skipped"] = [{"attack": "inversion", "reason": "no <parameters> left"}]
        leak(tmp_path, f"fediod-seed{seed}", a_leakage(an_attack("Loss", 0.55), **parts))
    return tmp_path


def strongest(entry: ComparedMethod, column: ComparisonColumn) -> str | None:
    attack = entry.strongest_attack_and_value(column)
    return None if attack is None else attack[1].text(column.digits)


def test_leakage_is_of_strongest_attack_over_seeds(folder: Path) -> None:
    alone, fedavg, fediod = summarize(folder, a_plan()).entries
    name, auc = fedavg.strongest_attack_and_value(AUC) or ("", Spread(0.0))
    assert (name, auc.mean) == ("LiRA", pytest.approx(64.0))
    # From 50, 70, 72 and their mean 64: sqrt((14^2 + 6^2 + 8^2) / 2).
    assert auc.std == pytest.approx((296 / 2) ** 0.5)
    assert strongest(fedavg, AUC) == "64.0 \u00b1 12.2"
    assert (fedavg.strongest_attack_and_value(TPR) or ("",))[
        0
    ] == "Loss"  # it finds more at 1 %, and 0.1 % is another rate
    assert strongest(fedavg, TPR) == "3.0 \u00b1 1.0"
    # 21 in each seed; DLG's mean is 20
    assert (fedavg.strongest_attack_and_value(PSNR) or ("",))[0] == "iDLG"
    assert strongest(fedavg, PSNR) == "21.0 \u00b1 0.0"
    assert fediod.strongest_attack_and_value(COPYING) == ("features", Spread(0.25, 0.0))  # the lowest p
    assert strongest(fediod, TPR) is None
    assert [strongest(alone, leak) for leak in LEAKS] == [None] * 6


def test_leakage_needs_all_finished_seeds(folder: Path) -> None:
    (folder / "fedavg-seed1" / "leakage.json").unlink()
    leak(folder, "fediod-seed2", {**a_leakage(an_attack("Loss", 0.9)), "config": {**CONFIG, "seed": 1}})
    summary = summarize(folder, a_plan())
    _, fedavg, fediod = summary.entries
    assert fedavg.strongest_attack_and_value(AUC) is None
    assert summary.notes[-1] == (
        "Not yet attacked with the options of this comparison: Standalone, seed 0; Standalone, seed 1; "
        "Standalone, seed 2; FedAvg, seed 1; FedIOD, seed 2."
    )
    assert fediod.strongest_attack_and_value(AUC) is None  # the attack of that seed has other options
    assert [run.leakage is None for run in fediod.runs] == [False, False, True]


@pytest.mark.parametrize("value", [None, float("nan")])
def test_missing_leakage_values_are_none(folder: Path, value: Any) -> None:
    rows = [{"column": leak.name, "target": "it", "metric": "f", "value": value} for leak in LEAKS]
    for seed in range(3):
        leakage = {"audit": None, "config": CONFIG, "attacks": [{"name": "x", "rows": rows}]}
        leak(folder, f"fedavg-seed{seed}", leakage)
    _, fedavg, _ = summarize(folder, a_plan()).entries
    assert [strongest(fedavg, leak) for leak in LEAKS] == [None] * 6
    write_comparison(folder, a_plan())


def test_csv_has_leakage_and_attack_names(folder: Path) -> None:
    write_comparison(folder, a_plan())
    runs = {(row["method"], row["seed"]): row for row in records(folder / "compare.csv")}
    assert [runs["fedavg", str(seed)]["membership_auc"] for seed in range(3)] == ["60.0", "70.0", "72.0"]
    assert [runs["fedavg", str(seed)]["psnr_db"] for seed in range(3)] == ["30.0", "21.0", "21.0"]
    assert runs["fediod", "0"]["memorization_p"] == "0.25"
    assert runs["standalone", "0"]["membership_auc"] == ""
    means = {row["method"]: row for row in records(folder / "compare-summary.csv")}
    assert float(means["fedavg"]["membership_auc_mean"]) == pytest.approx(64.0)
    assert float(means["fedavg"]["tpr_at_1_percent_std"]) == pytest.approx(1.0)
    assert (means["fedavg"]["membership_auc_attack"], means["fedavg"]["psnr_db_attack"]) == ("LiRA", "iDLG")
    assert (means["fediod"]["psnr_db_mean"], means["fediod"]["psnr_db_attack"]) == ("", "")


def test_tables_have_leakage_columns(folder: Path) -> None:
    summary = summarize(folder, a_plan())
    head, _, *rows = method_table_lines(comparison_markdown(summary))
    leaks = "membership AUC | TPR at 1% | responses' AUC | PSNR | memorization p | label shares off by |"
    assert head.endswith(f"| seconds | {leaks}")
    assert {row.count("|") for row in rows} == {head.count("|")}
    fedavg = "| 12.5 | 64.0 \u00b1 12.2 | 3.0 \u00b1 1.0 | 99.0 \u00b1 0.0 | 21.0 \u00b1 0.0 | - | - |"
    fediod = "| 12.5 | 55.0 \u00b1 0.0 | - | 99.0 \u00b1 0.0 | - | 0.250 \u00b1 0.000 | - |"
    assert any(row.endswith(fedavg) for row in rows)
    assert any(row.endswith(fediod) for row in rows)


@pytest.mark.parametrize("width", [80, 220])
def test_terminal_prints_leakage_table(folder: Path, width: int) -> None:
    text = printed(summarize(folder, a_plan()), width)
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith(" FedAvg ")]
    metrics = ["64.0 \u00b1 12.2", "3.0 \u00b1 1.0", "99.0 \u00b1 0.0", "21.0 \u00b1 0.0"]
    metrics += ["-", "-"] * (width > 80)  # of two further columns, which do not fit into 80
    assert ["FedAvg", *metrics] in rows
    assert "no method is called safe." in " ".join(text.split())


def test_refused_runs_have_no_values_in_any_format(folder: Path) -> None:
    write_text(folder / "not_run.json", json.dumps({f"fediod-seed{seed}": "no" for seed in range(3)}))
    summary = summarize(folder, a_plan())
    assert "FedIOD: refused: no." in comparison_markdown(summary).splitlines()
    head, _, *rows = method_table_lines(comparison_markdown(summary))
    assert {row.count("|") for row in rows} == {head.count("|")}
    write_comparison(folder, a_plan())
    source = (folder / "compare.html").read_text(encoding="utf-8")
    start = source.index('<table class="methods">')
    heads = source.count('<th scope="col"', start, source.index("</table>", start))
    span = re.search(r'class="r reason wide-cell" colspan="(\d+)"', source)
    assert span is not None
    assert int(span[1]) == heads - 3  # all except the method, its needs and its reports


def test_page_has_leakage_figure_columns_and_sentences(folder: Path) -> None:
    source = write_comparison(folder, a_plan()).read_text(encoding="utf-8")
    page = Page(source)
    for expected in (
        "Accuracy against leakage",
        "Membership AUC % TPR % at 1% Responses\u2019 AUC % PSNR dB Memorization p Label shares off by %",
        "12.5 64.0 \u00b1 12.2 LiRA 3.0 \u00b1 1.0 Loss 99.0 \u00b1 0.0 LiRA 21.0 \u00b1 0.0 iDLG - - ",
        "12.5 - - - - - - releases:",
        "Results of attacks",
        "FedAvg <one> left. Seed 0. Attacks: inversion by DLG, iDLG (4 victims, 1 image each); "
        "membership by Loss, LiRA (16 shadow models, each of a federation).",
        "Skipped: inversion: no <parameters> left.",
        "stronger ones may get more, so no method is called safe.",
        "Without both metrics, not shown: Standalone.",
    ):
        assert expected in page.text, expected
    label = (
        "Accuracy against the AUC of the strongest membership attack. "
        "FedAvg: 84.0%, membership AUC 64.0%, 2.5 kB; FedIOD: 91.0%, membership AUC 55.0%, 40.0 kB."
    )
    assert page.attributes("aria-label").count(label) == 3  # one per width
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "img", "form", "base"}
    assert write_comparison(folder, a_plan()).read_text(encoding="utf-8") == source


def test_page_without_attacks_yet_is_shown(folder: Path) -> None:
    for file in folder.rglob("leakage.json"):
        file.unlink()
    page = Page(write_comparison(folder, a_plan()).read_text(encoding="utf-8"))
    assert ": no run has both metrics." in page.text
    assert "Results of attacks" not in page.text
    assert "Areas: bytes" not in page.text
    assert records(folder / "compare.csv")[0]["memorization_p"] == ""


# --- settings in one figure -----------------------------------------------------------------------------


def leakage_svg(folder: Path, plan: Comparison) -> str:
    """Return the SVG of the leakage figure for one width."""
    source = write_comparison(folder, plan).read_text(encoding="utf-8")
    leakage = source[source.index("against leakage</h2>") :]
    return leakage[leakage.index('class="w1000"') : leakage.index("</svg></div></div>")]


def with_settings(tmp_path: Path, settings: list[dict[str, Any]], epsilons: list[float | None]) -> Comparison:
    plan = a_plan(methods=["fedavg"], seeds=1, settings=settings)
    for index, (run, epsilon) in enumerate(zip(plan.planned_runs(), epsilons, strict=True)):
        a_run(tmp_path, run.folder, (80.0 + index, 70.0, 1000, 500), {})
        leak(tmp_path, run.folder, a_leakage(an_attack("Loss", 0.55 + index / 20)))
        file = tmp_path / run.folder / "result.json"
        node = {"name": "0", "mechanism": "dp-sgd", "guarantee": True, "epsilon": epsilon, "delta": 1e-5}
        nodes = [] if epsilon is None else [node]
        file.write_text(json.dumps({**json.loads(file.read_text()), "privacy": {"nodes": nodes}}))
    write_text(tmp_path / "compare.toml", "# Made by: x\n\n")
    return plan


def test_lines_connect_budgets_labeled_by_epsilon(tmp_path: Path) -> None:
    budgets = [("none", float("inf")), ("eight", 8.0), ("three", 3.0)]
    settings = [{"name": name, "nodes": {"privacy": {"epsilon": value}}} for name, value in budgets]
    picture = leakage_svg(tmp_path, with_settings(tmp_path, settings, [None, 7.9, 2.9]))
    assert re.findall(r"<text[^>]*>([^<%]*\u03b5[^<]*)<", picture) == ["\u03b5 2.9", "\u03b5 7.9"]
    assert re.findall(r"<text[^>]*>(\d+)<", picture) == ["1"]  # at the end of the line: without a budget
    assert (
        "FedAvg, three, epsilon 2.9: 82.0%, membership AUC 65.0%, 1.5 kB; FedAvg, eight, epsilon 7.9"
        in picture
    )


def test_other_settings_have_letters(tmp_path: Path) -> None:
    settings = [{"name": "<few>", "split": {"alpha": 0.1}}, {"name": "many", "split": {"alpha": 9.0}}]
    plan = with_settings(tmp_path, settings, [None, 2.9])
    picture = leakage_svg(tmp_path, plan)
    assert re.findall(r"<text[^>]*>(1 [^<]*)<", picture) == ["1 a", "1 b, \u03b5 2.9"]
    assert "<few>" not in picture
    assert "a <few> b many" in Page((tmp_path / "compare.html").read_text(encoding="utf-8")).text


def test_describe_attacks_names_attacks_and_strength() -> None:
    def read(leakage: dict[str, Any]) -> Leakage:
        return read_received_dataclass(Leakage, leakage, Path("leakage.json"))

    assert describe_attacks(read({"audit": None})) == "No attack was run."
    assert describe_attacks(
        read(
            a_leakage(
                an_attack("Loss", 0.5), an_attack("LiRA, offline", 0.5), memorization=memorization(pixels=0.5)
            )
        )
    ) == (
        "Attacks: membership by Loss, LiRA offline (16 shadow models, each of a federation); "
        "memorization in pixels."
    )
    reasons = [{"attack": name, "reason": "no images"} for name in ("memorization", "scores")]
    assert skipped_texts(read({"audit": None, "skipped": reasons})) == ["memorization, scores: no images"]


# --- table and figure of accuracy against epsilon in a comparison ------------------------------------


def a_comparison(tmp_path: Path, settings: str) -> tuple[Path, Comparison]:
    """Return folder and plan of FedAvg with two seeds in settings "low" and "high"; only "high" has run."""
    file = tmp_path / "mine.toml"
    file.write_text(f'methods = ["fedavg"]\nseeds = 2\n{settings}', encoding="utf-8")
    plan, out = compare.read_comparison(file), tmp_path / "out"
    for seed, accuracy in ((0, 70.0), (1, 74.0)):
        a_run(out, f"high/fedavg-seed{seed}", (accuracy, 60.0, 10, 10), {1: accuracy})
    (out / compare.COMPARISON_FILE).write_text(f"# Made by: it\n\n{plan.to_toml()}")
    return out, plan


BY_EPSILON = """
[base.nodes.privacy]
mechanism = "dp-sgd"
[[settings]]
name = "low"
nodes = { privacy = { epsilon = 1.5 } }
[[settings]]
name = "high"
nodes = { privacy = { epsilon = inf } }
"""


def test_comparison_over_budgets_has_epsilon_table(tmp_path: Path) -> None:
    out, plan = a_comparison(tmp_path, BY_EPSILON)
    summary = summarize(out, plan)
    assert summary.budget_curves() == [
        MethodCurve(1, "FedAvg", {math.inf: Spread(72.0, pytest.approx(8**0.5))})
    ]
    assert comparison_markdown(summary).splitlines()[:3] == [
        "| method | epsilon \u221e |",
        "|---|---|",
        "| FedAvg | 72.0 \u00b1 2.8 |",
    ]
    page = write_comparison(out, plan).read_text(encoding="utf-8")
    assert page == render_comparison_page(summary)
    Page(page)  # well formed
    assert page.count("<h2>Accuracy against epsilon</h2>") == 1
    assert page.count('aria-label="Accuracy against epsilon. FedAvg: \u221e 72.0%."') == 3  # one per width


BY_ALPHA = """
[[settings]]
name = "low"
split = { alpha = 0.1 }
[[settings]]
name = "high"
split = { alpha = 1.0 }
"""
TWICE = f"""{BY_EPSILON}
[[settings]]
name = "low, alpha 3"
split = {{ alpha = 3.0 }}
nodes = {{ privacy = {{ epsilon = 1.5 }} }}
"""


@pytest.mark.parametrize("settings", [BY_ALPHA, TWICE])
def test_other_comparisons_have_no_epsilon_table(tmp_path: Path, settings: str) -> None:
    """Settings differ in another option, or two share an epsilon."""
    out, plan = a_comparison(tmp_path, settings)
    summary = summarize(out, plan)
    assert summary.budget_curves() == []
    assert "Accuracy against epsilon" not in render_comparison_page(summary)
    assert not comparison_markdown(summary).startswith("| method | epsilon")


# --- tables and figures by number of malicious nodes ---------------------------------------------------

BY_LIARS = """
methods = ["fedavg", "fedkd"]
seeds = 2
[[settings]]
name = "two"
adversary = { name = "label-flipping", nodes = 2 }
[[settings]]
name = "honest"
[[settings]]
name = "one"
adversary = { name = "label-flipping" }
[[settings]]
name = "other data"
split = { alpha = 3.0 }
adversary = { name = "label-flipping", nodes = 3 }
[[settings]]
name = "other adversary"
adversary = { name = "garbage", nodes = 4 }
[[settings]]
name = "other option"
adversary = { name = "logit-scaling", nodes = 1, factor = 3.0 }
[[settings]]
name = "other option, 2"
adversary = { name = "logit-scaling", nodes = 2, factor = 5.0 }
[[settings]]
name = "other method"
adversary = { name = "label-flipping", nodes = 4 }
options = { fedkd = { tau = 2.0 } }
"""


def test_settings_equal_but_for_malicious_nodes_are_one_curve(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(BY_LIARS, encoding="utf-8")
    plan = compare.read_comparison(file)
    accuracies = {"honest": (80.0, 84.0), "one": (70.0, 74.0), "two": (60.0, 60.0), "other-data": (9.0, 9.0)}
    accuracies["other-method"] = (9.0, 9.0)
    for setting, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            a_run(out, f"{setting}/fedavg-seed{seed}", (accuracy, 60.0, 10, 10), {1: accuracy})
    a_run(out, "one/fedkd-seed0", (50.0, 60.0, 10, 10), {1: 50.0})
    a_run(out, "other-adversary/fedkd-seed0", (40.0, 60.0, 10, 10), {1: 40.0})
    (out / compare.COMPARISON_FILE).write_text(f"# Made by: it\n\n{plan.to_toml()}")
    summary = summarize(out, plan)
    flipping, garbage = summary.adversary_curves()
    assert (garbage.adversary, garbage.counts) == ("garbage", [0, 4])
    assert (flipping.adversary, flipping.conditions, flipping.counts) == (
        "label-flipping",
        "honest",
        [0, 1, 2],
    )
    of_fedavg, of_fedkd = flipping.curves
    assert {count: spread.mean for count, spread in of_fedavg.values.items()} == {0: 82.0, 1: 72.0, 2: 60.0}
    assert of_fedkd.values == {1: Spread(50.0)}
    text = comparison_markdown(summary)
    assert "| FedKD | - | 50.0 | - |" in text
    page = render_comparison_page(summary)
    Page(page)  # well formed
    assert page.count('aria-label="Accuracy against malicious nodes. FedAvg: 0 82.0%, 1 72.0%, 2 60.0%') == 3


def test_comparison_without_adversaries_has_no_such_table(tmp_path: Path) -> None:
    out, plan = a_comparison(tmp_path, BY_ALPHA)
    assert summarize(out, plan).adversary_curves() == []
