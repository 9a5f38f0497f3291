"""The methods as tables: what leaves a node, what each needs and asks, and which tasks it runs."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstill.compare.plan import questions, what_leaves
from fedstill.core.errors import FedstillError
from fedstill.protocol.method import METHODS, refusal
from fedstill.report.result import CENTRAL
from fedstill.report.table import NEEDS
from fedstill.runs.config import from_dict
from fedstill.tasks import TASKS

# What a comparison does not tell for each method, since all methods of one share its task and its nodes.
MORE_NEEDS: Mapping[str, str] = {
    "trainable": "node models that can be trained",
    "joins_public": "public data in the nodes' training",
    "images": "images as inputs",
    "one_label": "one label for each input",
    "maps": "label maps",
    "no_maps": "inputs not made from label maps",
    "vectors": "one output vector for each input",
}


def print_methods(console: Console) -> None:
    """Print all methods, a line each: name, title and paper; of one that cannot be imported, why."""
    table = _lines()
    for name in METHODS:
        try:
            method = METHODS[name]
            table.add_row(Text(name, style="bold"), Text(f"{method.title}, {method.paper}"))
        except FedstillError as error:
            table.add_row(Text(name, style="bold"), Text(str(error)))
    console.print(table)
    console.print()


def print_method(name: str, console: Console) -> None:
    """Print what a method with its default options asks of those who take part.

    What leaves and what is asked is of the first task that it can learn.
    """
    method = METHODS[name]()
    needs, tasks = vars(method.needs()), tasks_by_method()[name]
    run = from_dict({"method": {"name": name}, "task": {"name": next(t for t in tasks if not tasks[t])}})
    asked = [
        question.name + (f" x{question.times}" if question.times > 1 else "")
        for question in questions(run).values()
    ]
    table = _lines()
    table.add_row(Text(name, style="bold"), Text(f"{method.title}, {method.paper}"))
    for head, words, none in (
        ("leaves a node", what_leaves(run), "nothing"),
        ("needs", [words for key, words in {**NEEDS, **MORE_NEEDS}.items() if needs[key]], "nothing special"),
        ("asks", asked, "none"),
        ("is judged by", [CENTRAL[method.central][0]], ""),
    ):
        table.add_row(Text(head, style="dim"), Text(", ".join(words) or none))
    console.print(table)


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
    table = _lines()
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


def _lines() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    return table
