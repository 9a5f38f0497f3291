"""``fedstill list``: what can be named, what a method asks of those who take part, which tasks it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import ParsedArgs
from fedstill.cli.console import columns, print_facts, print_json, whole_rows
from fedstill.core.errors import FedstillError, UnknownName
from fedstill.runs import presets

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.core.registry import Registry
    from fedstill.protocol.method import Method

# What a comparison does not tell for each method, since all methods of one share its task and its nodes.
MORE_NEEDS: Mapping[str, str] = {
    "trainable": "node models that can be trained",
    "joins_public": "public data in the nodes' training",
    "images": "images as inputs",
    "makes": "inputs that a server can make",
    "rows": "rows of a table as inputs",
    "one_label": "one label for each input",
    "maps": "label maps",
    "no_maps": "inputs not made from label maps",
    "vectors": "one output vector for each input",
}


def names(args: ParsedArgs) -> None:
    """Methods, tasks, data sets, models; or more of one of them."""
    from fedstill.protocol.method import METHODS

    console, what = whole_rows(), args.positionals[0] if args.positionals else None
    if not (what is None or what in kinds() or what in METHODS):
        raise UnknownName("method", what, [*METHODS, *kinds()], see="`fedstill list` shows all")
    if "--json" in args:
        print_json(_told(what))
    elif what is None:
        _print_names(console)
    elif what == "tasks":
        _print_tasks(console)
    elif what in kinds():
        for name, about in _described(what).items():
            console.print(f"{name:<30} {about}", soft_wrap=True, highlight=False)
    else:
        print_facts(console, _of_method(what), indent="")


def kinds() -> list[str]:
    """What can be listed by itself."""
    return ["presets", "methods", *_named()[1]]


def _told(what: str | None) -> Any:
    """The same for a script: names, or more of what is asked for."""
    methods, others = _named()
    if what is None:
        return {"methods": methods, **{kind: list(names) for kind, names in others.items()}}
    if what == "tasks":
        return tasks_by_method()
    return _described(what) if what in kinds() else _of_method(what)


def _described(kind: str) -> dict[str, str]:
    """All names of one kind, each with a line of what it is; without plug-ins that cannot be imported."""
    methods, others = _named()
    if kind == "presets":
        return {name: presets.describe(name) for name in presets.names()}
    if kind == "methods":
        return methods
    return {
        name: " ".join((getdoc(thing) or "").partition("\n\n")[0].replace("``", "").split())
        for name, thing in others[kind].working().items()
    }


def _named() -> tuple[dict[str, str], dict[str, Registry[Any]]]:
    """All methods with title and paper, or why one cannot be imported; what else can be named, by kind."""
    from fedstill.attacks.attack import ATTACKS
    from fedstill.data.config import DATA
    from fedstill.data.splits import SPLITS
    from fedstill.models import MODELS
    from fedstill.privacy.config import MECHANISMS
    from fedstill.protocol.method import METHODS
    from fedstill.tasks import ENSEMBLES, TASKS

    methods = {}
    for name in METHODS:
        try:
            methods[name] = titled(METHODS[name])
        except FedstillError as error:
            methods[name] = str(error)
    found: dict[str, Registry[Any]] = {
        "tasks": TASKS,
        "data": DATA,
        "splits": SPLITS,
        "models": MODELS,
        "ensembles": ENSEMBLES,
        "mechanisms": MECHANISMS,
        "attacks": ATTACKS,
    }
    return methods, found


def _print_names(console: Console) -> None:
    methods, found = _named()
    print_facts(console, methods, indent="")
    few = f"{len(presets.names())}, as demo and digits-fediod: fedstill list presets"
    told = {what: ", ".join(names) for what, names in found.items()}
    print_facts(console, {**told, "presets": few}, indent="")
    console.print("More of a method: fedstill list METHOD; of a kind: fedstill list models, say")


def titled(method: type[Method]) -> str:
    """A method's title, and the paper that it is of."""
    return ", ".join(filter(None, (method.title, method.paper)))


def _of_method(name: str) -> dict[str, str]:
    """What a method asks with its default options, of the first task that it can learn."""
    from fedstill.compare.comparison_file import queries, what_leaves
    from fedstill.core.config_tables import as_table
    from fedstill.protocol.method import METHODS
    from fedstill.report.model_scores import NEED_TITLES
    from fedstill.report.result import MAIN_MODELS
    from fedstill.runs.config import from_dict

    method = METHODS[name]()
    needs, tasks = vars(method.needs()), _tasks_of([METHODS[name]])[0]
    run = from_dict({"method": {"name": name}, "task": {"name": next(t for t in tasks if not tasks[t])}})
    asked = [query.name + (f" x{query.times}" if query.times > 1 else "") for query in queries(run).values()]
    needed = [words for key, words in {**NEED_TITLES, **MORE_NEEDS}.items() if needs[key]]
    label, own = name.rpartition(":")[2], {key: v for key, v in as_table(method).items() if key != "name"}
    return {
        name: titled(METHODS[name]),
        "leaves a node": ", ".join(what_leaves(run)) or "nothing",
        "needs": ", ".join(needed) or "nothing special",
        "asks": ", ".join(asked) or "none",
        "is judged by": MAIN_MODELS[method.central][0],
        "options": ", ".join(f"{key} {value}" for key, value in own.items()) or "none",
        "in words": f"fedstill run demo --method.name {name} --help; in compare --{label}.OPTION",
    }


def tasks_by_method() -> dict[str, dict[str, str | None]]:
    """For each method and task, why it cannot run it; None where it can."""
    from fedstill.protocol.method import METHODS

    working = METHODS.working()
    return dict(zip(working, _tasks_of(working.values()), strict=True))


def _tasks_of(methods: Iterable[type[Method]]) -> list[dict[str, str | None]]:
    from fedstill.protocol.method import refusal
    from fedstill.tasks import TASKS

    tasks = {name: kind().minimal_task() for name, kind in TASKS.working().items()}
    return [{task: refusal(method().needs(), made) for task, made in tasks.items()} for method in methods]


def _print_tasks(console: Console) -> None:
    """The tasks that each method runs, a line a method, and below it the reasons."""
    found = tasks_by_method()
    every = list(next(iter(found.values())))
    table = columns(None, None, no_wrap=True)
    table.add_row("tasks", ", ".join(every))
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
