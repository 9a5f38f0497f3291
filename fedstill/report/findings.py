"""What models reach site by site (as FedIOD's Table 8 has it) and finding by finding, from a run's result."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from fedstill.report.bars import bar
from fedstill.report.metrics import bare, head, told
from fedstill.report.names import written
from fedstill.report.result import CENTRAL, Result
from fedstill.tasks.task import Figure

CHANCE = 50.0  # percent, the area under the curve of who guesses


def sites(result: Result) -> dict[str, Any] | None:
    """One table a figure, one line a model, one column a site; None where the test part has no sites."""
    stored = result.sites
    if stored is None or not stored.names:
        return None
    models = [(CENTRAL[result.central][0], stored.central, True), ("centralised", stored.centralised, False)]
    own = zip(written(result, list(stored.nodes)), stored.nodes.values(), strict=True)
    models += [(name, by_site, False) for name, by_site in own]
    present = [(name, by_site, is_ours) for name, by_site, is_ours in models if by_site is not None]
    tables = [
        {
            "head": head(figure, units=True),
            "rows": [
                {
                    "name": name,
                    "is_student": is_student,
                    "cells": [_cell(figure, by_site.get(site, {}).get(figure.key)) for site in stored.names],
                }
                for name, by_site, is_student in present
            ],
        }
        for figure in result.figures
    ]
    return {"names": stored.names, "tables": tables}


def _cell(figure: Figure, value: float | None) -> str | None:
    return None if value is None else bare(figure, value)


def section(result: Result) -> dict[str, Any] | None:
    """One line a finding: the central model, the centralised one, the nodes; None for other tasks."""
    stored = result.labels
    if stored is None or not stored.names:
        return None
    figure, lines = result.metric, []
    for place, name in enumerate(stored.names):
        central, centralised = (
            None if values is None else values[place] for values in (stored.central, stored.centralised)
        )
        each = (values[place] for values in stored.nodes.values() if values is not None)
        own = [value for value in each if value is not None]
        mean = sum(own) / len(own) if own else None
        lines.append(
            {
                "name": name,
                **{
                    key: None if value is None else told(figure, value)
                    for key, value in (("central", central), ("centralised", centralised), ("own", mean))
                },
                "bar": _bar(central, centralised, own, mean),
            }
        )
    return {
        "title": figure.title,
        "central": CENTRAL[result.central][0],
        "lines": lines,
        "has": {
            key: any(line[key] is not None for line in lines) for key in ("central", "centralised", "own")
        },
    }


def _bar(central: float | None, centralised: float | None, own: list[float], mean: float | None) -> Markup:
    """A bar: the central model; rings: nodes; a thin line: their mean; a thick one: the mark to reach."""
    levels = (("chance", CHANCE), ("mean", mean), ("mark", centralised))
    return bar(
        None if central is None else ("bar student", central),
        rings=own,
        levels=[(style, value) for style, value in levels if value is not None],
    )
