"""A comparison's file in its short form, written out: what a reader of comparisons knows is left.

Short for what many methods share (``[method]``), for one option varied at a time (``[vary]``), for a paper's
table (``[published]``), and for the same comparison at another scale (``[scale.NAME]``). ``[reproduces]``
says which table or figure of a paper the file is about: :mod:`fedstill.compare.reproduction` reads it.

Several methods side by side, on equal terms: the plan of a comparison.

A comparison is one run without its method (the base), some methods, seeds and, if wanted, settings that
each change the base. All methods share the base: one seed gives all of them the same split, the same
first weights, the same local optimizer and budget. What a method may have of its own are its options
(``options``), and other run options only where the plan says so (``runs``), which the report repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.compare.comparison import (
    COSTS,
    ONLY_SETTING,
    Comparison,
    ComparisonRun,
    has_key,
    merge_run_tables,
    method_queries,
    methods_by_label,
    released_kinds,
    resolve_extends,
    resolve_paths,
    slug,
    table_at,
    tables_at,
)
from fedstill.core import toml
from fedstill.core.config_tables import option_types, read_table, unflatten
from fedstill.core.errors import ArgumentError, RunFolderError, UnknownName
from fedstill.core.registry import add_search_folders
from fedstill.core.toml import Table
from fedstill.protocol.method import METHODS
from fedstill.runs import presets
from fedstill.runs.config import PaperMetric, RunConfig, check_paper_metrics, from_dict, to_dict

SMALL_SCALE = "small"  # the scale of a file as it stands
SHORT_FORM_KEYS = (
    "reproduces",
    "scale",
    "method",
    "vary",
    "published",
    "arguments",
)  # keys that are written out
BY_LABEL = ("options", "runs")  # tables of methods by label
METHOD_KEYS = ("methods", "options", "vary")  # any of them names the methods of a comparison
CELL = "a figure, or [mean, deviation]"


def expand_short_forms(table: Mapping[str, Any], scale: str = SMALL_SCALE) -> Table:
    """A comparison's table without its short forms, at one of its scales.

    Raises:
        ArgumentError, UnknownName: a short form that says nothing, or a scale that the file has not.

    >>> expand_short_forms({"method": {"name": "fedkd"}, "vary": {"gamma": [1.0, 0.5]}})["options"]["gamma-0.5"]
    {'name': 'fedkd', 'gamma': 0.5}
    """
    whole = at_scale(table, scale)
    about = _require_table(whole.pop("reproduces", {}), "reproduces")
    whole.pop("arguments", None)  # of its program
    shared = _require_table(whole.pop("method", {}), "method")
    options = {
        label: _require_table(given, f"options.{label}") for label, given in whole.get("options", {}).items()
    }
    for key, values in _require_table(whole.pop("vary", {}), "vary").items():
        if not isinstance(values, list) or not values:
            raise ArgumentError(f"vary.{key}", values, "a list of values")
        options |= {f"{key}-{_value_label(value)}": {key: value} for value in values}
    if shared:
        options = {
            label: given if "name" in given else {**shared, **given} for label, given in options.items()
        }
    if options:
        whole["options"] = options
        whole.setdefault("methods", list(options))
    if "published" in whole:
        named = f"{about.get('paper', '')}, {about.get('what', '')}".strip(", ")
        metrics = list(_published_cells(_require_table(whole.pop("published"), "published"), named))
        whole["paper"] = [*whole.get("paper", []), *metrics]
    return whole


def at_scale(table: Mapping[str, Any], scale: str = SMALL_SCALE) -> Table:
    """A table at one of its scales: what ``[scale.NAME]`` says stands above what the file says.

    A base, or a method's options, that extend a preset begin anew; lists are replaced as wholes. Options of
    methods that the scale does not list are left out.

    Raises:
        UnknownName: the file has no such scale.

    >>> at_scale({"seeds": 1, "scale": {"paper": {"seeds": 3}}}, "paper")
    {'seeds': 3}
    >>> small = {"options": {"fediod": {"steps": 9}, "fedavg": {"rounds": 9}}}
    >>> above = {"options": {"fediod": {"extends": "paper"}, "fedavg": {"participation": 0.5}}}
    >>> at_scale({**small, "scale": {"paper": above}}, "paper")["options"]
    {'fediod': {'extends': 'paper'}, 'fedavg': {'rounds': 9, 'participation': 0.5}}
    """
    below = dict(table)
    scales = _require_table(below.pop("scale", {}), "scale")
    if scale == SMALL_SCALE:
        return below
    if scale not in scales:
        raise UnknownName("scale", scale, [SMALL_SCALE, *scales])
    above = _require_table(scales[scale], f"scale.{scale}")
    if "methods" in above:
        below = _only_methods(below, above["methods"])
        if isinstance(below.get("settings"), list):
            below["settings"] = [
                _only_methods(setting, above["methods"]) if isinstance(setting, Mapping) else setting
                for setting in below["settings"]
            ]
    for key, value in above.items():
        old = below.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            below[key] = value
        elif key == "base":
            below[key] = dict(value) if "extends" in value else merge_run_tables(old, value)
        else:
            below[key] = {
                name: {**old[name], **inner} if _is_merged(old.get(name), inner) else inner
                for name, inner in {**old, **value}.items()
            }
    return below


def _is_merged(below: object, above: object) -> bool:
    """Whether a table stands above another one, and does not begin anew."""
    return isinstance(above, Mapping) and isinstance(below, Mapping) and "extends" not in above


def _only_methods(table: Mapping[str, Any], methods: Sequence[str]) -> Table:
    """A table without what it says of other methods than these."""
    return {
        key: {label: of for label, of in value.items() if label in methods}
        if key in BY_LABEL and isinstance(value, Mapping)
        else value
        for key, value in table.items()
    }


def _published_cells(given: Mapping[str, Any], source: str) -> Iterator[Table]:
    """A paper's table, row by row: figures by method, or by setting and method."""
    rest = dict(given)
    source, metrics = rest.pop("source", source), rest.pop("metrics", ["accuracy"])
    for name, value in rest.items():
        rows = value if isinstance(value, Mapping) else {name: value}
        for method, row in rows.items():
            cells = row if len(metrics) > 1 else [row]
            if not isinstance(cells, list) or len(cells) != len(metrics):
                allowed = f"{len(metrics)} cells ({', '.join(metrics)}), each {CELL}, or empty text"
                raise ArgumentError(f"published.{method}", row, allowed)
            for metric, cell in zip(metrics, cells, strict=True):
                if cell == "":
                    continue
                pair = cell if isinstance(cell, list) else [cell]
                numbers = all(isinstance(part, int | float) for part in pair)
                if not numbers or not 1 <= len(pair) <= 2:
                    raise ArgumentError(f"published.{method}", cell, CELL)
                told = {"method": method, "metric": metric, "value": float(pair[0]), "source": source}
                told |= {"std": float(pair[1])} if len(pair) == 2 else {}
                yield told | ({"setting": name} if rows is value and name != ONLY_SETTING else {})


