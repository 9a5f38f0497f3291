"""A run's tables by node: the classes that it holds, what left it, its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedstill.report.files import Audited, Traffic
from fedstill.report.metrics import told
from fedstill.report.names import labels
from fedstill.report.result import Result
from fedstill.report.result_parts import OverNodes


def holdings(result: Result) -> dict[str, Any] | None:
    """The classes each node holds: names, and for each node the counts with a shade from 0 to 1."""
    names = labels(result)
    held = [(names[node.name], node.label_counts or None) for node in result.each]
    width = max((len(counts) for _, counts in held if counts), default=0)
    if width == 0:
        return None
    classes = [*result.data.classes[:width]]
    classes += [str(place) for place in range(len(classes), width)]
    most = max(count or 0 for _, counts in held for count in counts or [])

    def cell(count: int | None) -> dict[str, Any]:
        # Even a single example gets a shade that can be told from none.
        shade = 0.08 + 0.84 * count / most if count else 0.0
        return {"count": count, "shade": f"{shade:.2f}", "strong": shade > 0.75}

    def row(name: str, counts: Sequence[int | None] | None) -> dict[str, Any]:
        padded = [] if counts is None else [*counts, *[None] * (width - len(counts))]
        return {
            "name": name,
            "cells": [cell(count) for count in padded],
            "total": None if counts is None else sum(count or 0 for count in counts),
        }

    return {"classes": classes, "nodes": [row(name, counts) for name, counts in held]}


def traffic(result: Result, audit: Audited | None) -> dict[str, Any]:
    """What left each node and what came to it, by kind where the log tells, else as sums."""
    records = {node.name: node.bytes for node in result.each}
    by_kind = result.bytes.by_kind or {}
    sums: dict[str, Counter[str]] = {}
    for way in ("up", "down"):
        if audit is None:
            sums[way] = Counter({kind: getattr(crossed, way) for kind, crossed in by_kind.items()})
        else:
            sums[way] = audit.total(way)
    # The order of result.json, then whatever only the log knows.
    order = list(by_kind) + sorted((set(sums["up"]) | set(sums["down"])) - set(by_kind))
    kinds = {way: [kind for kind in order if sums[way][kind]] for way in ("up", "down")}

    strangers = sorted(set(audit.nodes) - set(records)) if audit else []
    rows, shown = [], labels(result)
    for name in [*records, *strangers]:
        row: dict[str, Any] = {"name": shown.get(name, name), "questions": None}
        for way in ("up", "down"):
            row[way] = [None] * len(kinds[way])
            row[f"{way}_total"] = getattr(records.get(name), way, None)
        if audit is not None:
            traffic = audit.nodes.get(name, Traffic())
            row["questions"] = len(traffic.questions)
            for way, counter in (("up", traffic.up), ("down", traffic.down)):
                row[way] = [counter[kind] for kind in kinds[way]]
                row[f"{way}_total"] = sum(counter.values())
        rows.append(row)

    totals, known = {"up": result.bytes.up, "down": result.bytes.down}, result.kind_of()
    if audit is not None:
        agrees = all(
            sum(sums[way].values()) == totals[way]
            and all(sums[way][kind] == getattr(by_kind.get(kind), way, 0) for kind in order)
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
        "questions": result.questions,
        "audit": None if audit is None else ("agrees" if agrees else "disagrees"),
    }  # fmt: skip


def nodes(result: Result) -> list[dict[str, Any]]:
    metric = result.metric
    _, alone = own_values(result)
    names = labels(result)

    def shown(value: float | None) -> str | None:
        return None if value is None else told(metric, value)

    rows: list[dict[str, Any]] = [
        {
            "name": names[node.name],
            "model": node.model,
            "parameters": node.parameters,
            "examples": node.examples,
            "alone": shown(alone[place]) if place < len(alone) else None,
        }
        for place, node in enumerate(result.each)
    ]
    if "student" in result.missing:  # the method has no central model
        return rows
    return [
        *rows,
        {
            "model": result.student.model,
            "parameters": result.student.parameters,
            "is_student": True,
            "value": shown(result.value),
        },
    ]


def own_values(result: Result) -> tuple[bool, Sequence[float | None]]:
    """Whether the nodes' models were trained alone, and what they reach."""
    alone = (result.standalone or {}).get(result.metric.key)
    if alone is not None:
        return True, alone.per_node
    at_the_end = (result.local or {}).get(result.metric.key, OverNodes())
    return result.local is None, at_the_end.per_node
