"""The page of a run: one HTML file that holds everything and loads nothing.

A run's folder goes in, ``report.html`` comes out. The page runs no script and its own content
security policy forbids it to load anything, so it can be opened, mailed and archived anywhere.
Names and texts in the folder come from users and nodes: everything is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedstill.core.words import human_bytes, human_seconds, points
from fedstill.node.audit import FILE
from fedstill.report import drawing, findings, leakage, link, pictures, privacy, run_figures
from fedstill.report.bars import bar
from fedstill.report.facts import facts
from fedstill.report.files import read_audit, read_samples
from fedstill.report.metrics import bare, head, in_a_sentence, told
from fedstill.report.names import labels
from fedstill.report.node_tables import holdings, nodes, own_values, traffic
from fedstill.report.result import CENTRAL, Result
from fedstill.report.result_parts import OverNodes
from fedstill.report.run import RunFiles
from fedstill.report.sentence import plain_sentence
from fedstill.report.table import Row, comparison, method_title, texts
from fedstill.report.templates import environment, size

MOST_PANELS = 24  # small plots of local training

# What a node's counts are, by the task's kind: a heading, a sentence, whether they sum to its examples.
HELD: Mapping[str, tuple[str, str, bool]] = {
    "": ("The classes each node holds", "Training examples of each class at each node", True),
    "labels": (
        "The findings each node holds",
        "Training examples with each finding at each node (one may have several, or none)",
        False,
    ),
    "map": (
        "What each node's images show",
        "Training images at each node, each parted over the classes as its pixels are",
        True,
    ),
    "image": ("The images each node holds", "Training images at each node", True),
}


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run's folder, from the files in it, and return its path.

    Only ``result.json`` must exist. What the other files would have shown is marked "not measured"
    where they are missing. The same files give the same bytes. Raises RunFolderError where a file
    cannot be read as what it should be.
    """
    page = environment().get_template("page.html.j2").render(_view(RunFiles.read(folder)))
    target = folder / "report.html"
    target.write_text(page, encoding="utf-8", newline="\n")
    return target


def _view(run: RunFiles) -> dict[str, Any]:
    """Everything the template names, computed: the template decides only how it looks."""
    folder, result, metrics = run.folder, run.result, run.metrics
    figures = result.figures
    metric = figures[0]
    audit = read_audit(folder / FILE)
    samples = read_samples(folder / "samples.safetensors")
    config = folder / "config.toml"
    rows = comparison(result)
    turn = result.turn
    course = run_figures.course_of(run)
    central, names = CENTRAL[result.central][0], labels(result)
    local = run_figures.local_of(run)
    left_out = list(local)[MOST_PANELS : len(metrics.local)]
    return {
        "title": method_title(result),
        "name": result.name,
        "sentence": plain_sentence(result, audit, made_up=bool(samples)),
        "data_name": result.data.name,
        "context": _context(result),
        "notes": result.sentences,
        "key_figures": _key_figures(result),
        "metric": {"title": metric.title, "name": in_a_sentence(metric.title)},
        "others": [head(figure) for figure in figures[1:]],
        "rows": [(row, texts(row, figures), _bar(row)) for row in rows],
        "unmeasured": [row.name for row in rows if row.value is None and not row.is_student],
        "course": course,
        "course_drawn": None if course is None else _course(course),
        "central": result.central,
        # Neither a simulation nor a rehearsal, which read nodes' figures past their gates.
        "apart": result.files is not None
        or (result.link is not None and not (result.standalone or result.local)),
        "processes": _processes(result),
        "central_name": central,
        "turn": turn,
        "turns": result.turns,
        "own_title": f"{metric.title} {'alone' if own_values(result)[0] else 'of its own'}",
        "holdings": holdings(result),
        "held": HELD.get(result.kind, HELD[""]),
        "findings": findings.section(result),
        "sites": findings.sites(result),
        "pictures": pictures.section(folder, result),
        "noisy_counts": privacy.counts_are_noisy(result),
        "samples": samples,
        "losses": _panels(list(metrics.losses.items())),
        "local": _panels([each for each in local.items() if each[0] not in left_out], share_axis=True),
        "centralised_drawn": bool(metrics.centralised),
        "local_left_out": len(left_out),
        "traffic": traffic(result, audit),
        "link": link.parts(result),
        "link_bar": link.time_bar(link.parts(result)),
        "message_cost": link.message_cost(result),
        "events": [{**vars(event), "node": names.get(event.node, event.node)} for event in result.events],
        "privacy": privacy.section(result, audit),
        "leakage": leakage.section(folder, result),
        "nodes": nodes(result),
        "command": result.command,
        "facts": facts(result),
        "config": config.read_text(encoding="utf-8", errors="replace") if config.exists() else None,
    }


def _course(course: run_figures.Course) -> Markup:
    """What models reach on the way, drawn."""
    return drawing.responsive(partial(run_figures.course, course), course.told(), "course")


def _bar(row: Row) -> Markup:
    """What a model reaches: with the spread and one ring a node where the row has them."""
    if row.value is None:
        return Markup("")
    low_high = None if row.spread is None else (row.value - row.spread, row.value + row.spread)
    fill = "bar student" if row.is_student else "bar"
    return bar((fill, row.value), whisker=low_high, rings=row.each)