def _value_label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _require_table(value: object, key: str) -> Table:
    if not isinstance(value, Mapping):
        raise ArgumentError(key, value, "a table")
    return dict(value)


__all__ = [
    "Comparison",
    "ComparisonRun",
    "plan_comparison",
    "method_queries",
    "read_comparison",
    "read_folder",
    "released_kinds",
]

COMPARISON_FILE = "compare.toml"
SHARED = ("data", "split", "nodes", "student", "public")  # what makes methods comparable
PRESET_KEYS = ("method", "seed", "name")  # what a preset that serves as a base says of itself only
PER_RUN_KEYS = (*PRESET_KEYS, "paper")  # keys of a run that a comparison sets itself, run by run


def base_run(names: Sequence[str], base: str | None = None, scale: str = SMALL_SCALE) -> RunConfig:
    """The run, with some method, that a comparison's methods share before any option changes it.

    Args:
        names: one comparison's file, or methods.
        base: a preset or a run's file; None is the default.

    Raises:
        FedstillError: a name that does not exist, or a table that describes no run.
    """
    table: Table = {}
    if names and lists_methods(names[0]):
        file = Path(names[0])
        whole = expand_short_forms(toml.parse(toml.read_text(file), names[0]), scale)
        table, _ = _base(table_at(whole, "base"), file.parent)
    elif base is not None:
        table = {
            key: value for key, value in presets.read(base, RunConfig).items() if key not in PER_RUN_KEYS
        }
    return from_dict({**table, "method": {"name": next(iter(METHODS))}})


def shared_options(run: RunConfig) -> list[str]:
    """The options that hold for all methods of a comparison whose base is a run, by dotted name."""
    return [name for name in option_types(run) if name.split(".")[0] not in PER_RUN_KEYS]


# --- plans --------------------------------------------------------------------------------------------


