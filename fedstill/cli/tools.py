"""``fedstill list``, ``dashboard``, ``data schema``, ``doctor`` and ``completion``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import platform
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from fedstill.cli.arguments import AsJson, MethodName, UsageError, group
from fedstill.cli.console import plain, print_facts, print_json, print_list
from fedstill.core.config_tables import to_table
from fedstill.core.errors import ArgumentError, DataError, DeployError, FedstillError, UnknownName
from fedstill.core.registry import Registry, first_line
from fedstill.core.text_format import format_count
from fedstill.core.version import __version__
from fedstill.runs import presets

if TYPE_CHECKING:
    from fedstill.protocol.method import Method
    from fedstill.report.page_server import RenderPage

# Needs that a comparison does not show for each method, since its methods share task and nodes.
MORE_NEEDS: Mapping[str, str] = {
    "trainable": "node models that can be trained",
    "trains_on_public": "public data in the nodes' training",
    "images": "images as inputs",
    "generates_inputs": "inputs that a server can generate",
    "table_rows": "rows of a table as inputs",
    "vectors": "features of a backbone, or rows of a table, as inputs",
    "single_label": "one label for each input",
    "label_maps": "label maps",
    "no_label_maps": "inputs not made from label maps",
    "vector_outputs": "one output vector for each input",
}


def list_names(name: MethodName | None = None, /, *, as_json: AsJson = False) -> None:
    """List methods, tasks, data sets, models, attacks and presets, or describe one method.

    example: fedstill list fedkd

    Args:
        name: a method, or methods, presets, tasks, data, splits, models, ensembles,
            mechanisms, adversaries, attacks
    """
    from fedstill.protocol.method import METHODS

    if not (name is None or name in kinds() or name in METHODS):
        raise UnknownName("method", name, [*METHODS, *kinds()], see="`fedstill list` shows all")
    if as_json:
        print_json(_as_json(name))
    elif name is None:
        _print_all_names()
    elif name == "tasks":
        _print_tasks()
    elif name in kinds():
        print_list((_singular(name), "description"), list(_descriptions(name).items()))
    else:
        print_list(("method", name), list(_method_facts(name).items()))


def _singular(kind: str) -> str:
    return f"{kind.removesuffix('ies')}y" if kind.endswith("ies") else kind.removesuffix("s")


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
    from fedstill.data.partitioners import SPLITS
    from fedstill.federation.adversaries import ADVERSARIES
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
        "adversaries": ADVERSARIES,
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
    from fedstill.compare.comparison import method_queries_by_name, released_kinds
    from fedstill.protocol.method import METHODS
    from fedstill.report.comparison_records import NEED_TITLES
    from fedstill.report.records import MAIN_MODELS
    from fedstill.runs.spec import from_dict

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
    from fedstill.protocol.needs import unmet_need
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


# By extra: what it is for, and the modules that come with it.
EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "flare": ("nodes as processes and machines of their own", ("nvflare", "cryptography", "psutil")),
    "ray": ("simulated nodes in Ray actors, on the machines of a cluster", ("ray",)),
    "offline": ("queries and answers by files", ("cryptography",)),
    "dp": ("private training, privacy.mechanism = dp-sgd", ("opacus",)),
    "text": ("Hugging Face models and tokenizers; export --format huggingface", ("transformers",)),
    "tables": ("Parquet files", ("pyarrow",)),
    "medical": ("NIfTI volumes", ("nibabel",)),
    "docs": ("the site of the documentation, make docs", ("sphinx", "myst_parser", "sphinx_gallery")),
    "skops": ("nodes' models that are files of scikit-learn, XGBoost, LightGBM", ("skops",)),
    "onnx": (
        "nodes' models that are ONNX graphs; export --format onnx",
        ("onnx", "onnxscript", "onnxruntime"),
    ),
    "track": (
        "a run's metrics in TensorBoard, MLflow, Weights & Biases",
        ("tensorboard", "mlflow", "alembic", "wandb"),
    ),
    "vision": ("pretrained backbones of timm and torchvision; torchvision's data", ("torchvision", "timm")),
}
Port = Annotated[int, Interval(ge=0, le=65535), "1 to 65535"]
MISSING = "not installed"
VERSIONED = ("torch", "numpy", "scipy", "scikit-learn", "safetensors", "torchmetrics", "dp-accounting")


def doctor(*, as_json: AsJson = False) -> None:
    """Show installed versions and devices, and which extras are missing.

    example: fedstill doctor
    """
    report = installation_facts()
    if as_json:
        print_json(report)
        return
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    missing = {
        extra: f"{EXTRAS[extra][0]}: pip install -e '.[{extra}]' "
        f"({_missing_modules(names, report['broken'])})"
        for extra, names in report["missing"].items()
    }
    there = [extra for extra in EXTRAS if extra not in missing]
    facts: dict[str, str] = {
        "versions": versions,
        "machine": report["machine"],
        "devices": ", ".join(report["devices"]),
        "threads": f"{report['threads']} in use of {report['cores']} cores that this process may use",
        "data folders": ", ".join(report["data_folders"]),
        "free here": f"{report['free_gb']:.1f} GB",
        "extras": ", ".join(there) or "none",
    }
    print_facts(plain(), facts, indent="")
    if missing:
        print("Not installed or broken, and needed for:")
        print_facts(plain(), missing)


def installation_facts() -> dict[str, Any]:
    """Return versions, devices, threads, data folders, and the missing modules of each extra."""
    import torch

    from fedstill.core.compute import available_devices
    from fedstill.data.user_data import default_folders

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lacking = {
        extra: {name: why for name in modules if (why := _import_failure_text(name))}
        for extra, (_, modules) in EXTRAS.items()
    }
    return {
        "versions": {
            "fedstill": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in VERSIONED},
        },
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "devices": available_devices(),
        "threads": torch.get_num_threads(),
        "cores": cores,
        "data_folders": [
            f"{_abbreviate_home(folder)}{'' if folder.is_dir() else ' (not there)'}"
            for folder in default_folders()
        ],
        "free_gb": shutil.disk_usage(Path.cwd()).free / 1e9,
        "missing": {extra: list(names) for extra, names in lacking.items() if names},
        "broken": {name: why for names in lacking.values() for name, why in names.items() if why != MISSING},
    }


def _import_failure_text(name: str) -> str:
    """Why a module cannot be imported, which is tried; empty: it can.

    A torchvision of another torch, say, is there and fails as it is imported.
    """
    if importlib.util.find_spec(name) is None:
        return MISSING
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except (Exception, SystemExit) as error:  # another package's own, of any kind
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _missing_modules(names: Sequence[str], broken: Mapping[str, str]) -> str:
    """Return the modules that are missing, and those that are there and cannot be imported."""
    there = [f"{name} cannot be imported ({broken[name]})" for name in names if name in broken]
    gone = [name for name in names if name not in broken]
    return "; ".join([*([f"missing: {', '.join(gone)}"] if gone else []), *there])


def _abbreviate_home(folder: Path) -> str:
    """Return a folder with ``~`` for the home folder, since people paste this output in public."""
    home = Path.home()
    return str("~" / folder.relative_to(home)) if folder.is_relative_to(home) else str(folder)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def dashboard(folder: Path, /, *, port: Port = 0) -> None:
    """Serve a live page of a node, a server or runs to a browser on this machine.

    example: fedstill dashboard runs

    Args:
        folder: folder of a node, a server, a run, or several runs
        port: port on this machine (default: a free one)
    """
    if not folder.is_dir():
        raise ArgumentError(
            "fedstill dashboard", str(folder), "the folder of a node, a server, a run or several"
        )

    from fedstill.report.page_server import PageServer

    with contextlib.ExitStack() as ending:
        pages = _pages(folder, ending)
        try:
            server = ending.enter_context(PageServer(pages, port))
        except OSError as error:
            allowed = f"one that is free on this machine ({error.strerror})"
            raise ArgumentError("--port", port, allowed) from error
        print(
            f"{server.address}\nThis address is for you alone, on this machine; Ctrl+C ends it.", flush=True
        )
        server.serve_forever()


def _pages(folder: Path, ending: contextlib.ExitStack) -> RenderPage:
    """Return the pages of a folder by its kind; ``ending`` closes what they open."""
    from fedstill.federation.provision import FEDERATION
    from fedstill.node.owner_folder import FILE

    if (folder / FILE).is_file():
        return partial(_node, folder)
    return _server(folder, ending) if (folder / FEDERATION).is_file() else partial(_runs, folder)


def _node(folder: Path, path: str, nonce: str) -> str | None:
    from fedstill.federation import flare_site
    from fedstill.node.overview import read_overview
    from fedstill.report.dashboard import render_node_page

    process = None
    with contextlib.suppress(DeployError):  # it has no kit: it answers files
        process = flare_site.process_id(flare_site.node(folder))
    return None if path else render_node_page(read_overview(folder), folder, process, nonce)


def _server(folder: Path, ending: contextlib.ExitStack) -> RenderPage:
    from fedstill.federation.admin import ServerMonitor
    from fedstill.report import dashboard

    watch = ServerMonitor(folder)
    ending.callback(watch.close)  # else its session keeps the process alive

    def pages(path: str, nonce: str) -> str | None:
        if path:
            return dashboard.render_run_page(
                {place.name: place for place in (folder / "runs").glob("*/")}, path, nonce
            )
        return dashboard.render_server_page(watch.read_status(), nonce)

    return pages


def _runs(folder: Path, path: str, nonce: str) -> str | None:
    from fedstill.report import dashboard

    runs = dashboard.find_runs(folder)
    return (
        dashboard.render_run_page(runs, path, nonce)
        if path
        else dashboard.render_runs_page(folder, runs, nonce)
    )


data = group("data", "Draft the schema of a table.")
MAX_CATEGORIES = 8  # categories of a column that are printed


@data.command
def schema(*files: Path, target: str, event: str = "", out: Path | None = None) -> None:
    """Draft the schema of a CSV or Parquet table, for you to correct.

    example: fedstill data schema north.csv south.csv --target diagnosis

    Args:
        files: tables with the same columns
        target: column to predict
        event: survival: column that says whether the event was observed
        out: schema to write (default: schema.toml next to the first table)
    """
    if not files:
        raise UsageError("fedstill data schema", missing="FILES")
    default = files[0].parent / "schema.toml"
    out = out or default
    if out.exists():
        raise ArgumentError("--out", str(out), "a file that does not exist")

    from fedstill.core.run_writer import write_text
    from fedstill.data.table_data import (
        TABLE_ENDINGS,
        draft_schema,
        find_rare_categories,
        read_cells,
        schema_text,
        similar_category_notes,
        table_ending,
    )

    for file in files:
        if not table_ending(file):
            raise ArgumentError("fedstill data schema", str(file), f"a {' or '.join(TABLE_ENDINGS)} file")
    read = [read_cells(file) for file in files]
    tables = [table for table, _ in read]
    for file, table in zip(files, tables, strict=True):
        if table.keys() != tables[0].keys():
            raise DataError(f"{file}: has other columns than {files[0]} (expected the same)")
    together = {name: [cell for table in tables for cell in table[name]] for name in tables[0]}
    places = [where(row) for (table, where) in read for row in range(len(next(iter(table.values()))))]
    made, left_out = draft_schema(together, target, event, places.__getitem__)
    write_text(out, schema_text(made))
    rows = format_count(len(together[target]), "row")
    print(f"{out}: {format_count(len(made.columns), 'column')}, from {rows}.")
    for column in made.columns:
        few = ", ".join(column.categories[:MAX_CATEGORIES]) + (
            ", ..." if len(column.categories) > MAX_CATEGORIES else ""
        )
        what = f"{column.range[0]:g} to {column.range[1]:g}" if column.range else few
        print(f"  {column.name}: {what}{', may be empty' if column.missing else ''}")
    for name, why in left_out.items():
        print(f"Left out: {name}, as {why}.")
    for name, once in find_rare_categories(made, together).items():
        print(f"Once only, perhaps misspelt: {', '.join(map(repr, once))} of {name}.")
    for note in similar_category_notes(made):
        print(f"{note[0].upper()}{note[1:]}.")
    if made.event:
        _, came = next(column.categories for column in made.columns if column.name == made.event)
        print(f"The event is {came!r} of {made.event}: swap its categories if it is the other.")
    print("Its ranges and categories are those of these rows: widen them to all that can be, at every node.")
    preset = "wine-fediod" if made.target_column.categories else "diabetes-fediod"
    task = " --task.name survival" if made.event else ""
    schema_option = "" if out == default else f" --data.schema {out}"
    source, split = files[0], ""
    if len(files) > 1:
        source, split = files[0].parent, " --split.name column --split.column site --split.nodes 0"
    print(f"Try: fedstill run {preset}{task} --data {source}{schema_option}{split} --name mine")


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a completion script for bash, zsh or fish.

    example: eval "$(fedstill completion bash)"

    zsh: eval "$(fedstill completion zsh)", after compinit.
    fish: fedstill completion fish | source

    Args:
        shell: bash, zsh or fish
    """
    from fedstill.cli.main import make_app

    script = make_app().generate_completion(shell=shell)
    if shell == "zsh" and (function := re.search(r"^(\w+)\(\)", script, re.MULTILINE)):
        script += f"\n(( $+functions[compdef] )) && compdef {function[1]} fedstill"  # for eval
    print(script)
