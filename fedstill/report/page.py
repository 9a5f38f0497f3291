"""The page of a run: one HTML file that holds everything and loads nothing.

A run's folder goes in, ``report.html`` comes out. The page runs no script and its own content
security policy forbids it to load anything, so it can be opened, mailed and archived anywhere.
Names and texts in the folder come from users and nodes: everything is escaped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedstill.core.words import (
    came_down,
    human_bytes,
    human_seconds,
    number,
    pick,
    points,
    run_notes,
    whole,
    words,
)
from fedstill.report import drawing, findings, leakage, link, pictures, privacy, run_figures
from fedstill.report.bars import bar
from fedstill.report.facts import facts
from fedstill.report.files import Ledger, Traffic, read_ledger, read_samples
from fedstill.report.metrics import bare, figures_of, head, in_a_sentence, told
from fedstill.report.names import labels, node_name, node_records, written
from fedstill.report.run import Run
from fedstill.report.sentence import kinds_of, plain_sentence
from fedstill.report.table import CENTRAL, Row, central_of, comparison, method_title, texts, value_of
from fedstill.report.templates import environment, size
from fedstill.tasks.task import Figure

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
    page = environment().get_template("page.html.j2").render(_view(Run.read(folder)))
    target = folder / "report.html"
    target.write_text(page, encoding="utf-8", newline="\n")
    return target


def _view(run: Run) -> dict[str, Any]:
    """Everything the template names, computed: the template decides only how it looks."""
    folder, result, metrics = run.folder, run.result, run.metrics
    figures = figures_of(result)
    metric = figures[0]
    ledger = read_ledger(folder / "ledger.jsonl")
    samples = read_samples(folder / "samples.safetensors")
    config = folder / "config.toml"
    rows = comparison(result)
    turn = words(result, "turn") or "step"
    course = run_figures.course_of(run)
    central = CENTRAL[central_of(result)][0]
    local = run_figures.local_of(run)
    left_out = list(local)[MOST_PANELS : len(metrics.local)]
    return {
        "title": method_title(result),
        "name": words(result, "name"),
        "sentence": plain_sentence(result, ledger, made_up=bool(samples)),
        "data_name": words(result, "data", "name"),
        "context": _context(result),
        "notes": run_notes(result),
        "key_figures": _key_figures(result),
        "metric": {"title": metric.title, "name": in_a_sentence(metric.title)},
        "others": [head(figure) for figure in figures[1:]],
        "rows": [(row, texts(row, figures), _bar(row)) for row in rows],
        "unmeasured": [row.name for row in rows if row.value is None and not row.is_student],
        "course": course,
        "course_drawn": None if course is None else _course(course),
        "central": central_of(result),
        # Neither a simulation nor a rehearsal, which read nodes' figures past their gates.
        "apart": "files" in result
        or ("link" in result and not (pick(result, "standalone") or pick(result, "local"))),
        "processes": _processes(result),
        "central_name": central,
        "turn": turn,
        "turns": whole(result, "turns"),
        "own_title": f"{metric.title} {'alone' if _own_values(result, metric)[0] else 'of its own'}",
        "holdings": _holdings(result),
        "held": HELD.get(words(result, "kind") or "", HELD[""]),
        "findings": findings.section(result),
        "sites": findings.sites(result),
        "pictures": pictures.section(folder, result),
        "noisy_counts": privacy.counts_are_noisy(result),
        "samples": samples,
        "losses": _panels(list(metrics.losses.items())),
        "local": _panels([each for each in local.items() if each[0] not in left_out], share_axis=True),
        "centralised_drawn": bool(metrics.centralised),
        "local_left_out": len(left_out),
        "traffic": _traffic(result, ledger),
        "link": link.parts(result),
        "link_bar": link.time_bar(link.parts(result)),
        "message_cost": link.message_cost(result),
        "events": _events(result),
        "privacy": privacy.section(result, ledger),
        "leakage": leakage.section(folder, result),
        "nodes": _nodes(result),
        "command": words(result, "command"),
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


def _events(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which nodes were left out and came back, with the nodes' names as the page writes them."""
    names, told = labels(result), link.events(result)
    return [{**event, "node": names.get(event["node"], event["node"])} for event in told]


