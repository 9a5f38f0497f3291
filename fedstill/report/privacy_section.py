"""Privacy and leakage sections of a run's report.

The privacy section lists releases, mechanism and epsilon spent per node; a run without any mechanism has one
sentence. The leakage section shows metrics, notes and images of attacks from ``leakage.json`` and
``leakage.safetensors``, whichever attacks were run. It never calls a run safe: a stronger attack may get
more.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedstill.attacks.attack import (
    AttackMetricsLine,
    AttackReport,
    ComparisonColumn,
    ImageTable,
    Leakage,
    LeakageMetric,
    group_metrics_into_lines,
    group_tables,
)
from fedstill.core.errors import list_names
from fedstill.core.text_format import format_count, format_percent, join_names, shorten_numbers
from fedstill.privacy.budget import epsilon_text_rounded_down
from fedstill.privacy.events import cost_from_dict
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound
from fedstill.report.images import image_tag, image_url
from fedstill.report.records import (
    Array,
    AuditTotals,
    NodePrivacy,
    NodeTraffic,
    Result,
    is_image_stack,
    read_tensors,
)
from fedstill.report.tables import NO_VALUE, Cell, Column, Fact, Row, Table, bar, bytes_markup

MAX_EVENTS = 8  # privacy events shown per node
RELEASE_PARTS = {
    "training": "training of the model",
    "critic": "training of the critic",
    "pate": "votes",
    "gradients": "gradients",
    "outputs": "outputs",
}


def _nodes_without_guarantee(result: Result) -> list[str]:
    return [node.name for node in result.node_privacy if node.bound is None]


def describe_privacy(result: Result) -> str | None:
    """Return a run's guarantee in one line for the terminal; None if the result does not record it.

    >>> node = {"guarantee": True, "epsilon": 2.0001, "delta": 1e-05, "mechanism": "pate", "unit": "a record"}
    >>> record = {"privacy": {"nodes": [{**node, "name": "a"}, {"name": "b"}]}}
    >>> describe_privacy(Result.from_record(record))
    'epsilon 2.01 at delta 1e-05 at a (pate), for a record; no guarantee at b'
    """
    nodes, unprotected = result.node_privacy, _nodes_without_guarantee(result)
    # Epsilons with different delta, mechanism or unit cannot be compared.
    groups: dict[tuple[float | None, str, str], list[NodePrivacy]] = {}
    for node in nodes:
        if node.bound is not None:
            groups.setdefault((node.delta, node.mechanism, node.unit), []).append(node)
    if not groups:
        return result.privacy.text if result.privacy else None
    lines = []
    for (_, mechanism, unit), group in groups.items():
        weakest = max(group, key=lambda node: node.bound or (0.0, 0.0))
        names = "each node" if len(group) == len(nodes) else join_names([node.name for node in group])
        guarantee = f"at most {weakest.guarantee_text}" if len(group) > 1 else weakest.guarantee_text
        lines.append(f"{guarantee} at {names} ({mechanism}){f', for {unit}' if unit else ''}")
    return "; ".join([*lines, *([f"{NO_GUARANTEE} at {join_names(unprotected)}"] if unprotected else [])])


def privacy_tile(result: Result) -> Fact:
    """Return the tile at the top of a page: the weakest guarantee of any node, or that there is none."""
    nodes, unprotected = result.node_privacy, _nodes_without_guarantee(result)
    protected = [node for node in nodes if node.bound is not None]
    if not protected:
        return Fact("Privacy", "none", "no formal guarantee")
    if unprotected:
        return Fact("Privacy", "partial", f"no formal guarantee at {list_names(unprotected, 3)}")
    weakest = max(protected, key=lambda node: node.bound or (0.0, 0.0))
    epsilon, delta = weakest.bound or (math.inf, 0.0)
    several = "at most; " if len(protected) > 1 else ""
    what = f"for {weakest.unit}" if len({node.unit for node in protected}) == 1 else "for units that differ"
    return Fact("Privacy", f"\u03b5 {format_epsilon_bound(epsilon)}", f"{several}delta {delta:g}, {what}")


def privacy_sentence(result: Result) -> str:
    """Return the sentence on privacy at the top of a page."""
    unprotected = _nodes_without_guarantee(result)
    if result.node_privacy and not unprotected:
        return (
            "The releases of each node have a formal privacy guarantee (see Privacy below for its strength)."
        )
    if len(unprotected) < len(result.node_privacy):
        return f"There is no formal privacy guarantee for {join_names(unprotected)} (see Privacy below)."
    return "There is no formal privacy guarantee (see Privacy below)."


def count_noise_text(result: Result) -> str:
    """Return "with noise" if all nodes add noise to their label counts, names of nodes if some do."""
    nodes = result.node_privacy
    noisy = [
        node.name
        for node in nodes
        if any("Laplace noise" in rule and "each count" in rule for rule in node.rules)
    ]
    return (
        "with noise" if len(noisy) == len(nodes) > 0 else f"{join_names(noisy)} with noise" if noisy else ""
    )


def nodes_revealing_sizes(result: Result) -> list[str]:
    """Return nodes whose privacy cost contains the sampling rate, which reveals their number of records."""
    return [
        node.name
        for node in result.node_privacy
        if any(event.rate < 1 for event in cost_from_dict(node.events))
    ]


def build_privacy_section(result: Result, audit: AuditTotals | None) -> dict[str, Any]:
    """Return the variables of the template; ``audit`` is None without an audit log."""
    nodes = result.node_privacy
    disagreeing = [
        result.node_display_name(node.name)
        for node in nodes
        if audit is not None and not _audit_agrees(node, audit.nodes.get(node.name, NodeTraffic()))
    ]
    return {
        "sentence": privacy_sentence(result),
        "known": result.privacy is not None,
        "text": result.privacy.text if result.privacy else None,
        "image_notes": image_notes(result),
        "mechanisms": sorted(audit.mechanisms) if audit else [],
        # Without a mechanism at any node there is nothing to list.
        "table": _table(result, audit) if any(node.mechanism != "none" for node in nodes) else None,
        "unprotected": _nodes_without_guarantee(result),
        "protections": _protections(result),
        "disagreeing": disagreeing,
    }


def _audit_agrees(node: NodePrivacy, traffic: NodeTraffic) -> bool:
    return (
        traffic.charges == +Counter(node.events)
        and traffic.without_guarantee == node.releases_without_guarantee
    )


def image_notes(result: Result) -> list[str]:
    """Return sentences on what label maps and differences from real images reveal about the nodes' images."""
    totals = (result.bytes.by_kind or {}).items()
    up, down = ({kind for kind, sums in totals if getattr(sums, direction)} for direction in ("up", "down"))
    notes = []
    if "label maps" in up:
        recipients = ""
        if "label maps" in down:
            returned = "label maps" in result.returned
            recipients = (
                " Each was returned to its own node only."
                if returned
                else " They were sent to all other nodes."
            )
        notes.append(
            "Label maps, which show the outlines in private images, were released: one per "
            f"image.{recipients}"
        )
    if "difference" in up:
        gradients = (
            " Their gradients were released as well, from which a server can reconstruct the node's image."
            if "gradients" in up
            else ""
        )
        notes.append(
            "Nodes compared the server's images with their own images of the same label maps and released "
            "the "
            f"difference.{gradients}"
        )
    return notes


