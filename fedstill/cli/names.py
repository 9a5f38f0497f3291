"""``fedstill list``: what can be named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstill.cli.usage import Given
from fedstill.core.errors import UnknownName
from fedstill.runs import presets

if TYPE_CHECKING:
    from rich.console import Console


def names(given: Given) -> None:
    """Methods, tasks, data sets, models; or more of one of them."""
    from rich.console import Console

    from fedstill.protocol.method import METHODS
    from fedstill.report.methods import print_method, print_methods, print_tasks

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
    from rich.table import Table

    from fedstill.attacks.attack import ATTACKS
    from fedstill.data.config import DATA
    from fedstill.data.dividing import SPLITS
    from fedstill.models import MODELS
    from fedstill.privacy.config import MECHANISMS
    from fedstill.tasks import ENSEMBLES, TASKS

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for what, names in (
        ("tasks", TASKS),
        ("data sets", DATA),
        ("splits", SPLITS),
        ("models", MODELS),
        ("ensembles", ENSEMBLES),
        ("mechanisms", MECHANISMS),
        ("attacks", ATTACKS),
    ):
        table.add_row(what, ", ".join(names))
    table.add_row("presets", f"{len(presets.names())}, as demo and digits-fediod: fedstill list presets")
    console.print(table)
    console.print("\nMore of one method: fedstill list METHOD; which runs which task: fedstill list tasks")