def _processes(result: Mapping[str, Any]) -> str:
    """Where the nodes of a simulation were."""
    return "each node was a process of its own" if "link" in result else "all nodes ran in one process"


def _key_figures(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    figures = figures_of(result)
    metric, name = figures[0], in_a_sentence(figures[0].title)
    reached, alone = value_of(result), number(result, "standalone", metric.key, "mean")
    up, down = whole(result, "bytes", "up"), came_down(result)
    total, distillation = number(result, "seconds", "total"), number(result, "seconds", "distillation")
    tests = whole(result, "data", "test")
    first = comparison(result)[0]
    first_text = _unbroken(texts(first, figures)[0])
    title = {"student": f"Student {name}", "virtual": f"{metric.title} of the average",
             "ensemble": f"Ensemble {name}", "nodes": f"Mean {name} of the nodes"}  # fmt: skip
    central = central_of(result)
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
            + ("in rounds" if words(result, "turn") == "round" else "distillation"),
        },
    ]


def _tested(result: Mapping[str, Any], examples: int) -> str:
    """What a figure is measured on: examples, or the cases that they are parts of."""
    cases, case = whole(result, "data", "test_cases"), words(result, "data", "case") or "case"
    if cases is None:
        return f"{examples:,} test examples"
    return f"{cases:,} test {case}{'' if cases == 1 else 's'} ({examples:,} examples)"


def _unbroken(figure: str) -> str:
    """A figure that no line break parts from its unit or its spread: "71.8% ± 6.5" is one."""
    return figure.replace(" ", "\u00a0")


def _context(result: Mapping[str, Any]) -> str | None:
    """The data and how it was split, in sentences, as far as the result tells.

    A run from Python names no data set: then the nodes' own examples are counted.
    """
    held = [whole(node, "examples") for node in node_records(result)]
    known = [count for count in held if count is not None]
    train, test = whole(result, "data", "train"), whole(result, "data", "test")
    if train is None and known and len(known) == len(held):
        train = sum(known)
    counts = [
        f"{count:,} {label}" for count, label in ((train, "training"), (test, "test")) if count is not None
    ]
    size = f"{' and '.join(counts)} examples" if counts else ""
    shape = pick(result, "data", "shape")
    if size and isinstance(shape, list) and shape:
        size += " of " + " \u00d7 ".join(str(side) for side in shape) + (" tokens" if len(shape) == 1 else "")
    what = ", ".join(part for part in (words(result, "data", "name"), size) if part)

    how = words(result, "split", "about") or words(result, "split", "how")
    values = pick(result, "split", "values")
    if isinstance(values, list) and len(values) == len(held):
        names = [node_name(place, node) for place, node in enumerate(node_records(result))]
        each = ", ".join(f"{name} has {value}" for name, value in zip(names, values, strict=True))
        how = f"by {words(result, 'split', 'column')}: {each}"
    note = words(result, "data", "note")
    public, rows = words(result, "public", "name"), whole(result, "public", "examples")
    if public is not None and rows is not None:
        public += f", {rows:,} examples"
    sentences = [
        what and f"Data: {what}",
        how and f"Split over the nodes: {how}",
        note and note[0].upper() + note[1:],
        public and f"Public data: {public}",
        words(result, "public", "note"),
    ]
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence) or None


