"""The tables of docs/one_shot.md, of a finished comparison: students and their ensembles, and what left.

    python experiments/one_shot.py RUNS [METHOD ...]

Below each table stand the differences of the named methods and all others, pair by pair over seeds, with half
of their 95 % intervals over seeds and test cases, as in the sentence of ``fedstill compare`` on who is first;
* where chance does not explain one. Of one seed there is no interval.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedstill.compare.comparison_file import read_folder
from fedstill.core.text_format import human_bytes
from fedstill.report.compare_entry import Entry
from fedstill.report.compare_files import summarise
from fedstill.report.compare_summary import Setting

HEAD = ("method", "student", "its ensemble", "what left the nodes", "up", "down", "questions")


def row(entry: Entry, metric: str) -> tuple[str, ...]:
    """A method's cells."""
    ensemble = "" if entry.central == "ensemble" else entry.shown(f"ensemble {metric}") or ""
    costs = [entry.spread(name) for name in ("bytes up", "bytes down", "questions")]
    up, down, questions = (round(each.mean) if each else 0 for each in costs)
    left = ", ".join(entry.leaves) or "nothing"
    sent = (human_bytes(up), human_bytes(down), str(questions))
    return (entry.name, entry.shown(metric) or "", ensemble, left, *sent)


def apart(setting: Setting, one: Entry) -> str:
    """A method less each other."""
    told = []
    for other in setting.entries:
        if other is not one and other.runs and one.runs:
            gap = setting.above(one, other, setting.metric)
            half = "" if gap.half is None else f" \u00b1 {gap.half:.1f}"
            told.append(f"{other.name} {gap.mean:+.1f}{half}{'*' if gap.told else ''}")
    return f"{one.name} less {', '.join(told)}"


if __name__ == "__main__":
    runs, labels = Path(sys.argv[1]), sys.argv[2:]
    for setting in summarise(runs, read_folder(runs)).settings:
        print(f"\n## {setting.name}\n")
        rows = [row(entry, setting.metric.key) for entry in setting.entries if entry.runs]
        for cells in (HEAD, ["---"] * len(HEAD), *rows):
            print(f"| {' | '.join(cells)} |")
        for entry in setting.entries:
            if entry.label in labels:
                print(f"\n{apart(setting, entry)}")
