"""Read the plan of a comparison from names or a file, and expand its short forms.

A comparison is one run without its method (the base), some methods, seeds, and optionally settings that
change the base. All methods share the base: one seed gives all of them the same partition, initial weights,
local optimizer and budget. A method may differ in its own options (``options``). Other run options may differ
only if the plan says so (``runs``), and the report repeats that.

Short forms are options that many methods share (``[method]``), one option varied at a time (``[vary]``), a
paper's table (``[published]``), and the comparison at another scale (``[scale.NAME]``). ``[reproduces]``
names the table or figure of a paper (:mod:`fedstill.compare.reproduction`).
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
    method_queries_by_name,
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
from fedstill.runs.spec import PaperMetric, RunSpec, check_paper_metrics, from_dict, to_dict

SMALL_SCALE = "small"  # scale of the file itself
SHORT_FORM_KEYS = (
    "reproduces",
    "scale",
    "method",
    "vary",
    "published",
    "arguments",
)  # keys that are expanded
BY_LABEL = ("options", "runs")  # tables by label of methods
METHOD_KEYS = ("methods", "options", "vary")  # a comparison has at least one of these keys
CELL = "a number, or [mean, deviation]"


def expand_short_forms(table: Mapping[str, Any], scale: str = SMALL_SCALE) -> Table:
    """Expand the short forms of a comparison's table, at one of its scales.

    Raises:
        ArgumentError: a short form is empty or invalid.
        UnknownName: the file has no such scale.

    >>> table = {"method": {"name": "fedkd"}, "vary": {"gamma": [1.0, 0.5]}}
    >>> expand_short_forms(table)["options"]["gamma-0.5"]
    {'name': 'fedkd', 'gamma': 0.5}
    """
    expanded = at_scale(table, scale)
    about = _require_table(expanded.pop("reproduces", {}), "reproduces")
    expanded.pop("arguments", None)  # for the program of the file
    shared = _require_table(expanded.pop("method", {}), "method")
    options = {
        label: _require_table(method_options, f"options.{label}")
        for label, method_options in expanded.get("options", {}).items()
    }
    for key, values in _require_table(expanded.pop("vary", {}), "vary").items():
        if not isinstance(values, list) or not values:
            raise ArgumentError(f"vary.{key}", values, "a list of values")
        options |= {f"{key}-{_value_label(value)}": {key: value} for value in values}
    if shared:
        options = {
            label: method_options if "name" in method_options else {**shared, **method_options}
            for label, method_options in options.items()
        }
    if options:
        expanded["options"] = options
        expanded.setdefault("methods", list(options))
    if "published" in expanded:
        named = f"{about.get('paper', '')}, {about.get('what', '')}".strip(", ")
        metrics = list(_published_cells(_require_table(expanded.pop("published"), "published"), named))
        expanded["paper"] = [*expanded.get("paper", []), *metrics]
    return expanded


def at_scale(table: Mapping[str, Any], scale: str = SMALL_SCALE) -> Table:
    """Return a table at one of its scales: ``[scale.NAME]`` overrides the rest of the file.

    A base that extends a preset replaces the base of the file, and so do a method's options. Lists are
    replaced as a whole. Options of methods that the scale does not list are dropped.

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
    """Return whether a table is merged onto another one, instead of replacing it."""
    return isinstance(above, Mapping) and isinstance(below, Mapping) and "extends" not in above


def _only_methods(table: Mapping[str, Any], methods: Sequence[str]) -> Table:
    """Return a table without entries of other methods."""
    return {
        key: {label: of for label, of in value.items() if label in methods}
        if key in BY_LABEL and isinstance(value, Mapping)
        else value
        for key, value in table.items()
    }