def max_guess_accuracy(epsilon: float, delta: float) -> float:
    """Return the largest accuracy of a membership guess under (epsilon, delta)-DP; 0.5 is random guessing.

    ``(e^epsilon + delta) / (e^epsilon + 1)`` for a record that is a member with probability 0.5: both error
    rates add up to ``2 (1 - delta) / (e^epsilon + 1)`` at least (Kairouz, Oh, Viswanath, "The Composition
    Theorem for Differential Privacy", ICML 2015, Theorem 2.1).

    >>> [round(max_guess_accuracy(epsilon, 0.0), 4) for epsilon in (0.0, 1.0, 3.0)]
    [0.5, 0.7311, 0.9526]
    """
    return 1 - (1 - delta) / (math.exp(min(epsilon, 700.0)) + 1)


# --- table of nodes ---------------------------------------------------------------------------------------


def _table(result: Result, audit: AuditTotals | None) -> Table:
    rows = []
    for node in result.node_privacy:
        released = None if audit is None else _kinds_with_bytes(audit.nodes.get(node.name, NodeTraffic()).up)
        bound, unprotected = node.bound, node.releases_without_guarantee
        note = f"{format_count(unprotected, 'release')} without" if unprotected else ""
        strong = Markup("<strong>{}</strong>").format(NO_GUARANTEE)
        cost = [Cell(strong, note, style="none-kept", span=3)]
        if bound is not None:
            epsilon, delta = format_epsilon_bound(bound[0]), f"{bound[1]:g}"
            cost = [Cell(epsilon, style="sum"), Cell(delta), Cell(_guess_accuracy_text(*bound))]
        budget = Cell("none set" if node.budget is None else f"{node.budget:g}")
        remaining = (
            Cell("", style="empty-cell") if node.left is None else Cell(epsilon_text_rounded_down(node.left))
        )
        rows.append(
            Row(
                result.node_display_name(node.name),
                [Cell(released), Cell(node.mechanism), *cost, budget, remaining],
            )
        )
    headers = ("Epsilon spent", "Delta", "Membership guess right, at most", "Budget of the run", "Remaining")
    columns = [Column("Releases", "kinds"), Column("Mechanism", ""), *map(Column, headers)]
    title = "Releases, mechanism, epsilon spent and remaining budget of each node"
    return Table(title, "Node", columns, rows, style="stacked")


