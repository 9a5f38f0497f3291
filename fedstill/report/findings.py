"""What models reach site by site (as FedIOD's Table 8 has it) and finding by finding, from a run's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from fedstill.core.words import number, pick
from fedstill.report.bars import bar
from fedstill.report.metrics import bare, figures_of, head, told
from fedstill.report.names import written
from fedstill.report.table import CENTRAL, central_of
from fedstill.tasks.task import Figure

CHANCE = 50.0  # percent, the area under the curve of who guesses


def sites(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """One table a figure, one line a model, one column a site; None where the test part has no sites."""
    stored = pick(result, "sites")
    names = pick(stored, "names")
    if not isinstance(names, list) or not names:
        return None
    models = [(CENTRAL[central_of(result)][0], pick(stored, "central"), True)]
    models.append(("centralised", pick(stored, "centralised"), False))
    nodes = pick(stored, "nodes")
    by_node = nodes if isinstance(nodes, Mapping) else {}
    own = zip(written(result, list(map(str, by_node))), by_node.values(), strict=True)
    models += [(name, by_site, False) for name, by_site in own]
    present = [model for model in models if isinstance(model[1], Mapping)]
    tables = [
        {
            "head": head(figure, units=True),
            "rows": [
                {
                    "name": name,
                    "is_student": is_student,
                    "cells": [_cell(figure, number(by_site, str(site), figure.key)) for site in names],
                }
                for name, by_site, is_student in present
            ],
        }
        for figure in figures_of(result)
    ]
    return {"names": [str(name) for name in names], "tables": tables}


def _cell(figure: Figure, value: float | None) -> str | None:
    return None if value is None else bare(figure, value)


def section(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """One line a finding: the central model, the centralised one, the nodes; None for other tasks."""
    stored = pick(result, "labels")
    names = pick(stored, "names")
    if not isinstance(names, list) or not names:
        return None
    figure = figures_of(result)[0]
    nodes = pick(stored, "nodes")
    each = list(nodes.values()) if isinstance(nodes, Mapping) else []
    lines = []
    for place, name in enumerate(names):
        central, centralised = (_at(pick(stored, key), place) for key in ("central", "centralised"))
        own = [value for values in each if (value := _at(values, place)) is not None]
        mean = sum(own) / len(own) if own else None
        lines.append(
            {
                "name": str(name),
                **{
                    key: None if value is None else told(figure, value)
                    for key, value in (("central", central), ("centralised", centralised), ("own", mean))
                },
                "bar": _bar(central, centralised, own, mean),
            }
        )
    return {
        "title": figure.title,
        "central": CENTRAL[central_of(result)][0],
        "lines": lines,
        "has": {
            key: any(line[key] is not None for line in lines) for key in ("central", "centralised", "own")
        },
    }


def _at(values: object, place: int) -> float | None:
    """One of a list of values, None where it has none."""
    return number({"it": values[place]}, "it") if isinstance(values, list) and place < len(values) else None


def _bar(central: float | None, centralised: float | None, own: list[float], mean: float | None) -> Markup:
    """A bar: the central model; rings: nodes; a thin line: their mean; a thick one: the mark to reach."""
    levels = (("chance", CHANCE), ("mean", mean), ("mark", centralised))
    return bar(
        None if central is None else ("bar student", central),
        rings=own,
        levels=[(style, value) for style, value in levels if value is not None],
    )