def _published_cells(table: Mapping[str, Any], source: str) -> Iterator[Table]:
    """Yield published metrics from a paper's table of rows by method, or by setting and method."""
    rest = dict(table)
    source, metrics = rest.pop("source", source), rest.pop("metrics", ["accuracy"])
    for name, value in rest.items():
        rows = value if isinstance(value, Mapping) else {name: value}
        for method, row in rows.items():
            cells = row if len(metrics) > 1 else [row]
            if not isinstance(cells, list) or len(cells) != len(metrics):
                expected = f"{len(metrics)} cells ({', '.join(metrics)}), each {CELL}, or empty text"
                raise ArgumentError(f"published.{method}", row, expected)
            for metric, cell in zip(metrics, cells, strict=True):
                if cell == "":
                    continue
                values = cell if isinstance(cell, list) else [cell]
                are_numbers = all(isinstance(part, int | float) for part in values)
                if not are_numbers or not 1 <= len(values) <= 2:
                    raise ArgumentError(f"published.{method}", cell, CELL)
                entry = {"method": method, "metric": metric, "value": float(values[0]), "source": source}
                entry |= {"std": float(values[1])} if len(values) == 2 else {}
                yield entry | ({"setting": name} if rows is value and name != ONLY_SETTING else {})


def _value_label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _require_table(value: object, key: str) -> Table:
    if not isinstance(value, Mapping):
        raise ArgumentError(key, value, "a table")
    return dict(value)


__all__ = [
    "Comparison",
    "ComparisonRun",
    "method_queries_by_name",
    "plan_comparison",
    "read_comparison",
    "read_comparison_folder",
    "released_kinds",
]

COMPARISON_FILE = "compare.toml"
SHARED = ("data", "split", "nodes", "student", "public")  # options that make methods comparable
PRESET_KEYS = ("method", "seed", "name")  # keys of a preset that are ignored in a base
PER_RUN_KEYS = (*PRESET_KEYS, "paper")  # keys that a comparison sets for each run


def base_run(names: Sequence[str], base: str | None = None, scale: str = SMALL_SCALE) -> RunSpec:
    """Return the run that the methods of a comparison share, with some method.

    Args:
        names: one file of a comparison, or methods.
        base: a preset or a file of a run; None: the default.
        scale: scale of the file.

    Raises:
        FedstillError: an unknown name, or a table that is not a run.
    """
    table: Table = {}
    if names and is_file_listing_methods(names[0]):
        file = Path(names[0])
        expanded = expand_short_forms(toml.parse(toml.read_text(file), names[0]), scale)
        table, _ = _fill_base_preset(table_at(expanded, "base"), file.parent)
    elif base is not None:
        table = {key: value for key, value in presets.read(base, RunSpec).items() if key not in PER_RUN_KEYS}
    return from_dict({**table, "method": {"name": next(iter(METHODS))}})


def shared_options(run: RunSpec) -> list[str]:
    """Return the options that all methods of a comparison share, by dotted name."""
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
    """Plan a comparison from names.

    Args:
        methods: names of methods with default options, of presets, or of ``.toml`` files, of which only the
            method's options are used.
        seeds: number of seeds (0, 1, 2...), or the seeds.
        base: preset or file with all other options; None: digits over 5 nodes, Dirichlet alpha 0.5.
        changes: run options that change the base, by dotted name.
        options: options of single methods, by label.
        leakage: attack each run with the default options.

    Raises:
        FedstillError: an unknown name, or options that do not describe a run.

    >>> comparison = plan_comparison(["fedavg", "fediod"], seeds=2, changes={"split.nodes": 10})
    >>> [planned.folder for planned in comparison.planned_runs()]
    ['fedavg-seed0', 'fediod-seed0', 'fedavg-seed1', 'fediod-seed1']
    >>> comparison.run_config(comparison.planned_runs()[0]).split.nodes
    10
    """
    table: Table = {"methods": list(methods), "seeds": seeds if isinstance(seeds, int) else list(seeds)}
    if leakage:
        table["leakage"] = {}
    if options:
        table["options"] = dict(options)
        table["changed"] = [
            f"{label}.{name}" for label, method_options in options.items() for name in method_options
        ]
    if base is not None:
        preset = presets.read(base, RunSpec)
        table["base"] = {key: value for key, value in preset.items() if key not in PRESET_KEYS}
    return _build_comparison(table, "compare", changes or {})


