"""The methods as a table: what leaves a node, what each of them needs, and what nodes are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstill.compare.plan import questions, what_leaves
from fedstill.protocol.method import METHODS, refusal
from fedstill.report.table import CENTRAL, NEEDS
from fedstill.runs.config import from_dict
from fedstill.tasks import TASKS, TaskConfig, any_task

WIDE = 120  # columns of a terminal
MAPS = "segmentation"  # the task that stands for all whose inputs are made from label maps


@dataclass(frozen=True)
class Terms:
    """What a method with its default options asks of those who take part.

    What leaves and what is asked is of the first task that it can learn; what a task with maps adds to that
    is said, too.
    """

    name: str
    title: str
    paper: str
    judged: str
    leaves: str
    needs: Mapping[str, bool]  # by the words for it
    questions: str


def terms(name: str) -> Terms:
    """The terms of a method, from what it declares.

    >>> terms("fedavg").leaves
    'data sizes, parameters'
    >>> terms("fediod").leaves.partition("; ")[2]
    'with maps also: difference, label maps'
    >>> [need for need, needed in terms("fedavg").needs.items() if needed]
    ['same architecture']
    """
    method = METHODS[name]
    own = method.needs(method.config())
    needs = vars(own)
    able = [task for task in TASKS if refusal(own, any_task(TaskConfig(task))) is None]  # type: ignore[arg-type]
    tables = [{"method": {"name": name}, "task": {"name": task}} for task in (able[0], MAPS) if task in able]
    first, *others = map(from_dict, tables)
    asked = questions(first)
    more = [kind for run in others for kind in what_leaves(run) if kind not in what_leaves(first)]
    asked_more = [question for run in others for question in questions(run) if question not in asked]
    times = {
        question.name: f" x{question.times}" if question.times > 1 else "" for question in asked.values()
    }
    return Terms(
        name=name,
        title=method.title,
        paper=method.paper,
        judged=CENTRAL[method.central][0],
        leaves=(", ".join(what_leaves(first)) or "nothing") + _with_maps(more),
        needs={words: needs[key] for key, words in NEEDS.items()},
        questions=(", ".join(f"{question}{times[question]}" for question in asked) or "none")
        + _with_maps(asked_more),
    )


def _with_maps(more: Sequence[str]) -> str:
    return f"; with maps also: {', '.join(more)}" if more else ""


def print_methods(console: Console) -> None:
    """Print all methods: a table where the terminal is wide, else a few lines each."""
    console.print(Text("methods", style="bold"))
    everyone = [terms(name) for name in METHODS]
    if console.width < WIDE:
        for told in everyone:
            console.print(_lines(told))
        console.print()
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("paper")
    table.add_column("leaves a node")
    for words in NEEDS.values():
        table.add_column(words.replace(" ", "\n", 1), min_width=max(map(len, words.split())))
    table.add_column("questions (times a run)")
    for told in everyone:
        about = Text.assemble((told.title, "bold"), f", {told.paper}")
        yes = [
            Text("yes" if needed else "no", style="" if needed else "dim") for needed in told.needs.values()
        ]
        table.add_row(Text(told.name), about, Text(told.leaves), *yes, Text(told.questions))
    console.print(table)


def _lines(told: Terms) -> Table:
    """One method for a narrow terminal: what is said of it stands below its name, each on its line."""
    lines = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    lines.add_column(no_wrap=True, min_width=15)
    lines.add_column()
    needs = ", ".join(f"{words}: {'yes' if needed else 'no'}" for words, needed in told.needs.items())
    lines.add_row(Text(f"  {told.name}", style="bold"), Text(f"{told.title}, {told.paper}"))
    for head, text in (("leaves a node", told.leaves), ("needs", needs), ("asks", told.questions)):
        lines.add_row(Text(f"    {head}", style="dim"), Text(text))
    return lines
