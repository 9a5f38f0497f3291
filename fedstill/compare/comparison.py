"""What a comparison is: methods, seeds and settings over one base, and each run that follows from them.

:mod:`fedstill.compare.comparison_file` reads one from names or a file,
:mod:`fedstill.compare.comparison_runner` runs it.

The methods of a comparison: from their names and options to a complete table each, by label.
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
from fedstill.runs.config import PaperMetric, RunConfig, from_dict, to_dict

ONLY_SETTING = ""  # the name of the only setting, where a comparison names none
# What a paper may publish beside a task's figures: bytes of a run, all nodes, both ways.
COSTS = ("gigabytes",)


@dataclass(frozen=True)
class ComparisonRun:
    """One run of a comparison."""

    setting: str
    label: str
    seed: int

    @property
    def folder(self) -> str:
        """Where it is in the comparison's folder."""
        return f"{slug(self.setting)}/{self.label}-seed{self.seed}".lstrip("/")


@dataclass(frozen=True)
class Comparison:
    """What is compared, complete: no default that a later release changes can change it.

    Args:
        about: one line on it.
        note: what else its tables' readers must know.
        seeds: each method runs once with each.
        base: a run's table without method, seed and name.
        methods: each method's table by its label. A label is the method's name, or another one where a
            method stands in the comparison more than once, with other options.
        settings: by name, each a run's table that is merged onto the base; its key ``options`` has, by label,
            what differs there of the methods' options.
        runs: by label, a run's table of one method only, merged onto the setting.
        changed: options that the command line set.
        leakage: the options of the attack on each run, complete; None attacks none.
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
        """Whether the plan itself says whether nodes give outputs only."""
        tables = (self.base, *self.settings.values(), *self.runs.values())
        return any(has_key(table, "nodes", "policy", "outputs_only") for table in tables)

    def planned_runs(self, only: Collection[str] = ()) -> list[ComparisonRun]:
        """All runs, in order: setting by setting, seed by seed, so that early figures compare methods.

        Args:
            only: labels and names of settings; of a sort of which none is named, all are wanted.

        Raises:
            UnknownName: a name that is neither.
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

    def run_config(self, planned: ComparisonRun) -> RunConfig:
        """One run. Unless the plan itself says whether nodes give outputs only, they do, and no label maps,
        except for methods that cannot work so: what had to be allowed is what the report shows.

        Raises:
            FedstillError: the plan does not describe a run.
        """
        setting = dict(self.settings[planned.setting])
        there = setting.pop("options", {}).get(planned.label, {})
        table = merge_run_tables(self.base, setting, self.runs.get(planned.label, {}))
        method = {**self.methods[planned.label], **there}
        own = {"name": planned.label, "seed": planned.seed, "method": method}
        try:
            config = from_dict({**table, **own})
        except FedstillError as error:
            where = f"{planned.label}, {planned.setting}" if planned.setting else planned.label
            raise FedstillError(f"{where}: {error}") from error
        if has_key(table, "nodes", "policy", "outputs_only"):
            return config
        leaves, policy = set(released_kinds(config)), config.nodes.policy
        only = not any(kind.category == "model" or kind == PRIVATE_DATA for kind in leaves)
        maps = any(kind.from_label_maps for kind in leaves)
        named = tuple(sorted(kind for kind in leaves if kind.must_be_named))
        policy = dataclasses.replace(policy, outputs_only=only, label_maps=maps, kinds=named)
        return dataclasses.replace(config, nodes=dataclasses.replace(config.nodes, policy=policy))

    def to_toml(self) -> str:
        """The comparison as a file that :func:`read` reads back to an equal one."""
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
        """The published figure of a method: by its label or, where no label is so called, by its name."""
        names = {label}
        name = str(self.methods[label]["name"])
        if name not in self.methods:
            names.add(name)
        for found in self.paper:
            if found.method in names and found.metric == metric and found.setting in (ONLY_SETTING, setting):
                return found
        return None


def method_queries(config: RunConfig) -> Mapping[str, Query]:
    """The queries that a run's method declares, by name."""
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


def released_kinds(config: RunConfig) -> tuple[PayloadKind, ...]:
    """The kinds of tensor that leave a node in a run, in alphabetical order."""
    asked = method_queries(config).values()
    return tuple(sorted({kind for query in asked for kind in query.released_kinds().values()}))