def read_comparison(
    file: Path,
    *,
    seeds: int | None = None,
    changes: Mapping[str, Any] | None = None,
    leakage: bool = False,
    scale: str = SMALL_SCALE,
) -> Comparison:
    """Read a comparison from a file, at one of its scales.

    Args:
        file: the file.
        seeds: number of seeds; None: as the file says.
        changes: run options that change the base, by dotted name.
        leakage: attack each run, with the options of the file's table ``leakage``, or the default options.
        scale: scale of the file.

    Raises:
        FedstillError: the file cannot be read, or is not a comparison.
    """
    text = toml.read_text(file)
    raw = toml.parse(text, str(file))
    table = expand_short_forms(raw, scale)
    if scale == SMALL_SCALE and "reduction" in table_at(raw, "reproduces"):
        scale_note = f"Reduced scale, so values differ from the paper's: {raw['reproduces']['reduction']}"
        table.setdefault("note", scale_note)
    if seeds is not None:
        table["seeds"] = seeds
    if leakage:
        table.setdefault("leakage", {})
    about = next((line.lstrip("# ").rstrip() for line in text.splitlines() if line.startswith("#")), "")
    return _build_comparison({"about": about, **table}, file.stem, changes or {}, file.parent)


def is_comparison_file(file: str) -> bool:
    """Return whether a name is a file with a comparison or a published table, rather than a run.

    Raises:
        FedstillError: the file cannot be read.
    """
    return _has_any_key(file, (*METHOD_KEYS, "reproduces"))


def is_file_listing_methods(file: str) -> bool:
    """Return whether a name is a file with a comparison, rather than a run.

    Raises:
        FedstillError: the file cannot be read.
    """
    return _has_any_key(file, METHOD_KEYS)


def _has_any_key(file: str, keys: Sequence[str]) -> bool:
    """Return whether a name is a file with one of these keys."""
    if not file.endswith(".toml"):
        return False
    table = toml.parse(toml.read_text(Path(file)), file)
    # A table named methods is a misspelled table of a run.
    return any(key in table and not (key == "methods" and isinstance(table[key], dict)) for key in keys)


def read_comparison_folder(out: Path) -> Comparison:
    """Read the comparison in a folder.

    Raises:
        RunFolderError: there is none.
    """
    if not (out / COMPARISON_FILE).exists():
        raise RunFolderError(f"{out} is not a comparison: it has no {COMPARISON_FILE}")
    return read_comparison(out / COMPARISON_FILE)


@dataclass(frozen=True)
class _FileHeader:
    """Values in a comparison's file besides its tables."""

    name: str
    about: str = ""
    note: str = ""
    seeds: int | tuple[int, ...] = 1
    methods: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    paper: tuple[PaperMetric, ...] = ()


TABLES = ("base", "options", "runs", "settings", "leakage")


def _build_comparison(
    table: Mapping[str, Any], name: str, changes: Mapping[str, Any], folder: Path | None = None
) -> Comparison:
    """Build a comparison from its table, and check that each planned run is valid.

    Args:
        table: the table, without short forms.
        name: default name of the comparison.
        changes: run options that change the base, by dotted name.
        folder: folder in which named files are searched first.
    """
    known = [*(part.name for part in dataclasses.fields(_FileHeader)), *TABLES]
    for key in table:
        if key not in known:
            raise UnknownName("key", key, [*known, *SHORT_FORM_KEYS])
    header = read_table(
        _FileHeader, {"name": name, **{key: table[key] for key in table if key not in TABLES}}
    )
    names = resolve_paths(header.methods, folder)
    table = {**table, "options": resolve_extends(table_at(table, "options"), folder)}
    base, paper = _fill_base_preset(table_at(table, "base"), folder)
    files = [presets.read(name, RunSpec) for name in names if name.endswith(".toml")]
    folders = [folder for plugins in (base, *files) for folder in plugins.get("plugins", [])]
    base["plugins"] = list(dict.fromkeys(folders))
    changed_tables = _unflatten_shared(changes)
    methods = methods_by_label(names, table)
    settings = {
        setting: _setting_changes(changes_of_setting, changed_tables, methods)
        if setting != ONLY_SETTING
        else {}
        for setting, changes_of_setting in _parse_settings(table.get("settings")).items()
    }
    runs = tables_at(table, "runs", methods)
    for location, part in (("base", table_at(table, "base")), *settings.items(), *runs.items()):
        for key in PRESET_KEYS if location == "base" else PER_RUN_KEYS:
            if key in part:
                raise ArgumentError(
                    f"{key} of {location}", part[key], "none: a comparison sets it for each run"
                )
    paper = header.paper or paper  # those of the comparison replace those of its base
    for metric in paper:
        if metric.setting not in (ONLY_SETTING, *settings):
            raise UnknownName("setting of a published metric", metric.setting, settings)
    comparison = Comparison(
        name=header.name,
        about=header.about,
        note=header.note,
        seeds=_parse_seeds(header.seeds),
        base=_complete_base(merge_run_tables(base, changed_tables), next(iter(methods.values()))),
        methods=methods,
        settings=settings,
        runs=runs,
        paper=paper,
        changed=tuple(sorted({*changes, *header.changed})),  # the order on the command line does not matter
        leakage=_complete_leakage_options(table),
    )
    reached = [metric for metric in paper if metric.metric not in COSTS]
    check_paper_metrics(reached, [comparison.run_config(place).task for place in comparison.planned_runs()])
    return comparison


