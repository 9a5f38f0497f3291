"""Pages of reproduced tables agree with the records, and with the options of each row."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedstill.compare.comparison import ComparisonRun, at_scale
from fedstill.compare.method_forms import EVERY_METHOD
from fedstill.compare.reproduction import NOT_AT_THIS_SCALE, reproductions
from fedstill.report.comparison_tables import reproduction_markdown
from fedstill.runs import spec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "benchmarks"
ENTRIES = {entry.name: entry for entry in reproductions()}
RECORDED = [(name, scale) for name, entry in ENTRIES.items() for scale in entry.records()]
PRESETS = ROOT / "experiments" / "presets"
TOOL = runpy.run_path(str(ROOT / "tools" / "reproduction_pages.py"))
page, with_summary = TOOL["page"], TOOL["with_summary"]

pytestmark = pytest.mark.skipif(not (DOCS.parent / "conf.py").exists(), reason="without the docs")


def test_summary_is_generated_from_the_records() -> None:
    text = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert text == with_summary(text, list(ENTRIES.values())), "run python tools/reproduction_pages.py"
    assert {path.stem for path in (DOCS / "reproduction").glob("*.md")} == ENTRIES.keys()


@pytest.mark.parametrize("name", ENTRIES)
def test_page_is_generated_from_the_record(name: str) -> None:
    text = (DOCS / "reproduction" / f"{name}.md").read_text(encoding="utf-8")
    assert text == page(ENTRIES[name]), "run python tools/reproduction_pages.py"


@pytest.mark.parametrize(("name", "scale"), RECORDED)
def test_verdict_matches_flags_of_record(name: str, scale: str) -> None:
    entry = ENTRIES[name]
    record, notes = entry.record(scale), entry.notes(scale)
    assert record is not None
    assert notes is not None
    assert notes.verdict
    assert 40 < len(notes.why) < 1300
    assert set(record.flagged) <= {"", *(row.setting for row in record.rows)}
    if "" in record.flagged:
        assert notes.verdict == NOT_AT_THIS_SCALE


def test_flagged_results_are_recorded_and_not_on_the_page() -> None:
    entry = ENTRIES["fediod-table5"]
    record = entry.record()
    assert record is not None
    assert NOT_AT_THIS_SCALE in page(entry)
    assert "29.7" in reproduction_markdown(entry, record)  # epsilon 3.5
    assert "29.7" not in page(entry)


def test_row_near_the_print_is_cited_next_to_fedstills_form() -> None:
    text = page(ENTRIES["fediod-table1"])
    setting = text.partition("**CIFAR-10, alpha 0.1**")[2].partition("CIFAR-100")[0]
    printed, own = setting.split("*fedstill's form*")
    assert "| fediod, near the print | 23.8 " in printed.partition("*as printed*")[2]
    assert "| fediod | 34.5 " in own
    assert "36.0" in text  # FedKD without noise


# --- forms ----------------------------------------------------------------------------------------------

FEDIOD = {  # tables with label maps
    "fediod-table2": str(PRESETS / "paper-mri-segmentation.toml"),
    "fediod-table3": str(PRESETS / "paper-nuclei.toml"),
    "fediod-table4": str(PRESETS / "paper-nuclei.toml"),
    "fediod-table9": str(PRESETS / "paper-mri-reconstruction.toml"),
}
PRINTED = {  # presets with the printed options by method; a table may have other ones
    "fediod": "cifar10-fediod-printed",
    "fedkd": str(PRESETS / "paper-xray.toml"),
    "fedmd-cg": "fashion-fedmd-cg-printed",
}
LENGTHS = {"name", "steps", "pretrain", "rounds", "participation", "batch", "epochs"}
SIZES = LENGTHS | {"lr", "lr_end", "schedule", "width", "noise", "generator_lr"}
LOSSES = ("critic.batch", "student.steps")  # options of the losses whose names are those of sizes
NAMED = re.compile(r"(\S+) = (\S+) \(printed: ([^)\s]+)\)")


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield options with dotted names and values as written in files."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            yield prefix + key, text.lower() if isinstance(value, bool) else text


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        (name, scale)
        for name, entry in ENTRIES.items()
        for scale in entry.scales
        if entry.is_comparison and scale != "paper"
    ],
)
def test_named_differences_match_options(name: str, scale: str) -> None:
    """Rows in fedstill's form name all differences to the print, for methods with printed options."""
    entry = ENTRIES[name]
    comparison, table = entry.comparison(scale), at_scale(entry.table, scale)
    assert comparison.forms.keys() <= comparison.methods.keys()
    for label, form in comparison.forms.items():
        method = str(comparison.methods[label]["name"])
        if method.removesuffix("-maps") not in PRINTED:
            continue
        run = comparison.run_config(ComparisonRun(next(iter(comparison.settings)), label, 0))
        printed = spec.load(FEDIOD.get(name, PRINTED["fediod"]) if "fediod" in method else PRINTED[method])
        options, theirs = (dict(flat(spec.to_dict(part)["method"])) for part in (run, printed))
        named = {key: (ours, paper) for key, ours, paper in NAMED.findall(form.differs)}
        if EVERY_METHOD in table["forms"]:  # in ablations, each row changes an option of its own
            changed = {*table.get("options", {}).get(label, {}), label.partition("-")[0]}
            named = {key: values for key, values in named.items() if key not in changed}
        assert all((options[key], theirs[key]) == values for key, values in named.items()), (label, named)
        # table 6 is an ablation
        if form.form == "fedstill" and method.startswith("fediod") and name != "fediod-table6":
            assert (
                named.keys() >= different_losses(options, theirs) - {"student_inputs"}
                or "as fediod" in form.differs
            )


def different_losses(options: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    """Return the options that differ, except for sizes and rates."""
    return {
        key
        for key in options.keys() & theirs.keys()
        if options[key] != theirs[key] and (key in LOSSES or key.rpartition(".")[2] not in SIZES)
    }