def _holdings(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The classes each node holds: names, and for each node the counts with a shade from 0 to 1."""
    held = []
    for place, node in enumerate(node_records(result)):
        counts = pick(node, "label_counts")
        known = isinstance(counts, list) and bool(counts)
        held.append((node_name(place, node), [whole({"n": n}, "n") for n in counts] if known else None))
    held = list(zip(written(result, [name for name, _ in held]), [counts for _, counts in held], strict=True))
    width = max((len(counts) for _, counts in held if counts), default=0)
    if width == 0:
        return None
    classes = pick(result, "data", "classes")
    names = [str(name) for name in classes[:width]] if isinstance(classes, list) else []
    names += [str(place) for place in range(len(names), width)]
    most = max(count or 0 for _, counts in held for count in counts or [])

    def cell(count: int | None) -> dict[str, Any]:
        # Even a single example gets a shade that can be told from none.
        shade = 0.08 + 0.84 * count / most if count else 0.0
        return {"count": count, "shade": f"{shade:.2f}", "strong": shade > 0.75}

    def row(name: str, counts: list[int | None] | None) -> dict[str, Any]:
        padded = [] if counts is None else counts + [None] * (width - len(counts))
        return {
            "name": name,
            "cells": [cell(count) for count in padded],
            "total": None if counts is None else sum(count or 0 for count in counts),
        }

    return {"classes": names, "nodes": [row(name, counts) for name, counts in held]}


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


def _traffic(result: Mapping[str, Any], ledger: Ledger | None) -> dict[str, Any]:
    """What left each node and what came to it, by kind where the ledger tells, else as sums."""
    records = {node_name(place, node): node for place, node in enumerate(node_records(result))}
    stored = pick(result, "bytes", "by_kind")
    by_kind = stored if isinstance(stored, Mapping) else {}
    sums: dict[str, Counter[str]] = {}
    for way in ("up", "down"):
        if ledger is None:
            sums[way] = Counter({str(kind): whole(by_kind, kind, way) or 0 for kind in by_kind})
        else:
            sums[way] = ledger.total(way)
    # The order of result.json, then whatever only the ledger knows.
    order = [str(kind) for kind in by_kind] + sorted((set(sums["up"]) | set(sums["down"])) - set(by_kind))
    kinds = {way: [kind for kind in order if sums[way][kind]] for way in ("up", "down")}

    strangers = sorted(set(ledger.nodes) - set(records)) if ledger else []
    rows, shown = [], labels(result)
    for name in [*records, *strangers]:
        row: dict[str, Any] = {"name": shown.get(name, name), "questions": None}
        for way in ("up", "down"):
            row[way] = [None] * len(kinds[way])
            row[f"{way}_total"] = whole(records.get(name), "bytes", way)
        if ledger is not None:
            traffic = ledger.nodes.get(name, Traffic())
            row["questions"] = len(traffic.questions)
            for way, counter in (("up", traffic.up), ("down", traffic.down)):
                row[way] = [counter[kind] for kind in kinds[way]]
                row[f"{way}_total"] = sum(counter.values())
        rows.append(row)

    totals, known = {way: whole(result, "bytes", way) for way in ("up", "down")}, kinds_of(result)
    if ledger is not None:
        agrees = all(
            sum(sums[way].values()) == totals[way]
            and all(sums[way][kind] == (whole(by_kind, kind, way) or 0) for kind in order)
            for way in ("up", "down")
        )
        totals = {way: sum(sums[way].values()) for way in ("up", "down")}
    return {
        "kinds": kinds,
        "meanings": [
            (kind, known[kind].says)
            for kind in order
            if kind in known and known[kind].says and kind in kinds["up"] + kinds["down"]
        ],
        "rows": rows,
        "sums": {way: [sums[way][kind] for kind in kinds[way]] for way in ("up", "down")},
        "totals": totals,
        "questions": whole(result, "questions"),
        "ledger": None if ledger is None else ("agrees" if agrees else "disagrees"),
    }  # fmt: skip


def _nodes(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    metric = figures_of(result)[0]
    _, alone = _own_values(result, metric)
    names = labels(result)

    def shown(value: float | None) -> str | None:
        return None if value is None else told(metric, value)

    nodes: list[dict[str, Any]] = [
        {
            "name": names[node_name(place, node)],
            "model": words(node, "model"),
            "parameters": whole(node, "parameters"),
            "examples": whole(node, "examples"),
            "alone": shown(number({"value": alone[place]}, "value")) if place < len(alone) else None,
        }
        for place, node in enumerate(node_records(result))
    ]
    if pick(result, "student") is None and "student" in result:  # the method has no central model
        return nodes
    return [
        *nodes,
        {
            "model": words(result, "student", "model"),
            "parameters": whole(result, "student", "parameters"),
            "is_student": True,
            "value": shown(value_of(result)),
        },
    ]


def _own_values(result: Mapping[str, Any], metric: Figure) -> tuple[bool, list[Any]]:
    """Whether the nodes' models were trained alone, and what they reach."""
    stored = pick(result, "standalone", metric.key, "per_node")
    if isinstance(stored, list):
        return True, stored
    at_the_end = pick(result, "local", metric.key, "per_node")
    return "local" not in result, at_the_end if isinstance(at_the_end, list) else []
