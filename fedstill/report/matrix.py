"""Which methods run which tasks, as the methods declare what they need and the tasks what they have."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    """The tasks that each method runs, a line a method, and below it the reasons."""
    found, every = tasks_by_method(), list(TASKS.working())
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_row(Text("tasks", style="bold"), ", ".join(every))
    reasons: dict[str, list[str]] = {}
    for name, tasks in found.items():
        refused = [task for task, reason in tasks.items() if reason]
        some = ", ".join(task for task in every if task not in refused)
        most = f"all but {', '.join(refused)}" if refused else "all"
        table.add_row(name, most if len(refused) < len(every) / 2 else some)
        for reason in dict.fromkeys(filter(None, tasks.values())):
            reasons.setdefault(reason, []).append(name)
    console.print(table)
    console.print()
    for reason, names in reasons.items():
        console.print(f"{', '.join(names)}: {reason}", style="dim")
