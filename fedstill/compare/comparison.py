"""A comparison: methods, seeds and settings on one base configuration, and the runs that follow from them.

A comparison is one run without its method (the base), some methods, seeds, and optionally settings that
change the base. All methods share the base: one seed gives all of them the same partition, initial weights,
local optimizer and budget. A method may differ in its own options (``options``). Other run options may differ
only if the plan says so (``runs``), and the report repeats that.

It is read from names or a file. Short forms in a file are options that many methods share (``[method]``),
one option varied at a time (``[vary]``), a paper's table (``[published]``), and the comparison at another
scale (``[scale.NAME]``). ``[reproduces]`` names the table or figure of a paper
(:mod:`fedstill.compare.reproduction`).
:mod:`fedstill.compare.comparison_runner` runs a comparison.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.compare.method_forms import EVERY_METHOD, MethodForm, read_forms
from fedstill.core.compute import Compute
from fedstill.core.config_tables import (
    Table,
    merge_tables,
    option_types,
    parse_toml,
    read_table,
    read_text,
    unflatten,
)
from fedstill.core.errors import ArgumentError, FedstillError, RunFolderError, UnknownName
from fedstill.core.registry import add_search_folders
from fedstill.protocol.method import METHODS, build_node_side
from fedstill.protocol.node_side import NodeSetting, placeholder_public
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.protocol.queries import Query
from fedstill.runs import presets
from fedstill.runs.spec import PaperMetric, RunSpec, check_paper_metrics, from_dict, to_dict

ONLY_SETTING = ""  # name of the only setting, if a comparison names none
# Published metrics besides those of the task: bytes of a run, all nodes, both directions.
COSTS = ("gigabytes",)


@dataclass(frozen=True)
class ComparisonRun:
    """One run of a comparison."""

    setting: str
    label: str
    seed: int

    @property
    def folder(self) -> str:
        """Folder of the run in the folder of the comparison."""
        return f"{slug(self.setting)}/{self.label}-seed{self.seed}".lstrip("/")


@dataclass(frozen=True)
class Comparison:
    """Complete plan of a comparison. Changed defaults of a later release do not affect it.

    Args:
        name: name of the comparison.
        seeds: each method runs once with each seed.
        base: table of a run without method, seed and name.
        methods: table of each method by label. A label is the name of the method, or another name if the
            method occurs more than once with other options.
        about: description in one line.
        note: further remarks for readers of its tables.
        settings: by name, tables that are merged onto the base. Their key ``options`` has options that differ
            for methods, by label.
        runs: by label, a table that is merged onto the setting for one method only.
        paper: published metrics.
        changed: options that the command line set.
        leakage: complete options of the attack on each run; None: no attacks.
        attacked_settings: settings whose runs are attacked; empty: all.
        forms: by label, whether a method runs as printed, as its published code, or in fedstill's form.
    """

    name: str
    seeds: tuple[int, ...]
    base: Table
    methods: Mapping[str, Table]
    about: str = ""
    note: str = ""
    settings: Mapping[str, Table] = field(default_factory=lambda: {ONLY_SETTING: {}})
    runs: Mapping[str, Table] = field(default_factory=dict)
    paper: tuple[PaperMetric, ...] = ()
    changed: tuple[str, ...] = ()
    leakage: Table | None = None
    attacked_settings: tuple[str, ...] = ()
    forms: Mapping[str, MethodForm] = field(default_factory=dict)

    @property
    def sets_policy(self) -> bool:
        """True if the plan sets the policy ``outputs_only``."""
        tables = (self.base, *self.settings.values(), *self.runs.values())
        return any(has_key(table, "nodes", "policy", "outputs_only") for table in tables)

    def is_attacked(self, setting: str) -> bool:
        """Return whether the runs of a setting are attacked after they have finished."""
        return self.leakage is not None and setting in (self.attacked_settings or self.settings)

    def planned_runs(self, only: Collection[str] = ()) -> list[ComparisonRun]:
        """Return all runs, ordered by setting, then seed, then method, so that early results compare methods.

        Args:
            only: labels of methods and names of settings. If it names no method, all methods run; likewise
                for settings.

        Raises:
            UnknownName: a name is neither.
        """
        for name in only:
            if name not in self.methods and name not in self.settings:
                raise UnknownName("method or setting", name, [*self.methods, *filter(None, self.settings)])
        return [
            ComparisonRun(setting, label, seed)
            for setting in [name for name in self.settings if name in only] or self.settings
            for seed in self.seeds
            for label in [name for name in self.methods if name in only] or self.methods
        ]

    def run_config(self, planned: ComparisonRun) -> RunSpec:
        """Return the configuration of one run.

        Unless the plan sets ``outputs_only``, nodes release outputs only and no label maps, except for
        methods that need more. The report shows what had to be allowed.

        Raises:
            FedstillError: the plan does not describe a run.
        """
        setting = dict(self.settings[planned.setting])
        setting_options = setting.pop("options", {}).get(planned.label, {})
        table = merge_run_tables(self.base, setting, self.runs.get(planned.label, {}))
        method = {**self.methods[planned.label], **setting_options}
        run_keys = {"name": planned.label, "seed": planned.seed, "method": method}
        try:
            config = from_dict({**table, **run_keys})
        except FedstillError as error:
            location = f"{planned.label}, {planned.setting}" if planned.setting else planned.label
            raise FedstillError(f"{location}: {error}") from error
        if has_key(table, "nodes", "policy", "outputs_only"):
            return config
        kinds, policy = set(released_kinds(config)), config.nodes.policy
        outputs_only = all(kind.is_output or kind.must_be_named or kind.from_label_maps for kind in kinds)
        label_maps = any(kind.from_label_maps for kind in kinds)
        named = tuple(sorted(kind for kind in kinds if kind.must_be_named))
        policy = dataclasses.replace(policy, outputs_only=outputs_only, label_maps=label_maps, kinds=named)
        return dataclasses.replace(config, nodes=dataclasses.replace(config.nodes, policy=policy))

    def to_toml(self) -> str:
        """Return the comparison as TOML that :func:`.read_comparison` reads back."""
        table: Table = {"name": self.name, "about": self.about, "seeds": list(self.seeds)}
        if self.note:
            table["note"] = self.note
        table.update(methods=list(self.methods), changed=list(self.changed), base=self.base)
        table.update(options=dict(self.methods), runs=dict(self.runs))
        if list(self.settings) != [ONLY_SETTING]:
            table["settings"] = [{"name": name, **setting} for name, setting in self.settings.items()]
        metrics = [dataclasses.asdict(metric) for metric in self.paper]
        if self.leakage is not None:
            table["leakage"] = {**self.leakage, "settings": list(self.attacked_settings)}
        if self.forms:
            table["forms"] = {label: dataclasses.asdict(form) for label, form in self.forms.items()}
        table["paper"] = [
            {**metric, "std": "none"} if metric["std"] is None else metric for metric in metrics
        ]
        return tomli_w.dumps(table)

    def published(self, setting: str, label: str, metric: str) -> PaperMetric | None:
        """Return the published metric of a method, or None.

        It is found by the label or, if no label equals it, by the name of the method.
        """
        names = {label}
        name = str(self.methods[label]["name"])
        if name not in self.methods:
            names.add(name)
        for paper_metric in self.paper:
            if (
                paper_metric.method in names
                and paper_metric.metric == metric
                and paper_metric.setting in (ONLY_SETTING, setting)
            ):
                return paper_metric
        return None


def method_queries_by_name(config: RunSpec) -> Mapping[str, Query]:
    """Return the queries of a run's method, by name."""
    task = config.task.minimal_task()
    setting = NodeSetting(
        task,
        config.nodes.local,
        Compute(),
        placeholder_public(task),
        secure_aggregation=config.link.secure_aggregation,
        recalibration=config.student.declared_recalibration,
    )
    queries: Mapping[str, Query] = build_node_side(config.method, setting).queries
    return queries


