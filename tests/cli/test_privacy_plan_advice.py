"""Advice of ``fedstill privacy plan``, from the nearest recorded run with lower accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedstill.cli.privacy_plan import MODEL, RECORDED, RecordedAccuracy, advice
from fedstill.runs import spec
from fedstill.tasks import TASKS

DIGITS, FASHION = RECORDED


@pytest.mark.parametrize(
    ("records", "epsilon", "of", "row", "budget", "word"),
    [
        (230, 3.0, DIGITS, 230, 3.0, "about"),
        (1_999, 20.0, DIGITS, 230, 8.0, "about"),
        (11_399, 20.0, FASHION, 2_000, 3.5, "about"),
        (229, 7.9, DIGITS, 115, 3.0, "about"),
        (57, 8.0, DIGITS, 58, 8.0, "less than"),
        (400, 0.5, DIGITS, 230, 1.0, "less than"),
        (11_400, 7.9, FASHION, 11_400, 3.5, "about"),
        (100_000, 8.0, FASHION, 11_400, 8.0, "about"),
        (100_000, 3.0, FASHION, 11_400, 3.5, "less than"),
    ],
)
def test_advice_uses_the_nearest_record_with_no_more_records(
    records: int, epsilon: float, of: RecordedAccuracy, row: int, budget: float, word: str
) -> None:
    output = " ".join(advice(TASKS["classification"](), records, epsilon))
    assert f"{word} {of.percent[row][budget]:.0f} % on {of.data}" in output
    assert f"measured with {row:,} records a node at epsilon {budget:g}" in output
    assert f"as in {of.preset} " in output


@pytest.mark.parametrize("one", RECORDED)
def test_presets_have_the_model_that_is_recommended(one: RecordedAccuracy) -> None:
    run = spec.load(one.preset)
    assert list(run.nodes.models) == [MODEL]
    assert run.nodes.privacy.registered_name == "dp-sgd"
    assert run.data.registered_name == one.data.lower()


def test_advice_agrees_with_the_results_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks" / "privacy.md").read_text(encoding="utf-8")
    table = page[page.index("| records a node | data | epsilon") :].split("\n\n")[0]
    head, _, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    budgets = [float(cell.removeprefix("epsilon ")) for cell in head[2:]]
    output: dict[str, dict[int, dict[float, float]]] = {}
    for count, data, *cells in rows:
        metrics = {e: float(cell.split(" ± ")[0]) for e, cell in zip(budgets, cells, strict=True) if cell}
        output.setdefault(data, {})[int(count.replace(",", ""))] = metrics
    assert {one.data: one.percent for one in RECORDED} == output


def test_no_advice_without_records() -> None:
    assert not advice(TASKS["segmentation"](), 230, 3.0)
    assert not advice(TASKS["tabular"](), 230, 3.0)


def test_no_advice_if_run_uses_it_already(command: Callable[..., tuple[int, str, str]]) -> None:
    for model, recommended in ((MODEL, False), ("linear", True)):
        code, out, err = command("privacy", "plan", "digits-fedkd-private", "--nodes.models", model)
        assert code == 0, err
        assert ("a linear model on fixed features" in out) is recommended, model
