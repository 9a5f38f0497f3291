"""What every run's result says, wherever its nodes were; the rest is what only a simulation can know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.data.public import Public
from fedstill.methods.server import Server
from fedstill.node.ledger import Ledger
from fedstill.privacy.statement import Statement, summary
from fedstill.protocol.method import Method, Needs, method_name
from fedstill.protocol.questions import NodeSide
from fedstill.tasks import Task


def common(
    *,
    method: Method,
    needs: Needs,
    task: Task,
    seed: int,
    side: NodeSide,
    server: Server,
    public: Public | None,
    ledger: Ledger,
    compute: Compute,
    engine: str,
    parted: Mapping[str, Any],
    statements: Mapping[str, Statement],
) -> tuple[dict[str, Any], Mapping[str, dict[str, int]]]:
    """The part of a result that follows from the method, its server and the ledger.

    Args:
        method: what was run.
        needs: what it needed.
        task: what was learned.
        seed: of the run.
        side: what its nodes could be asked.
        server: the method's program, at its end.
        public: public data, or None.
        ledger: of all releases.
        compute: where it was computed.
        engine: its name.
        parted: how nodes were grouped, and what that was chosen by.
        statements: how nodes protect their records, as far as they have said.

    Returns:
        The part, and bytes up and down by node.
    """
    sums = ledger.summary()
    by_node: Mapping[str, dict[str, int]] = sums["by_node"]
    told = {
        "method": method_name(method),
        "title": method.title,
        "task": task.name,
        "kind": task.kind,
        "metric": task.metric,
        "figures": [dataclasses.asdict(figure) for figure in task.figures],
        "seed": seed,
        "central": method.central,
        "needs": dataclasses.asdict(needs),
        "leaves": list(side.leaves()),
        "kinds": {
            kind: {"says": kind.says, "of": kind.of, "of_maps": kind.of_maps, "package": kind.package}
            for kind in side.travels()
        },
        "turn": server.unit,
        "turns": server.total,
        "public": (
            None if public is None else {"name": public.name, "examples": len(public), "note": public.note}
        ),
        "bytes": {key: sums[key] for key in ("up", "down", "by_kind")},
        "questions": sums["questions"],
        "questions_by_name": sums["questions_by_name"],
        "events": server.federation.events,
        "engine": {
            "name": engine,
            "device": str(compute.device),
            "precision": compute.precision,
            "threads": torch.get_num_threads(),
            **parted,
        },
        "privacy": summary(statements, {name: ledger.spent(name) for name in server.federation.nodes}),
    }
    return told, by_node


def told_cases(test: TensorData) -> dict[str, Any]:
    """Of how many cases test examples are parts, as figures are means over those; empty: of none.

    ``test_cases`` says how many, ``case`` what one is: a patient of several slices, a picture of several
    patches.
    """
    count = 0 if test.cases is None else len(test.cases.present())
    if test.cases is None or count in (0, len(test)):
        return {}
    return {"test_cases": count, "case": "patient" if test.cases.places is None else "picture"}