def released_kinds(config: RunSpec) -> tuple[PayloadKind, ...]:
    """Return the payload kinds that leave a node in a run, in alphabetical order."""
    queries = method_queries_by_name(config).values()
    return tuple(sorted({kind for query in queries for kind in query.released_kinds().values()}))


def merge_run_tables(*tables: Mapping[str, Any]) -> Table:
    """Merge tables of a run. Later tables override earlier ones. The result is a copy."""
    merged: Table = {}
    for table in tables:
        merged = merge_tables(RunSpec, merged, table)
    return copy.deepcopy(merged)


def has_key(table: object, *keys: str) -> bool:
    """Return whether nested tables have a value at a path of keys."""
    for key in keys:
        if not isinstance(table, Mapping) or key not in table:
            return False
        table = table[key]
    return True


def slug(name: str) -> str:
    """Return a name as a folder name.

    >>> slug("Fashion-MNIST, alpha = 0.1"), slug("größer")
    ('Fashion-MNIST-alpha-0.1', 'größer')
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


def methods_by_label(names: Sequence[str], table: Mapping[str, Any]) -> dict[str, Table]:
    """Return the complete table of each method, by label.

    Args:
        names: names of methods, presets or files.
        table: table of the comparison, with ``options`` by label.

    Raises:
        ArgumentError: no methods, duplicate methods, or options of a method that is not listed.
        UnknownName: an unknown method or preset.
    """
    labels = _labels(names)
    if not names:
        raise ArgumentError("methods", [], "a list of methods (`fedstill list`), presets or .toml files")
    if duplicates := [name for name, label in zip(names, labels, strict=True) if labels.count(label) > 1]:
        raise ArgumentError(
            "methods", ", ".join(duplicates), "each once; in a file, labels can name a method more than once"
        )
    options = tables_at(table, "options", labels)
    return {
        label: _complete_method(label, name, options.get(label, {}))
        for label, name in zip(labels, names, strict=True)
    }


def _labels(names: Sequence[str]) -> list[str]:
    """Return labels of methods: the stem of a file, or the name of a class.

    If classes of several modules have one name, the module precedes it.

    >>> _labels(["fedavg", "mine/run.toml", "lab:Own", "a:Best", "b.c:Best"])
    ['fedavg', 'run', 'Own', 'a.Best', 'b.c.Best']
    """
    short = [Path(name).stem if name.endswith(".toml") else name.rpartition(":")[2] for name in names]
    return [
        name.replace(":", ".") if short.count(label) > 1 and ":" in name else label
        for name, label in zip(names, short, strict=True)
    ]


def _complete_method(label: str, name: str, options: Table) -> Table:
    """Return the complete table of a method, which its options, its label or a preset names."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", label):
        raise ArgumentError("methods", name, "letters, digits, '.', '_' and '-', as it becomes a folder name")
    base: Table = {}
    if "extends" in options:
        base = table_at(presets.read(str(options["extends"]), RunSpec), "method")
        options = {key: value for key, value in options.items() if key != "extends"}
    elif "name" not in options:
        if name in METHODS:
            base = {"name": name}
        elif name.endswith(".toml") or name in presets.names():
            base = table_at(presets.read(name, RunSpec), "method")
        else:
            known_names = [*METHODS, *presets.names()]
            module = Path(name).stem if name.endswith(".py") else name
            meant = f"'{module}:CLASS', a method in that file" if Path(f"{module}.py").is_file() else ""
            raise UnknownName(
                "method or preset", name, known_names, see="see `fedstill list`", suggestion=meant
            )
    try:
        run = from_dict({"method": merge_run_tables({"method": base}, {"method": options})["method"]})
    except FedstillError as error:
        raise FedstillError(f"{label}: {error}") from error
    complete: Table = to_dict(run)["method"]
    return complete


