"""Benchmark suite: comparisons of all methods on several data sets, with recorded rows.

``experiments/suite/`` has one file for each part: a comparison whose table ``[suite]`` names the settings
behind the columns of its leaderboard. ``experiments/suite/results/`` has the recorded rows of each part, one
method, setting and seed in a line of JSON (:class:`SuiteRow`). A row names the fingerprint of the complete
configuration of its run, which equal configurations share. :mod:`fedstill.report.suite_results` collects the
rows of finished runs and ranks methods.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from annotated_types import Gt

from fedstill.compare.comparison import (
    Comparison,
    methods_by_label,
    parse_settings,
    read_comparison,
    table_at,
)
from fedstill.compare.reproduction import NonEmptyText, experiments_folder
from fedstill.core.config_tables import Table, flatten, read_table, read_text, read_toml
from fedstill.core.errors import ArgumentError, RunFolderError, UnknownName, by_caller
from fedstill.core.hashing import fingerprint
from fedstill.core.options import CheckedOptions, field_docs
from fedstill.core.run_writer import write_text
from fedstill.runs.spec import RunSpec, to_dict

SUITE = "suite-v1"
JSON_TYPES: Mapping[object, Mapping[str, Any]] = MappingProxyType(
    {
        str: {"type": "string"},
        int: {"type": "integer"},
        float: {"type": "number"},
        tuple: {"type": "array", "items": {"type": "string"}},
        Mapping: {"type": "object", "additionalProperties": {"type": "number"}},
    }
)
CACHE_OPTIONS = ("features.cache", "features.cache_gib", "features.batch")
# Options that do not change what a run measures, and those that a comparison sets for each run.
UNHASHED = ("data.root", "data.download", "public.root", "seed", "name", *CACHE_OPTIONS)
UNHASHED_TABLES = ("engine", "paper", "plugins", "track")
HASHED_IN_ENGINE = ("engine.precision", "engine.startup_kit")
FILES = ("features.backbone", "features.weights")  # hashed by name, as folders differ between machines


@dataclass(frozen=True, kw_only=True)
class SuiteSettings(CheckedOptions):
    """Table ``[suite]`` of a part: its title, and the settings behind the columns of its leaderboard."""

    section: ClassVar[str] = "suite"

    title: NonEmptyText  # data and networks in a few words
    main: str  # the setting by which methods are ranked
    liar: str = ""  # the main setting with one malicious node
    epsilon: str = ""  # the main setting under a privacy budget
    minutes: Annotated[float, Gt(0)]  # of all runs, one after another, on one core


@dataclass(frozen=True, kw_only=True)
class SuiteRow(CheckedOptions):
    """Result of one run: one method in one setting of a part, with one seed.

    A metric that was not measured is absent. Accuracies are in percent, on test data that no node saw.
    """

    section: ClassVar[str] = "row"

    suite: str
    """Version of the suite, as suite-v1."""
    part: str
    """Part of the suite."""
    setting: str
    """Setting of the part."""
    label: str
    """Name of the row: the method, or the method in another form."""
    method: str
    """Registered name of the method, or MODULE:CLASS of a custom one."""
    form: str = ""
    """printed, published, fedstill; empty: not named."""
    seed: int
    """Seed of split, weights and all random draws."""
    config: str
    """Fingerprint of the complete configuration, without seed, locations, and most of the engine. Files count
    by name, and the code of a custom method does not count."""
    fedstill: str = ""
    """Version of fedstill."""
    date: str = ""
    """Day of the run, as 2026-12-01."""
    metric: str = "accuracy"
    """Key of the main metric."""
    evaluated: str = ""
    """Kind of the evaluated model: student, virtual (the average), ensemble, or nodes."""
    releases: tuple[str, ...] = ()
    """Payload kinds that leave a node."""
    score: float | None = None
    """Main metric of the evaluated model."""
    teachers: float | None = None
    """Mean of the nodes' local models, on all test data."""
    ensemble: float | None = None
    """Ensemble of the teachers, as the method combines them."""
    worst_site: float | None = None
    """Lowest score over the sites of the test data."""
    bytes_up: float | None = None
    """Bytes from all nodes to the server in the whole run."""
    bytes_down: float | None = None
    """Bytes from the server to all nodes in the whole run."""
    queries: float | None = None
    """Queries of a node."""
    seconds: float | None = None
    """Duration of the run. Compare it within one machine and one file of rows only."""
    epsilon: float | None = None
    """Largest privacy cost of a node; absent: no guarantee."""
    delta: float | None = None
    """Delta of epsilon."""
    attacks: Mapping[str, float] = field(default_factory=dict)
    """Value of each metric of each attack, by ``METRIC: ATTACK``."""
    not_run: str = ""
    """Reason of a refused or stopped run."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Setting, label and seed: one row of each key is kept."""
        return self.setting, self.label, self.seed