def plan_comparison(
    methods: Sequence[str],
    *,
    seeds: int | Sequence[int] = 1,
    base: str | None = None,
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Table] | None = None,
    leakage: bool = False,
) -> Comparison:
    """A comparison from names.

    Args:
        methods: names of methods, which come with their default options, and of presets or ``.toml`` files,
            of which only the method's options are taken.
        seeds: how many (0, 1, 2...), or which.
        base: the preset or file that gives everything else; None is digits over 5 nodes, Dirichlet alpha 0.5.
        changes: options of a run that change the base, by dotted name.
        options: of one method each, by its label, as the command line gave them.
        leakage: attack each run, with the attack's default options.

    Raises:
        FedstillError: a name that does not exist, or options that describe no run.

    >>> comparison = plan_comparison(["fedavg", "fediod"], seeds=2, changes={"split.nodes": 10})
    >>> [place.folder for place in comparison.places()]
    ['fedavg-seed0', 'fediod-seed0', 'fedavg-seed1', 'fediod-seed1']
    >>> comparison.config(comparison.places()[0]).split.nodes
    10
    """
    table: Table = {"methods": list(methods), "seeds": seeds if isinstance(seeds, int) else list(seeds)}
    if leakage:
        table["leakage"] = {}
    if options:
        table["options"] = dict(options)
        table["changed"] = [f"{label}.{name}" for label, given in options.items() for name in given]
    if base is not None:
        below = presets.read(base, RunConfig)
        table["base"] = {key: value for key, value in below.items() if key not in PRESET_KEYS}
    return _comparison(table, "compare", changes or {})


def read_comparison(
    file: Path,
    *,
    seeds: int | None = None,
    changes: Mapping[str, Any] | None = None,
    leakage: bool = False,
    scale: str = SMALL_SCALE,
) -> Comparison:
    """The comparison in a file, at one of its scales, with other seeds and run options, if given.

    With ``leakage`` each run is attacked, as the file's table ``leakage`` says, or else with the attack's
    default options.

    Raises:
        FedstillError: the file cannot be read, or it describes no comparison.
    """
    text = toml.read_text(file)
    told = toml.parse(text, str(file))
    table = expand_short_forms(told, scale)
    if scale == SMALL_SCALE and "reduction" in table_at(told, "reproduces"):
        smaller = f"The small scale, whose heights are not the paper's: {told['reproduces']['reduction']}"
        table.setdefault("note", smaller)
    if seeds is not None:
        table["seeds"] = seeds
    if leakage:
        table.setdefault("leakage", {})
    first = next((line.lstrip("# ").rstrip() for line in text.splitlines() if line.startswith("#")), "")
    return _comparison({"about": first, **table}, file.stem, changes or {}, file.parent)


def is_comparison_file(file: str) -> bool:
    """Whether a name is that of a file that is no run's: of a comparison, or of a published table.

    Raises:
        FedstillError: a file that cannot be read.
    """
    return _has_any_key(file, (*METHOD_KEYS, "reproduces"))


def lists_methods(file: str) -> bool:
    """Whether a name is that of a file with a comparison in it, rather than with a run.

    Raises:
        FedstillError: a file that cannot be read.
    """
    return _has_any_key(file, METHOD_KEYS)


def _has_any_key(file: str, keys: Sequence[str]) -> bool:
    """Whether a name is that of a file with one of these keys."""
    if not file.endswith(".toml"):
        return False
    table = toml.parse(toml.read_text(Path(file)), file)
    # A table of methods is a run's own table, misspelled.
    return any(key in table and not (key == "methods" and isinstance(table[key], dict)) for key in keys)


def read_folder(out: Path) -> Comparison:
    """The comparison in a folder.

    Raises:
        RunFolderError: there is none.
    """
    if not (out / COMPARISON_FILE).exists():
        raise RunFolderError(f"{out} holds no comparison: there is no {COMPARISON_FILE} in it")
    return read_comparison(out / COMPARISON_FILE)


@dataclass(frozen=True)
class _FileHeader:
    """What a comparison's file says beside its tables."""

    name: str
    about: str = ""
    note: str = ""
    seeds: int | tuple[int, ...] = 1
    methods: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    paper: tuple[PaperMetric, ...] = ()


TABLES = ("base", "options", "runs", "settings", "leakage")