def resolve_paths(names: Sequence[str], folder: Path | None) -> list[str]:
    """Resolve files that lie in the folder of the comparison. Other names are unchanged."""
    files = [folder / name if folder and name.endswith(".toml") else Path() for name in names]
    return [str(file) if file.is_file() else name for file, name in zip(files, names, strict=True)]


def resolve_extends(options: Table, folder: Path | None) -> Table:
    """Resolve the files that options extend, as :func:`resolve_paths` does."""
    return {
        label: {**method_options, "extends": resolve_paths([str(method_options["extends"])], folder)[0]}
        if isinstance(method_options, dict) and "extends" in method_options
        else method_options
        for label, method_options in options.items()
    }


def table_at(table: Mapping[str, Any], key: str) -> Table:
    """Return the table at a key, empty if the key is missing.

    Raises:
        ArgumentError: the value is not a table.
    """
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ArgumentError(key, value, "a table")
    return value


def tables_at(
    table: Mapping[str, Any], key: str, labels: Mapping[str, Any] | Sequence[str]
) -> dict[str, Table]:
    """Return tables by label at a key.

    Raises:
        ArgumentError: a label is unknown, or a value is not a table.
    """
    tables = table_at(table, key)
    for label in tables:
        if label not in labels:
            expected = f"options of listed methods: {', '.join(labels)}"
            raise ArgumentError(key, label, expected)
    return {label: table_at(tables, label) for label in tables}