@dataclass(frozen=True)
class SuitePart:
    """One part of the suite: the file of its comparison and its table ``[suite]``."""

    file: Path
    settings: SuiteSettings

    @property
    def name(self) -> str:
        return self.file.stem.replace("_", "-")

    @property
    def results_file(self) -> Path:
        """File of the recorded rows."""
        return self.file.parent / "results" / f"{self.file.stem}.jsonl"

    def comparison(
        self,
        methods: Sequence[str] = (),
        *,
        seeds: int | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Comparison:
        """Return the part's comparison.

        Args:
            methods: methods instead of the part's: names, presets, ``MODULE:CLASS``, or ``.toml`` files of
                runs, of which the method's options are used.
            seeds: number of seeds; None: as the file says.
            changes: run options that change the base, by dotted name.

        Raises:
            ArgumentError: a method whose label the part has already.
            FedstillError: an unknown method, or options that do not describe a run.
        """
        plan = read_comparison(self.file, seeds=seeds, changes=changes)
        if not methods:
            return plan
        others = methods_by_label(methods, {})
        if known := [label for label in others if label in plan.methods]:
            name = by_caller("--method", "methods", "methods")
            raise ArgumentError(name, known[0], f"a method that part {self.name} does not have")
        settings: dict[str, Table] = {
            name: {key: value for key, value in table.items() if key != "options"}
            for name, table in plan.settings.items()
        }
        return dataclasses.replace(plan, methods=others, settings=settings, runs={}, forms={})

    def recorded_rows(self) -> list[SuiteRow]:
        """Return the recorded rows; none if nothing is recorded."""
        return read_rows(self.results_file) if self.results_file.exists() else []


def suite_parts(folder: Path | None = None) -> list[SuitePart]:
    """Return all parts of the suite, by name.

    Args:
        folder: the folder; None: ``suite`` in :func:`.experiments_folder`.

    Raises:
        FedstillError: a file cannot be read, or a setting of its table ``[suite]`` is not in it.
    """
    parts = []
    for file in sorted((folder or experiments_folder() / "suite").glob("*.toml")):
        table = read_toml(file)
        about = read_table(SuiteSettings, table_at(table, "suite"), "suite.")
        names = list(parse_settings(table.get("settings")))
        for key in ("main", "liar", "epsilon"):
            if (name := getattr(about, key)) and name not in names:
                raise ArgumentError(f"suite.{key} of {file.name}", name, f"a setting: {', '.join(names)}")
        parts.append(SuitePart(file, about))
    return parts


def find_parts(names: Collection[str], folder: Path | None = None) -> list[SuitePart]:
    """Return the named parts, or all if no name is given.

    Raises:
        UnknownName: there is no such part.
    """
    parts = {part.name: part for part in suite_parts(folder)}
    for name in names:
        if name not in parts:
            raise UnknownName("part", name, list(parts))
    return [part for name, part in parts.items() if name in names or not names]


def config_fingerprint(spec: RunSpec) -> str:
    """Return the fingerprint of a run's configuration, equal for all seeds and machines: 32 digits.

    >>> from fedstill.methods.fedavg import FedAvg
    >>> specs = [RunSpec(method=FedAvg(rounds=n), seed=seed) for n, seed in ((9, 0), (9, 1), (8, 0))]
    >>> one, same, shorter = map(config_fingerprint, specs)
    >>> one == same, one == shorter
    (True, False)
    """
    options = {
        name: Path(str(value)).name if name in FILES else value
        for name, value in flatten(to_dict(spec)).items()
        if changes_measurement(name)
    }
    return fingerprint(json.dumps(options, sort_keys=True, default=str).encode()).replace(" ", "")


def read_rows(file: Path) -> list[SuiteRow]:
    """Read rows, one JSON object a line.

    Raises:
        RunFolderError: a line is not a row.
    """
    rows = []
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        try:
            rows.append(read_table(SuiteRow, json.loads(line), "row."))
        except (ValueError, TypeError, AttributeError, ArgumentError, UnknownName) as error:
            raise RunFolderError(f"{file}, line {number}: {error}") from error
    return rows


def write_rows(file: Path, rows: Sequence[SuiteRow]) -> None:
    """Write rows, one JSON object a line, without the metrics that were not measured."""
    tables = [
        {key: value for key, value in dataclasses.asdict(row).items() if value not in (None, "", (), {})}
        for row in rows
    ]
    lines = [json.dumps(table, ensure_ascii=False) for table in tables]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(f"{line}\n" for line in lines))


def changes_measurement(option: str) -> bool:
    """Return whether a run option changes what a run measures.

    >>> [changes_measurement(name) for name in ("split.alpha", "data.root", "engine.threads")]
    [True, False, False]
    """
    if option in HASHED_IN_ENGINE:
        return True
    return option not in UNHASHED and option.partition(".")[0] not in UNHASHED_TABLES


def merge_rows(old: Sequence[SuiteRow], new: Sequence[SuiteRow]) -> list[SuiteRow]:
    """Return old rows and new ones, which replace those of the same setting, label and seed.

    Old rows of a setting and label are left out if their method or configuration is not that of the new ones.

    >>> shared = {"suite": "v", "part": "p", "setting": "s", "config": ""}
    >>> old = [SuiteRow(**shared, label="a", method="a", seed=seed) for seed in range(2)]
    >>> [row.method for row in merge_rows(old, [SuiteRow(**shared, label="a", method="b", seed=0)])]
    ['b']
    """
    measured = {(row.setting, row.label): (row.method, row.config) for row in new}
    kept = [
        row
        for row in old
        if measured.get((row.setting, row.label), (row.method, row.config)) == (row.method, row.config)
    ]
    return list({row.key: row for row in (*kept, *new)}.values())


def row_schema() -> dict[str, Any]:
    """Return the JSON schema of a row, which ``experiments/suite/schema.json`` has.

    >>> row_schema()["properties"]["seed"]["type"], "score" in row_schema()["required"]
    ('integer', False)
    """
    docs, types = field_docs(SuiteRow), get_type_hints(SuiteRow)
    options = [option for option in dataclasses.fields(SuiteRow) if option.init]
    required = [option.name for option in options if _has_no_default(option)]
    properties = {
        option.name: {**_json_type(types[option.name]), "description": docs[option.name]}
        for option in options
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Row of {SUITE}",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _has_no_default(option: dataclasses.Field[Any]) -> bool:
    return option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING


def _json_type(kind: Any) -> Mapping[str, Any]:
    if isinstance(kind, UnionType):  # an absent value, or
        kind = get_args(kind)[0]
    return JSON_TYPES[get_origin(kind) or kind]