def merge_run_tables(*tables: Mapping[str, Any]) -> Table:
    """A run's tables as one, later ones above earlier ones; a copy."""
    merged: Table = {}
    for table in tables:
        merged = merge_tables(RunConfig, merged, table)
    return copy.deepcopy(merged)


def has_key(table: object, *keys: str) -> bool:
    """Whether a table has a value at a path of keys."""
    for key in keys:
        if not isinstance(table, Mapping) or key not in table:
            return False
        table = table[key]
    return True


def slug(name: str) -> str:
    """A name as that of a folder.

    >>> slug("Fashion-MNIST, alpha = 0.1"), slug("größer")
    ('Fashion-MNIST-alpha-0.1', 'größer')
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


def methods_by_label(names: Sequence[str], table: Mapping[str, Any]) -> dict[str, Table]:
    """Each method's complete table, by label."""
    labels = _labels(names)
    if not names:
        raise ArgumentError("methods", [], "a list of methods (`fedstill list`), presets or .toml files")
    if twice := [name for name, label in zip(names, labels, strict=True) if labels.count(label) > 1]:
        raise ArgumentError("methods", ", ".join(twice), "each once: a file can name one by other labels")
    given = tables_at(table, "options", labels)
    return {
        label: _complete_method(label, name, given.get(label, {}))
        for label, name in zip(labels, names, strict=True)
    }


def _labels(names: Sequence[str]) -> list[str]:
    """What methods are called in a comparison: by a file's name, or by a class's; with the module's before
    it, where classes of several modules have one name.

    >>> _labels(["fedavg", "mine/run.toml", "lab:Own", "a:Best", "b.c:Best"])
    ['fedavg', 'run', 'Own', 'a.Best', 'b.c.Best']
    """
    short = [Path(name).stem if name.endswith(".toml") else name.rpartition(":")[2] for name in names]
    return [
        name.replace(":", ".") if short.count(label) > 1 and ":" in name else label
        for name, label in zip(names, short, strict=True)
    ]


def _complete_method(label: str, name: str, given: Table) -> Table:
    """The complete table of one method: named by its options, by its label, or by a preset."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", label):
        raise ArgumentError("methods", name, "letters, digits, '.', '_' and '-', as it names a folder")
    below: Table = {}
    if "extends" in given:
        below = table_at(presets.read(str(given["extends"]), RunConfig), "method")
        given = {key: value for key, value in given.items() if key != "extends"}
    elif "name" not in given:
        if name in METHODS:
            below = {"name": name}
        elif name.endswith(".toml") or name in presets.names():
            below = table_at(presets.read(name, RunConfig), "method")
        else:
            known = [*METHODS, *presets.names()]
            module = Path(name).stem if name.endswith(".py") else name
            meant = f"'{module}:CLASS', a method in that file" if Path(f"{module}.py").is_file() else ""
            raise UnknownName("method or preset", name, known, see="see `fedstill list`", suggestion=meant)
    try:
        run = from_dict({"method": merge_run_tables({"method": below}, {"method": given})["method"]})
    except FedstillError as error:
        raise FedstillError(f"{label}: {error}") from error
    complete: Table = to_dict(run)["method"]
    return complete


def resolve_paths(names: Sequence[str], folder: Path | None) -> list[str]:
    """Names of methods, presets and files, these from the folder of the comparison if they lie there."""
    there = [folder / name if folder and name.endswith(".toml") else Path() for name in names]
    return [str(file) if file.is_file() else name for file, name in zip(there, names, strict=True)]


def resolve_extends(options: Table, folder: Path | None) -> Table:
    """Options by label; files that they extend are found as :func:`resolve_paths` finds them."""
    return {
        label: {**given, "extends": resolve_paths([str(given["extends"])], folder)[0]}
        if isinstance(given, dict) and "extends" in given
        else given
        for label, given in options.items()
    }


def table_at(table: Mapping[str, Any], key: str) -> Table:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ArgumentError(key, value, "a table")
    return value


def tables_at(
    table: Mapping[str, Any], key: str, labels: Mapping[str, Any] | Sequence[str]
) -> dict[str, Table]:
    """A table of tables by label."""
    found = table_at(table, key)
    for label in found:
        if label not in labels:
            allowed = f"options of what methods lists: {', '.join(labels)}"
            raise ArgumentError(key, label, allowed)
    return {label: table_at(found, label) for label in found}