def _kinds_with_bytes(up: Counter[str]) -> Markup:
    piece = Markup('<span class="piece">{} {}</span>')
    pieces = [piece.format(kind, bytes_markup(count)) for kind, count in up.items() if count]
    return Markup(", ").join(pieces) or Markup("nothing")


def _guess_accuracy_text(epsilon: float, delta: float) -> str:
    accuracy = 100 * max_guess_accuracy(epsilon, delta)
    return format_percent(math.ceil(10 * accuracy - 1e-9) / 10) if accuracy <= 99.9 else "over 99.9%"


# --- mechanisms and assumptions ---------------------------------------------------------------------------


def _protections(result: Result) -> list[dict[str, Any]]:
    """Return one entry per distinct protection, with the charges of the nodes that share it."""
    by_content: dict[str, dict[str, Any]] = {}
    for node in result.node_privacy:
        if node.mechanism == "none":
            continue
        noise = [
            f"{RELEASE_PARTS.get(name, name)} {level:.4g}" for name, level in node.noise.items() if level
        ]
        facts = {
            "Mechanism": ": ".join(filter(None, (node.mechanism, node.says))),
            "Unit": node.unit,
            "Noise": ", ".join(noise),
            "Accountant": node.accountant,
            "Randomness": node.randomness,
        }
        content = {
            "facts": {name: value for name, value in facts.items() if value},
            "rules": [shorten_numbers(line) for line in node.rules],
            "assumes": node.assumes,
        }
        protection = by_content.setdefault(json.dumps(content), {**content, "charges": {}})
        protection["charges"][result.node_display_name(node.name)] = _charges_text(Counter(node.events))
    return list(by_content.values())


def _charges_text(events: Counter[str]) -> str:
    shown = [f"{count:,} \u00d7 {shorten_numbers(event)}" for event, count in events.most_common(MAX_EVENTS)]
    more = len(events) - len(shown)
    return (", ".join(shown) or "nothing") + (f" and {more} other events" if more > 0 else "")


# --- leakage --------------------------------------------------------------------------------------------


IMAGES_FILE = "leakage.safetensors"
MAX_IMAGES = 10  # images per strip
MAX_IMAGE_PIXELS = 96  # longer side

DisplayText = Callable[[str], str]


def build_leakage_section(folder: Path, result: Result) -> dict[str, Any] | None:
    """Return the variables of the template; None for a run without attacks.

    Raises:
        RunFolderError: a file is broken.
    """
    leakage = Leakage.read(folder)
    if leakage is None:
        return None
    stacks, display_text = read_tensors(folder / IMAGES_FILE), _name_replacer(result.node_display_names)
    guarantee = NO_GUARANTEE
    if leakage.epsilon is not None:
        guarantee = f"epsilon at most {format_epsilon_bound(leakage.epsilon)} at each node"
    shown = {name: stack[:MAX_IMAGES] for name, stack in (stacks or {}).items() if is_image_stack(stack)}
    return {
        "leakage": leakage,
        "attacks": [_attack_variables(attack, shown, display_text) for attack in leakage.attacks],
        "releases": join_names(leakage.releases) if leakage.releases else None,
        "guarantee": guarantee,
        "missing_images": IMAGES_FILE if stacks is None else None,
        "config": json.dumps(leakage.config, indent=2, ensure_ascii=False),
    }


def _name_replacer(names: Mapping[str, str]) -> DisplayText:
    """Return a function that replaces node names in a text by their display names."""
    changed = [name for name, display_name in names.items() if display_name != name]
    if not changed:
        return lambda text: text
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, changed))})(?![\w-])")
    return lambda text: pattern.sub(lambda match: names[match[1]], text)