def _fill_base_preset(table: Table, folder: Path | None) -> tuple[Table, tuple[PaperMetric, ...]]:
    """Return a base with its preset filled in, and the published metrics of that preset.

    Keys of the preset's own method are left out.
    """
    table = presets.filled(table, RunSpec, folder)
    add_search_folders(table.get("plugins", []))
    published = read_table(_FileHeader, {"name": "", "paper": table.get("paper", [])}).paper
    return {key: value for key, value in table.items() if key not in PER_RUN_KEYS}, published


def _complete_base(base: Table, method: Table) -> Table:
    """Return a base with all defaults, except for those that a comparison chooses itself."""
    all_options = to_dict(from_dict({**base, "method": method}))
    complete = {key: value for key, value in all_options.items() if key not in PER_RUN_KEYS}
    if not has_key(base, "nodes", "policy", "outputs_only"):
        del complete["nodes"]["policy"]["outputs_only"]
    if not has_key(base, "evaluation", "centralized"):  # the method centralized reports it
        complete["evaluation"]["centralized"] = False
    return complete


def _parse_settings(value: object) -> dict[str, Table]:
    if value is None:
        return {ONLY_SETTING: {}}
    expected = "a list of tables with different names"
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise ArgumentError("settings", value, expected)
    known = ["name", "options", *(field.name for field in dataclasses.fields(RunSpec))]
    for key in (key for part in value for key in part if key not in known):
        raise UnknownName("key of a table of settings", key, known)
    by_name = {part.get("name"): {key: part[key] for key in part if key != "name"} for part in value}
    are_named = all(isinstance(name, str) and slug(name) for name in by_name)
    if not are_named or len({slug(str(name)).casefold() for name in by_name}) < len(
        value
    ):  # some file systems ignore case
        raise ArgumentError("settings", [part.get("name") for part in value], expected)
    return {str(name): part for name, part in by_name.items()}


def _setting_changes(table: Table, above: Table, methods: Mapping[str, Table]) -> Table:
    """Return the changes of a setting to the run, overridden by ``above``, and to options of methods."""
    run_table = merge_run_tables({key: value for key, value in table.items() if key != "options"}, above)
    method_options = tables_at(table, "options", methods)
    return {**run_table, "options": method_options} if method_options else run_table


def _complete_leakage_options(table: Mapping[str, Any]) -> Table | None:
    """Return the complete options of the attack, or None if no run is attacked."""
    if "leakage" not in table:
        return None
    from fedstill.attacks.config import LeakageConfig

    complete: Table = LeakageConfig.from_table(table_at(table, "leakage")).to_table()
    return complete


def _parse_seeds(value: int | tuple[int, ...]) -> tuple[int, ...]:
    seeds = tuple(range(value)) if isinstance(value, int) else value
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        shown = value if isinstance(value, int) else list(value)
        raise ArgumentError("seeds", shown, "a number of seeds >= 1, or a list of different seeds")
    return seeds


def _unflatten_shared(values: Mapping[str, Any]) -> Table:
    """Return nested tables of options that all methods share."""
    for name in values:
        if name.split(".")[0] in PER_RUN_KEYS:
            known = shared_options(base_run([]))
            advice = "options of a method belong to a preset or file"
            raise UnknownName("option of all methods", name, known, see=advice)
    return unflatten(values)
