"""Print the tables of docs/benchmarks/equal-terms.md of a comparison: students, ensembles, and releases.

    python experiments/one_shot.py RUNS [METHOD ...]

Below each table are the differences between the named methods and all others, paired by seed, with half of
their 95 % intervals over seeds and test cases, as ``fedstill compare`` reports them for the best method.
An asterisk denotes a significant difference. With one seed there is no interval.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedstill.compare.comparison import read_comparison_folder
from fedstill.core.errors import FedstillError, UnknownName
from fedstill.core.text_format import format_bytes
from fedstill.report.comparison_records import ComparedMethod, ComparedSetting, summarize

HEAD = ("method", "student", "its ensemble", "what left the nodes", "up", "down", "queries")


def row(entry: ComparedMethod, metric: str) -> tuple[str, ...]:
    """Return the cells of a method."""
    ensemble = "" if entry.evaluated_model == "ensemble" else entry.format_metric(f"ensemble {metric}") or ""
    costs = [entry.spread(name) for name in ("bytes up", "bytes down", "queries")]
    up, down, queries = (round(each.mean) if each else 0 for each in costs)
    released = ", ".join(entry.releases) or "nothing"
    sent = (format_bytes(up), format_bytes(down), str(queries))
    return (entry.name, entry.format_metric(metric) or "", ensemble, released, *sent)


def differences_from(setting: ComparedSetting, one: ComparedMethod) -> str:
    """Return the differences between a method and each other."""
    differences = []
    for other in setting.entries:
        if other is not one and other.runs and one.runs:
            gap = setting.paired_difference(one, other, setting.metric)
            half = "" if gap.half_width is None else f" \u00b1 {gap.half_width:.1f}"
            differences.append(f"{other.name} {gap.mean:+.1f}{half}{'*' if gap.significant else ''}")
    return f"{one.name} less {', '.join(differences)}"


def main() -> None:
    """Print the tables of all settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("methods", nargs="*")
    given = parser.parse_args()
    try:
        comparison = read_comparison_folder(given.runs)
        labels = {planned_run.label for planned_run in comparison.planned_runs()}
        if unknown := [label for label in given.methods if label not in labels]:
            raise UnknownName("method", unknown[0], sorted(labels))
        settings = summarize(given.runs, comparison).settings
    except FedstillError as error:
        parser.error(str(error))
    for setting in settings:
        print(f"\n## {setting.name or given.runs.name}\n")
        rows = [row(entry, setting.metric.key) for entry in setting.entries if entry.runs]
        for cells in (HEAD, ["---"] * len(HEAD), *rows):
            print(f"| {' | '.join(cells)} |")
        for entry in setting.entries:
            if entry.label in given.methods:
                print(f"\n{differences_from(setting, entry)}")


if __name__ == "__main__":
    main()