def _attack_variables(
    report: AttackReport, stacks: Mapping[str, Array], display_text: DisplayText
) -> dict[str, Any]:
    title, columns = report.title or report.name, {column.name: column for column in report.columns}
    return {
        "title": title,
        "about": [(display_text(term), display_text(about)) for term, about in report.about],
        "tables": [
            _attack_table(title, table, columns, display_text)
            for table in group_tables(group_metrics_into_lines(report.rows))
        ],
        "notes": report.notes,
        "pictures": [_image_strips(images, stacks, display_text) for images in report.pictures],
    }


def _attack_table(
    title: str,
    table: Sequence[AttackMetricsLine],
    columns: Mapping[str, ComparisonColumn],
    display_text: DisplayText,
) -> Table:
    metrics = list(dict.fromkeys(metric for line in table for metric in line.metrics))
    by_metric = {name: [line.metrics[name] for line in table if name in line.metrics] for name in metrics}
    shared_baselines = {name: _shared_baseline(rows) for name, rows in by_metric.items()}
    best = _strongest_by_column([row for line in table for row in line.metrics.values()], columns)
    chance_level = _chance_level(by_metric[metrics[0]], columns)
    has_attacks = any(line.attack for line in table)
    rows = []
    for line in table:
        cells = [Cell(display_text(line.target))] if has_attacks else []
        for name in metrics:
            row = line.metrics.get(name)
            baseline = "" if row is None or shared_baselines[name] else row.baseline
            cells.append(Cell(NO_VALUE) if row is None else _cell(row, baseline, row in best))
        cells += (
            []
            if chance_level is None
            else [Cell(_bar(line.metrics.get(metrics[0]), chance_level), style="bar")]
        )
        rows.append(Row(line.attack if has_attacks else display_text(line.target), cells))
    headers = [f"{name[:1].upper()}{name[1:]}" for name in metrics]
    shown = [*([Column("Target", "")] if has_attacks else []), *map(Column, headers)]
    baselines = [
        *([Cell("")] if has_attacks else []),
        *(Cell(baseline) for baseline in shared_baselines.values()),
    ]
    if chance_level is not None:
        shown.append(Column(f"{headers[0]}, 0 to 100%; random guessing: {chance_level:g}%", ""))
        baselines.append(Cell(""))
    footer = [Row("Baseline without attack", baselines)] if any(shared_baselines.values()) else []
    caption = f"{title}: {', '.join(headers)}"
    return Table(caption, "Attack" if has_attacks else "Target", shown, rows, footer, style="members")


def _cell(row: LeakageMetric, baseline: str, best: bool) -> Cell:
    notes = [row.note, f"baseline {baseline}" if baseline else ""]
    return Cell(row.written, Markup("<br>").join(filter(None, notes)), bold=best)


def _shared_baseline(rows: Sequence[LeakageMetric]) -> str:
    baselines = {row.baseline for row in rows}
    return baselines.pop() if len(baselines) == 1 else ""


def _strongest_by_column(
    rows: Sequence[LeakageMetric], columns: Mapping[str, ComparisonColumn]
) -> list[LeakageMetric]:
    best = []
    for name, column in columns.items():
        values = [(row.value, row) for row in rows if row.column == name and row.value is not None]
        if len(values) > 1:
            strongest = min if column.lower_is_stronger else max
            best.append(strongest(values, key=lambda pair: pair[0])[1])
    return best


def _chance_level(rows: Sequence[LeakageMetric], columns: Mapping[str, ComparisonColumn]) -> float | None:
    guesses = [columns[row.column].guess if row.column in columns else None for row in rows]
    return None if None in guesses else guesses[0]


def _bar(row: LeakageMetric | None, chance: float) -> Markup:
    if row is None or row.value is None:
        return Markup("")
    whisker = row.interval or (row.value, row.value)
    return bar(whisker=whisker, rings=[row.value], lines=[("chance", chance)])


def _image_strips(
    images: ImageTable, stacks: Mapping[str, Array], display_text: DisplayText
) -> dict[str, Any]:
    strips = []
    for strip in images.strips:
        if strip.stack not in stacks:
            continue
        stack = stacks[strip.stack][: len(images.heads)]
        captions = [*strip.below, *[""] * (len(stack) - len(strip.below))]
        tags = [image_tag(image_url(image, MAX_IMAGE_PIXELS), strip.head) for image in stack]
        strips.append({"header": strip.head, "cells": list(zip(tags, captions, strict=False))})
    count = len(strips[0]["cells"]) if strips else 0
    return {
        "title": images.title,
        "note": images.note,
        "headers": [display_text(header) for header in images.heads[:count]],
        "strips": strips,
        "more": len(images.heads) - count,
    }
