"""Which methods run which tasks, as the methods declare what they need and the tasks what they have."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fedstill.protocol.method import METHODS, refusal
from fedstill.tasks import TASKS


def tasks_by_method() -> dict[str, dict[str, str | None]]:
    """For each method and task, why it cannot run it; None where it can."""
    tasks = {name: kind().example() for name, kind in TASKS.working().items()}
    return {
        name: {task: refusal(method().needs(), made) for task, made in tasks.items()}
        for name, method in METHODS.working().items()
    }


def print_tasks(console: Console) -> None:
    """A table of methods and tasks, and below it the reasons."""
    found = tasks_by_method()
    table = Table(title="tasks", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for head in TASKS.working():
        table.add_column(head, justify="center", overflow="fold")
    reasons: dict[str, list[str]] = {}
    for name, tasks in found.items():
        table.add_row(f"  {name}", *("-" if reason else "yes" for reason in tasks.values()))
        for reason in filter(None, tasks.values()):
            reasons.setdefault(reason, [])
            if name not in reasons[reason]:
                reasons[reason].append(name)
    console.print(table)
    for reason, names in reasons.items():
        console.print(f"  {', '.join(names)}: {reason}", style="dim")
    console.print()
