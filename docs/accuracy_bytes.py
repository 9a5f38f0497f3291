"""Draw docs/accuracy-bytes.svg: accuracy against bytes sent, at alpha 0.1, from benchmarks/equal-terms.md.

    python docs/accuracy_bytes.py

The tables hold means and standard deviations over seeds 0-2; "Accuracy of the student" gives the accuracy,
and "Releases and bytes" the bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
COLUMN = "alpha 0.1"
UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}

# Label on the chart, row of the accuracy table, row of the bytes table, group, offset of the label in points.
METHODS = (
    ("FedIOD", "FedIOD", "FedIOD", "generated", (8, 5)),
    ("DENSE", "DENSE", "DENSE", "generated", (-44, -4)),
    ("DENSE, consensus", "dense-consensus", "dense-consensus", "generated", (10, -13)),
    ("Co-Boosting", "Co-Boosting", "Co-Boosting", "generated", (8, -4)),
    ("FedZGE", "FedZGE", "FedZGE", "generated", (-50, -4)),
    ("FedKD, consensus", "fedkd-consensus", "FedKD, fedkd-consensus", "public", (8, -3)),
    ("DS-FL", "DS-FL", "DS-FL", "public", (8, -12)),
    ("FedDF", "FedDF", "FedDF", "weights", (8, 6)),
    ("FedAvg, 20 rounds", "FedAvg, 20 rounds", "FedAvg, 20 rounds", "weights", (8, -12)),
    ("FedAvg, 1 round", "FedAvg, one round", "FedAvg, one round", "weights", (8, -3)),
)
GROUPS = {
    "generated": ("predictions on generated inputs (no public data)", "#0b5db3"),
    "public": ("predictions on public data", "#17823f"),
    "weights": ("model weights", "#8a8f98"),
}


def table(page: str, column: str) -> dict[str, str]:
    """Return one column of the first table of a page that has it, by the text of the first cell."""
    lines = page.split("\n")
    head = next(i for i, line in enumerate(lines) if line.startswith("|") and column in _cells(line))
    index = _cells(lines[head]).index(column)
    rows = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        cells = _cells(line)
        rows[cells[0]] = cells[index]
    return rows


def _cells(line: str) -> list[str]:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).replace("*", "")
    return [cell.strip() for cell in plain.strip("|").split("|")]


def mean_and_deviation(cell: str) -> tuple[float, float]:
    """Return mean and standard deviation of a cell such as ``60.1 ± 5.1``."""
    mean, _, deviation = cell.partition("±")
    return float(mean), float(deviation)


def number_of_bytes(cell: str) -> float:
    """Return the bytes of a cell such as ``5.6 MB (mixed 9.0)``."""
    number, unit = cell.split()[:2]
    return float(number) * UNITS[unit]


def main() -> None:
    """Draw the chart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    page = (FOLDER / "benchmarks" / "equal-terms.md").read_text(encoding="utf-8")
    accuracy, sent = table(page, COLUMN), table(page, "up")
    pyplot.rcParams.update({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "fedstill"})
    figure, axes = pyplot.subplots(figsize=(7.2, 3.7))
    drawn: set[str] = set()
    for label, row, bytes_row, group, offset in METHODS:
        mean, deviation = mean_and_deviation(accuracy[row])
        x, (legend, color) = number_of_bytes(sent[bytes_row]), GROUPS[group]
        axes.errorbar(
            x, mean, deviation, fmt="o", color=color, capsize=2, ms=7, lw=1,
            label=None if group in drawn else legend,
        )  # fmt: skip
        axes.annotate(label, (x, mean), xytext=offset, textcoords="offset points", fontsize=9)
        drawn.add(group)
    for label, row in (
        ("centralized (upper bound)", "Centralized"),
        ("standalone (baseline)", "Standalone"),
    ):
        height = mean_and_deviation(accuracy[row])[0]
        axes.axhline(height, color="#555555", lw=1, ls="--")
        axes.text(4.3e4, height + 0.8, f"{label} {height:.1f}", fontsize=9, color="#444444")
    axes.set(
        xscale="log", xlim=(4e4, 1.2e9), ylim=(28, 90),
        xlabel="bytes sent by all nodes over the whole run", ylabel="test accuracy (%)",
    )  # fmt: skip
    axes.set_xticks([1e5, 1e6, 1e7, 1e8, 1e9], ["100 kB", "1 MB", "10 MB", "100 MB", "1 GB"])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(
        fontsize=8.5, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3, columnspacing=1,
        handletextpad=0.3,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(FOLDER / "accuracy-bytes.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