def _comparison(
    table: Mapping[str, Any], name: str, changes: Mapping[str, Any], folder: Path | None = None
) -> Comparison:
    """A comparison from its table, checked: every run that it plans is a run.

    Files that it names lie in ``folder``, if there are such, else where their paths say.
    """
    known = [*(part.name for part in dataclasses.fields(_FileHeader)), *TABLES]
    for key in table:
        if key not in known:
            raise UnknownName("key", key, [*known, *SHORT_FORM_KEYS])
    told = read_table(_FileHeader, {"name": name, **{key: table[key] for key in table if key not in TABLES}})
    names = resolve_paths(told.methods, folder)
    table = {**table, "options": resolve_extends(table_at(table, "options"), folder)}
    raw, paper = _base(table_at(table, "base"), folder)
    files = [presets.read(name, RunConfig) for name in names if name.endswith(".toml")]
    folders = [folder for plugins in (raw, *files) for folder in plugins.get("plugins", [])]
    raw["plugins"] = list(dict.fromkeys(folders))
    above = _unflatten_shared(changes)
    methods = methods_by_label(names, table)
    settings = {
        setting: _setting(given, above, methods) if setting != ONLY_SETTING else {}
        for setting, given in _settings(table.get("settings")).items()
    }
    runs = tables_at(table, "runs", methods)
    for where, part in (("base", table_at(table, "base")), *settings.items(), *runs.items()):
        for key in PRESET_KEYS if where == "base" else PER_RUN_KEYS:
            if key in part:
                raise ArgumentError(f"{where}: {key}", part[key], "nothing: a comparison sets it run by run")
    paper = told.paper or paper  # of a base that is a preset only where the comparison has none itself
    for metric in paper:
        if metric.setting not in (ONLY_SETTING, *settings):
            raise UnknownName("setting of a published figure", metric.setting, settings)
    comparison = Comparison(
        name=told.name,
        about=told.about,
        note=told.note,
        seeds=_seeds(told.seeds),
        base=_complete_base(merge_run_tables(raw, above), next(iter(methods.values()))),
        methods=methods,
        settings=settings,
        runs=runs,
        paper=paper,
        changed=tuple(sorted({*changes, *told.changed})),  # typed in another order, it is the same comparison
        leakage=_leakage(table),
    )
    reached = [metric for metric in paper if metric.metric not in COSTS]
    check_paper_metrics(reached, [comparison.run_config(place).task for place in comparison.planned_runs()])
    return comparison


def _base(table: Table, folder: Path | None) -> tuple[Table, tuple[PaperMetric, ...]]:
    """A base with what it extends filled in, without what a preset says of its own method, and the
    published figures of that preset.
    """
    table = presets.filled(table, RunConfig, folder)
    add_search_folders(table.get("plugins", []))
    metrics = read_table(_FileHeader, {"name": "", "paper": table.get("paper", [])}).paper
    return {key: value for key, value in table.items() if key not in PER_RUN_KEYS}, metrics


def _complete_base(base: Table, method: Table) -> Table:
    """A base with all defaults written out, but for those that a comparison chooses itself."""
    whole = to_dict(from_dict({**base, "method": method}))
    complete = {key: value for key, value in whole.items() if key not in PER_RUN_KEYS}
    if not has_key(base, "nodes", "policy", "outputs_only"):
        del complete["nodes"]["policy"]["outputs_only"]
    if not has_key(base, "evaluation", "centralized"):  # it has a line of its own: method centralized
        complete["evaluation"]["centralized"] = False
    return complete


def _settings(given: object) -> dict[str, Table]:
    if given is None:
        return {ONLY_SETTING: {}}
    allowed = "a list of tables, each with a name of its own"
    if not isinstance(given, list) or not given or not all(isinstance(part, dict) for part in given):
        raise ArgumentError("settings", given, allowed)
    known = ["name", "options", *(field.name for field in dataclasses.fields(RunConfig))]
    for key in (key for part in given for key in part if key not in known):
        raise UnknownName("key of a table of settings", key, known)
    named = {part.get("name"): {key: part[key] for key in part if key != "name"} for part in given}
    good = all(isinstance(name, str) and slug(name) for name in named)
    if not good or len({slug(str(name)).casefold() for name in named}) < len(given):  # as some disks compare
        raise ArgumentError("settings", [part.get("name") for part in given], allowed)
    return {str(name): part for name, part in named.items()}


def _setting(given: Table, above: Table, methods: Mapping[str, Table]) -> Table:
    """What a setting changes: of the run, of which ``above`` stands above it, and by label of the methods."""
    run = merge_run_tables({key: value for key, value in given.items() if key != "options"}, above)
    own = tables_at(given, "options", methods)
    return {**run, "options": own} if own else run


def _leakage(table: Mapping[str, Any]) -> Table | None:
    """The complete options of the attack, or None where no run is attacked."""
    if "leakage" not in table:
        return None
    from fedstill.attacks.config import LeakageConfig

    complete: Table = LeakageConfig.from_table(table_at(table, "leakage")).to_table()
    return complete


def _seeds(given: int | tuple[int, ...]) -> tuple[int, ...]:
    seeds = tuple(range(given)) if isinstance(given, int) else given
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        told = given if isinstance(given, int) else list(given)
        raise ArgumentError("seeds", told, "how many (1 or more: 0, 1, 2...), or a list of seeds, each once")
    return seeds


def _unflatten_shared(values: Mapping[str, Any]) -> Table:
    """Options of all methods by dotted name as a table in tables."""
    for name in values:
        if name.split(".")[0] in PER_RUN_KEYS:
            known = shared_options(base_run([]))
            belongs = "a method's own belong to a preset or file"
            raise UnknownName("option of all methods", name, known, see=belongs)
    return unflatten(values)
