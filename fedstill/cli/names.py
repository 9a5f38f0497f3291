"""``fedstill list``: what can be named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedstill.cli.console import print_facts
from fedstill.cli.usage import Given
from fedstill.core.errors import UnknownName
from fedstill.runs import presets

if TYPE_CHECKING:
    from rich.console import Console


def names(given: Given) -> None:
    """Methods, tasks, data sets, models; or more of one of them."""
    from rich.console import Console

    from fedstill.protocol.method import METHODS
    from fedstill.report.matrix import print_tasks
    from fedstill.report.methods import print_method, print_methods

    console, what = Console(), given.places[0] if given.places else None
    if what is None:
        print_methods(console)
        _print_names(console)
    elif what == "presets":
        for name in presets.names():
            console.print(f"{name:<30} {presets.describe(name)}", soft_wrap=True, highlight=False)
    elif what == "tasks":
        print_tasks(console)
    elif what in METHODS:
        print_method(what, console)
    else:
        raise UnknownName("method", what, [*METHODS, "presets", "tasks"])


def _print_names(console: Console) -> None:
    """What else can be named, a line each."""
    from fedstill.attacks.attack import ATTACKS
    from fedstill.data.config import DATA
    from fedstill.data.dividing import SPLITS
    from fedstill.models import MODELS
    from fedstill.privacy.config import MECHANISMS
    from fedstill.tasks import ENSEMBLES, TASKS

    found: dict[str, Mapping[str, Any]] = {
        "tasks": TASKS,
        "data sets": DATA,
        "splits": SPLITS,
        "models": MODELS,
        "ensembles": ENSEMBLES,
        "mechanisms": MECHANISMS,
        "attacks": ATTACKS,
    }
    few = f"{len(presets.names())}, as demo and digits-fediod: fedstill list presets"
    told = {what: ", ".join(names) for what, names in found.items()}
    print_facts(console, {**told, "presets": few}, indent="")
    console.print("More of one method: fedstill list METHOD; which runs which task: fedstill list tasks")
