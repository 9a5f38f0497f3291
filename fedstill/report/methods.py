"""The methods as a table: what leaves a node, what each of them needs, and what nodes are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Terms:
    """What a method with its default options asks of those who take part.

    What leaves and what is asked is of the first task that it can learn.
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
    >>> [need for need, needed in terms("fedavg").needs.items() if needed]
    ['same architecture', 'node models that can be trained']
    """
    method = METHODS[name]()
    own = method.needs()
    needs = vars(own)
    able = [task for task, kind in TASKS.working().items() if refusal(own, kind().example()) is None]
    run = from_dict({"method": {"name": name}, "task": {"name": able[0]}})
    asked = questions(run)
    times = {
        question.name: f" x{question.times}" if question.times > 1 else "" for question in asked.values()
    }
    return Terms(
        name=name,
        title=method.title,
        paper=method.paper,
        judged=CENTRAL[method.central][0],
        leaves=", ".join(what_leaves(run)) or "nothing",
        needs={words: needs[key] for key, words in {**NEEDS, **MORE_NEEDS}.items()},
        questions=", ".join(f"{question}{times[question]}" for question in asked) or "none",
    )


def print_methods(console: Console) -> None:
    """Print all methods, a line each: name, title and paper; of one that cannot be imported, why."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name in METHODS:
        try:
            method = METHODS[name]
            table.add_row(Text(name, style="bold"), Text(f"{method.title}, {method.paper}"))
        except FedstillError as error:
            table.add_row(Text(name, style="bold"), Text(str(error)))
    console.print(table)
    console.print()


def print_method(name: str, console: Console) -> None:
    """Print what one method asks of those who take part."""
    told = terms(name)
    needs = [words for words, needed in told.needs.items() if needed]
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    lines.add_column(no_wrap=True)
    lines.add_column()
    lines.add_row(Text(name, style="bold"), Text(f"{told.title}, {told.paper}"))
    for head, text in (
        ("leaves a node", told.leaves),
        ("needs", ", ".join(needs) or "nothing special"),
        ("asks", told.questions),
        ("is judged by", told.judged),
    ):
        lines.add_row(Text(head, style="dim"), Text(text))
    console.print(lines)