def _processes(result: Result) -> str:
    """Where the nodes of a simulation were."""
    return "each node was a process of its own" if result.link is not None else "all nodes ran in one process"


def _key_figures(result: Result) -> list[dict[str, Any]]:
    figures = result.figures
    metric, name = figures[0], in_a_sentence(figures[0].title)
    reached, alone = result.value, (result.standalone or {}).get(metric.key, OverNodes()).mean
    up, down = result.bytes.up, result.came_down
    total, distillation = result.seconds.total, result.seconds.distillation
    tests = result.data.test
    first = comparison(result)[0]
    first_text = _unbroken(texts(first, figures)[0])
    title = {"student": f"Student {name}", "virtual": f"{metric.title} of the average",
             "ensemble": f"Ensemble {name}", "nodes": f"Mean {name} of the nodes"}  # fmt: skip
    central = result.central
    gain: dict[str, Any] = {
        "name": "Gain over standalone",
        "value": None if reached is None or alone is None else points(reached - alone),
        "unit": "points",
        "note": None if alone is None else f"a node alone reaches {first_text}",
    }
    if central == "nodes" or (alone is None and first.name == "nodes' own models"):
        gain = {
            "name": "Nodes' own models",
            "value": None if first.value is None else told(metric, first.value),
            "note": None if first.spread is None else f"\u00b1 {bare(metric, first.spread)} over the nodes",
        }
    return [
        {
            "name": title[central],
            "value": None if reached is None else told(metric, reached),
            "note": None if tests is None else f"on {_tested(result, tests)}",
        },
        gain,
        {
            "name": "Crossed the wire",
            "value": None if up is None or down is None else size(up + down),
            "note": None
            if up is None or down is None
            else f"{_unbroken(human_bytes(up))} left the nodes, {_unbroken(human_bytes(down))} came to them",
        },
        {
            "name": "Time",
            "value": None if total is None else re.sub(r"(?<=\d) ", "\u00a0", human_seconds(total)),
            "note": None
            if distillation is None
            else f"{_unbroken(human_seconds(distillation))} of it "
            + ("in rounds" if result.turn == "round" else "distillation"),
        },
    ]


def _tested(result: Result, examples: int) -> str:
    """What a figure is measured on: examples, or the cases that they are parts of."""
    cases, case = result.data.test_cases, result.data.case
    if cases is None:
        return f"{examples:,} test examples"
    return f"{cases:,} test {case}{'' if cases == 1 else 's'} ({examples:,} examples)"


def _unbroken(figure: str) -> str:
    """A figure that no line break parts from its unit or its spread: "71.8% ± 6.5" is one."""
    return figure.replace(" ", "\u00a0")


def _context(result: Result) -> str | None:
    """The data and how it was split, in sentences, as far as the result tells.

    A run from Python names no data set: then the nodes' own examples are counted.
    """
    held = [node.examples for node in result.each]
    known = [count for count in held if count is not None]
    train, test = result.data.train, result.data.test
    if train is None and known and len(known) == len(held):
        train = sum(known)
    counts = [
        f"{count:,} {label}" for count, label in ((train, "training"), (test, "test")) if count is not None
    ]
    size = f"{' and '.join(counts)} examples" if counts else ""
    shape = result.data.shape
    if size and shape:
        size += " of " + " \u00d7 ".join(str(side) for side in shape) + (" tokens" if len(shape) == 1 else "")
    what = ", ".join(part for part in (result.data.name, size) if part)

    how = result.split.about or result.split.how
    values = result.split.values
    if values and len(values) == len(held):
        each = ", ".join(f"{node.name} has {value}" for node, value in zip(result.each, values, strict=True))
        how = f"by {result.split.column}: {each}"
    note = result.data.note
    public, rows = result.public.name, result.public.examples
    if public is not None and rows is not None:
        public += f", {rows:,} examples"
    sentences = [
        what and f"Data: {what}",
        how and f"Split over the nodes: {how}",
        note and note[0].upper() + note[1:],
        public and f"Public data: {public}",
        result.public.note,
    ]
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence) or None


def _panels(
    series: Sequence[tuple[str, Mapping[float, float | None]]], share_axis: bool = False
) -> list[dict[str, Any]]:
    """Small plots, one a series; with a shared axis, heights can be compared across them."""
    lines = [run_figures.finite(values) for _, values in series]
    everything = [value for line in lines for _, value in line]
    span = (min(everything), max(everything)) if share_axis and everything else None
    return [
        {
            "name": name,
            "last": _last(values),
            "plot": _panel(name, line, span) if line else None,
            "lost": len(values) - len(line),
        }
        for (name, values), line in zip(series, lines, strict=True)
    ]


def _panel(name: str, line: drawing.Points, span: tuple[float, float] | None) -> Markup:
    first, last = (drawing.step_text(line[place][0]) for place in (0, -1))
    label = f"{name}, from step {first} to {last}: {line[0][1]:.4g} to {line[-1][1]:.4g}."
    with drawing.style():
        return drawing.svg(run_figures.panel(line, span), label, f"panel {name} {span}")


def _last(values: Mapping[float, float | None]) -> str | None:
    if not values:
        return None
    value = values[max(values)]
    return "not finite" if value is None else f"{value:.3g}"
