"""``fedstill list``: names of methods, tasks, data sets and models, and a description of one method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import ParsedArgs
from fedstill.cli.console import print_json, print_list
from fedstill.core.errors import FedstillError, UnknownName
from fedstill.runs import presets

if TYPE_CHECKING:
    from fedstill.core.registry import Registry
    from fedstill.protocol.method import Method

# Needs that a comparison does not show for each method, since its methods share task and nodes.
MORE_NEEDS: Mapping[str, str] = {
    "trainable": "node models that can be trained",
    "trains_on_public": "public data in the nodes' training",
    "images": "images as inputs",
    "generates_inputs": "inputs that a server can generate",
    "table_rows": "rows of a table as inputs",
    "single_label": "one label for each input",
    "label_maps": "label maps",
    "no_label_maps": "inputs not made from label maps",
    "vector_outputs": "one output vector for each input",
}


def names(args: ParsedArgs) -> None:
    """List all names, those of one kind, or describe one method."""
    from fedstill.protocol.method import METHODS

    name = args.positionals[0] if args.positionals else None
    if not (name is None or name in kinds() or name in METHODS):
        raise UnknownName("method", name, [*METHODS, *kinds()], see="`fedstill list` shows all")
    if "--json" in args:
        print_json(_as_json(name))
    elif name is None:
        _print_all_names()
    elif name == "tasks":
        _print_tasks()
    elif name in kinds():
        print_list((name.removesuffix("s"), "description"), list(_descriptions(name).items()))
    else:
        print_list(("method", name), list(_method_facts(name).items()))


def kinds() -> list[str]:
    """Return the kinds that can be listed."""
    return ["presets", "methods", *_registries()[1]]


def _as_json(name: str | None) -> Any:
    methods, others = _registries()
    if name is None:
        return {"methods": methods, **{kind: list(names) for kind, names in others.items()}}
    if name == "tasks":
        return tasks_by_method()
    return _descriptions(name) if name in kinds() else {name: _method_facts(name)}


def _descriptions(kind: str) -> dict[str, str]:
    """Return all names of one kind with a line each; plug-ins that cannot be imported are left out."""
    methods, others = _registries()
    if kind == "presets":
        return {name: presets.describe(name) for name in presets.names()}
    if kind == "methods":
        return methods
    return {
        name: " ".join((getdoc(entry) or "").partition("\n\n")[0].replace("``", "").split())
        for name, entry in others[kind].importable_objects().items()
    }


def _registries() -> tuple[dict[str, str], dict[str, Registry[Any]]]:
    """Return all methods with title and paper (or their import error), and the registries of other kinds."""
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
            methods[name] = title_and_paper(METHODS[name])
        except FedstillError as error:
            methods[name] = str(error)
    others: dict[str, Registry[Any]] = {
        "tasks": TASKS,
        "data": DATA,
        "splits": SPLITS,
        "models": MODELS,
        "ensembles": ENSEMBLES,
        "mechanisms": MECHANISMS,
        "attacks": ATTACKS,
    }
    return methods, others


def _print_all_names() -> None:
    methods, others = _registries()
    print_list(("method", "title, paper"), list(methods.items()))
    rows = [(kind, ", ".join(names)) for kind, names in others.items()]
    count = f"{len(presets.names())}, as demo and digits-fediod (fedstill list presets)"
    print_list(("kind", "names"), [*rows, ("presets", count)])
    print("Details: fedstill list METHOD, or a kind, as fedstill list models")


def title_and_paper(method: type[Method]) -> str:
    """Return a method's title and paper."""
    return ", ".join(filter(None, (method.title, method.paper)))


def _method_facts(name: str) -> dict[str, str]:
    """Describe a method with its default options, on the first task that it supports."""
    from fedstill.compare.comparison_file import method_queries_by_name, released_kinds
    from fedstill.core.config_tables import to_table
    from fedstill.protocol.method import METHODS
    from fedstill.report.model_scores import NEED_TITLES
    from fedstill.report.result import MAIN_MODELS
    from fedstill.runs.config import from_dict

    method = METHODS[name]()
    needs, tasks = vars(method.needs()), _refusals_by_task([METHODS[name]])[0]
    first_task = next(task for task, refusal in tasks.items() if not refusal)
    run = from_dict({"method": {"name": name}, "task": {"name": first_task}})
    sent = [
        query.name + (f" x{query.times}" if query.times > 1 else "")
        for query in method_queries_by_name(run).values()
    ]
    needed = [text for key, text in {**NEED_TITLES, **MORE_NEEDS}.items() if needs[key]]
    options = {key: value for key, value in to_table(method).items() if key != "name"}
    label = name.rpartition(":")[2]
    return {
        "title": title_and_paper(METHODS[name]),
        "leaves a node": ", ".join(released_kinds(run)) or "nothing",
        "needs": ", ".join(needed) or "nothing special",
        "queries": ", ".join(sent) or "none",
        "evaluated on": MAIN_MODELS[method.evaluated_model][0],
        "options": ", ".join(f"{key} {value}" for key, value in options.items()) or "none",
        "usage": f"{_run_calls(name)}; in compare --{label}.OPTION",
    }


def _run_calls(method: str) -> str:
    """Return the commands that run a method: its preset, on digits if there is one, or any other preset."""
    own = [name for name in presets.names() if name.endswith(f"-{method}")]
    own.sort(key=lambda name: not name.startswith("digits-"))
    return "; ".join(f"fedstill run {preset}" for preset in (*own[:1], f"PRESET --method.name {method}"))


def tasks_by_method() -> dict[str, dict[str, str | None]]:
    """Return, by method and task, why the method does not support the task; None where it does."""
    from fedstill.protocol.method import METHODS

    working = METHODS.importable_objects()
    return dict(zip(working, _refusals_by_task(working.values()), strict=True))


def _refusals_by_task(methods: Iterable[type[Method]]) -> list[dict[str, str | None]]:
    from fedstill.protocol.method import unmet_need
    from fedstill.tasks import TASKS

    tasks = {name: kind().minimal_task() for name, kind in TASKS.importable_objects().items()}
    return [{name: unmet_need(method().needs(), task) for name, task in tasks.items()} for method in methods]


def _print_tasks() -> None:
    """Print the tasks that each method supports, and the reasons for the others."""
    refusals = tasks_by_method()
    every = list(next(iter(refusals.values())))
    rows, reasons = [("all tasks", ", ".join(every))], dict[str, list[str]]()
    for name, by_task in refusals.items():
        refused = [task for task, reason in by_task.items() if reason]
        supported = ", ".join(task for task in every if task not in refused)
        short = f"all but {', '.join(refused)}" if refused else "all"
        rows.append((name, short if len(refused) < len(every) / 2 else supported))
        for reason in dict.fromkeys(filter(None, by_task.values())):
            reasons.setdefault(reason, []).append(name)
    print_list(("method", "tasks"), rows)
    print_list(("refused for", "methods"), [(reason, ", ".join(names)) for reason, names in reasons.items()])