# --- reading names and files ----------------------------------------------------------------------------


SMALL_SCALE = "small"  # scale of the file itself
SHORT_FORM_KEYS = (
    "reproduces",
    "suite",
    "scale",
    "method",
    "vary",
    "published",
    "arguments",
)  # keys that are expanded
BY_LABEL = ("options", "runs", "forms")  # tables by label of methods
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
    expanded.pop("suite", None)  # see fedstill.compare.suite
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

    A base that extends a preset replaces the base and the ``runs`` of the file. Options of a method that
    extend a preset replace its options. Lists are replaced as a whole. Options of methods that the scale
    does not list are dropped, and so are published metrics of settings that it does not list.

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
    if "extends" in table_at(above, "base"):
        below.pop("runs", None)
    if isinstance(above.get("settings"), list) and isinstance(below.get("published"), Mapping):
        names = {setting.get("name") for setting in above["settings"] if isinstance(setting, Mapping)}
        below["published"] = {
            name: cells
            for name, cells in below["published"].items()
            if name in names or not isinstance(cells, Mapping)
        }
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
        key: {label: of for label, of in value.items() if label in (*methods, EVERY_METHOD)}
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
        expanded = expand_short_forms(parse_toml(read_text(file), names[0]), scale)
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
    text = read_text(file)
    raw = parse_toml(text, str(file))
    table = expand_short_forms(raw, scale)
    own = raw if scale == SMALL_SCALE else table_at(raw, "scale")[scale]
    if reduction := table_at(own, "reproduces").get("reduction"):
        is_small = scale == SMALL_SCALE
        lead = "Reduced scale, so values differ from the paper's" if is_small else f"Scale {scale}"
        table.setdefault("note", f"{lead}: {reduction}")
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
    table = parse_toml(read_text(Path(file)), file)
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


TABLES = ("base", "options", "runs", "settings", "leakage", "forms")


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
        for setting, changes_of_setting in parse_settings(table.get("settings")).items()
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
        attacked_settings=_parse_attacked_settings(table, settings),
        forms=read_forms(table.get("forms", {}), methods),
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


def parse_settings(value: object) -> dict[str, Table]:
    """Return the settings of a comparison's file by name.

    Raises:
        ArgumentError: they are not a list of named tables.
        UnknownName: a key is not one of a run.
    """
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
    own = {key: value for key, value in table_at(table, "leakage").items() if key != "settings"}
    complete: Table = LeakageConfig.from_table(own).to_table()
    return complete


def _parse_attacked_settings(table: Table, settings: Collection[str]) -> tuple[str, ...]:
    """Return the settings in a comparison's table ``leakage``."""
    names = table_at(table, "leakage").get("settings", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ArgumentError("leakage.settings", names, "a list of names of settings")
    for name in names:
        if name not in settings:
            raise UnknownName("setting of leakage.settings", name, settings)
    return tuple(names)


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
