"""A comparison: methods, seeds and settings on one base configuration, and the runs that follow from them.

A comparison lists its methods by label, each with a complete table of options.
:mod:`fedstill.compare.comparison_file` reads a comparison from names or a file, and
:mod:`fedstill.compare.comparison_runner` runs it.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.core.compute import Compute
from fedstill.core.config_tables import merge_tables
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.core.toml import Table
from fedstill.protocol.method import METHODS, build_node_side
from fedstill.protocol.payload_kinds import PRIVATE_DATA, PayloadKind
from fedstill.protocol.queries import NodeSetting, Query, placeholder_public
from fedstill.runs import presets
from fedstill.runs.spec import PaperMetric, RunSpec, from_dict, to_dict

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

    @property
    def sets_policy(self) -> bool:
        """True if the plan sets the policy ``outputs_only``."""
        tables = (self.base, *self.settings.values(), *self.runs.values())
        return any(has_key(table, "nodes", "policy", "outputs_only") for table in tables)

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
        outputs_only = not any(kind.category == "model" or kind == PRIVATE_DATA for kind in kinds)
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
            table["leakage"] = self.leakage
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
