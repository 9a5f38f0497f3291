"""A comparison's figures, for people and for papers: terminal, HTML, CSV, LaTeX, from its runs' files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.records import write_text
from fedstill.report.compare_page import html
from fedstill.report.compare_tables import latex, markdown, runs_csv, summary_csv
from fedstill.report.compare_terminal import print_comparison
from fedstill.report.summarise import summarise
from fedstill.report.summary import Row, Spread, Summary

if TYPE_CHECKING:
    from fedstill.compare.plan import Comparison

__all__ = [
    "Row",
    "Spread",
    "Summary",
    "html",
    "latex",
    "markdown",
    "print_comparison",
    "summarise",
    "write_comparison",
]


def write_comparison(out: Path, comparison: Comparison) -> Path:
    """Write page, CSV, LaTeX and Markdown of a comparison into its folder; returns the path of the page.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    summary = summarise(out, comparison)
    write_text(out / "compare.csv", runs_csv(summary))
    write_text(out / "compare-summary.csv", summary_csv(summary))
    write_text(out / "compare.tex", latex(summary))
    write_text(out / "compare.md", markdown(summary))
    write_text(out / "compare.html", html(summary))
    return out / "compare.html"
