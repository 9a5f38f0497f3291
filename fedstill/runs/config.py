"""One run as one typed, frozen configuration, and its TOML form.

The parts stand beside the code that they configure; here they come together, and here a table
(from TOML, or from Python) becomes a configuration or one clear error. What is read is strict:
no unknown keys, no silent conversions, except that a whole number is also a number.

TOML has no null. Where a value may be none, it is written as the text ``"none"``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tomli_w
from annotated_types import MinLen

from fedstill.core.compute import EngineConfig
from fedstill.core.config_tables import flatten, read_table, read_value, to_table
from fedstill.core.errors import ArgumentError, UnknownName, by_caller
from fedstill.core.options import CheckedOptions, NonNegativeInt
from fedstill.core.registry import add_search_folders, check_registered_names
from fedstill.data.builtin import Digits
from fedstill.data.config import DataConfig
from fedstill.data.public import PublicConfig
from fedstill.data.splits import Dirichlet, SplitConfig
from fedstill.federation.link_config import LinkConfig
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, Method, method_name
from fedstill.runs import presets
from fedstill.tasks import TASKS, TaskConfig
from fedstill.tasks.classification import ClassificationConfig

Name = Annotated[str, MinLen(1), "the name of a model"]


# Options that decide nothing of what a run comes to, or only who is believed on the way there.
RESUMABLE_OPTIONS = (
    r"name|plugins|track\b.*|(data|public)\.(root|path)|link\.(wait|quorum|outlier)"
    r"|engine\.(name|device|threads|graphs|channels_last|startup_kit)"
)


@dataclass(frozen=True)
class NodesConfig(CheckedOptions):
    """What the nodes are: their models, how they train them, what they answer."""

    section: ClassVar[str] = "nodes"

    models: Annotated[tuple[Name, ...], MinLen(1), "a list of one model or more"] = ("small-cnn",)
    """The nodes' networks, taken in turn: with two names the first node has the first, the second
    the second, the third the first again. "resnet8:16" is a ResNet-8 of width 16;
    "package.module:factory" is your own. A .skops or .onnx file, or an address of this machine, is a model
    that is there already; a .toml file has the keys of a node's [model]."""

    local: LocalConfig = field(default_factory=LocalConfig)
    """How a node trains its own model on its own data."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """What a node's gate lets out."""

    privacy: PrivacyConfig = field(default_factory=NoPrivacy)
    """How a node protects its records, and how much of their privacy a run may cost."""

    perceptual: str = ""
    """A safetensors file of VGG-16 or VGG-19 weights, named as torchvision names them, that every node has:
    for losses that compare images by its features. Without one these losses are off."""


@dataclass(frozen=True)
class StudentConfig(CheckedOptions):
    """The central model, which learns from the nodes' answers."""

    section: ClassVar[str] = "student"

    model: Name = "small-cnn"
    """The student's network, named as in nodes.models."""


@dataclass(frozen=True)
class EvaluationConfig(CheckedOptions):
    """What is measured on the test set, and how often."""

    section: ClassVar[str] = "evaluation"

    every: NonNegativeInt | None = None
    """The server's steps or rounds between two evaluations; 0: only at the end, none: ten times a run."""

    centralized: bool = True
    """Also train one model on the data of all nodes together, as the mark to reach."""

    samples: NonNegativeInt = 12
    """Generated inputs that are kept at each evaluation, for the report."""

    best: bool = False
    """Say beside the last figure which evaluation was best. That picks by the test data, as some published
    figures do; the run's own figures stay those of its end."""


@dataclass(frozen=True, kw_only=True)
class PaperMetric(CheckedOptions):
    """A published figure, to print beside ours."""

    section: ClassVar[str] = "paper"

    method: str
    """The method that it belongs to, or the name that a comparison gives it."""

    metric: str = "accuracy"
    """The key of one of the task's figures, as "dice" or "hd95": of the central model on all test data. With
    "local" before it: of the nodes' own models (what models are judged by: on their shares of it)."""

    value: float
    """In the figure's unit: percent unless it has another."""

    std: float | None = None
    """Its published standard deviation, if there is one."""

    source: Annotated[str, MinLen(1), "the paper with its table or page"]
    """Where it stands: paper, table, page."""

    setting: str = ""
    """The setting of a comparison that it belongs to; none is every setting."""


def check_paper_metrics(results: Iterable[PaperMetric], tasks: Iterable[TaskConfig]) -> None:
    """Refuse published figures that no task has, or whose values none could have.

    Args:
        tasks: of the runs that they stand beside; figures of others that have a name are let be.

    Raises:
        UnknownName: no task has such a figure.
        ArgumentError: a value out of range.
    """
    results = list(results)
    kinds = [task.task_class for task in (*(TASKS.importable().values() if results else ()), *tasks)]
    known = {metric.key: metric for kind in kinds for metric in kind.metrics}
    for paper in results:
        key = paper.metric.removeprefix("local ")
        if key not in known:
            raise UnknownName("published figure", paper.metric, known)
        most = 100 if known[key].unit == "%" else math.inf
        allowed = "from 0 to 100, in percent" if most == 100 else "a number from 0 up"
        if not 0 <= paper.value <= most or math.isinf(paper.value):
            raise ArgumentError("paper.value", paper.value, allowed)
        if paper.std is not None and (not 0 <= paper.std <= most or math.isinf(paper.std)):
            raise ArgumentError("paper.std", paper.std, f"{allowed}, or none")


@dataclass(frozen=True, kw_only=True)
class RunConfig(CheckedOptions):
    """One run: the data, the nodes that hold it, the method, and the student that learns."""

    name: str = "custom"
    """What this run is called; part of the name of its folder."""

    seed: NonNegativeInt = 0
    """Every random draw of the run follows from this number."""

    task: TaskConfig = field(default_factory=ClassificationConfig)
    """What is learned."""

    data: DataConfig = field(default_factory=Digits)
    """The data set; in TOML its key `name` says which: one that has a name, or a path."""

    split: SplitConfig = field(default_factory=Dirichlet)
    """How the training data are divided over the nodes; in TOML its key `name` says which split."""

    public: PublicConfig = field(default_factory=PublicConfig)
    """Public data, for methods that need some."""

    nodes: NodesConfig = field(default_factory=NodesConfig)
    """What the nodes are."""

    method: Method
    """How the student learns from the nodes; in TOML its key `name` says which method."""

    student: StudentConfig = field(default_factory=StudentConfig)
    """The central model."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Where and how the nodes' models are computed."""

    link: LinkConfig = field(default_factory=LinkConfig)
    """How the server deals with its nodes: forms, patience, quorum."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What is measured."""

    track: tuple[str, ...] = ()
    """Who else hears the run's metrics: tensorboard, mlflow, wandb, or `module:Name`. What they write lies in
    the run's folder; nodes elsewhere are told nothing of it."""

    paper: tuple[PaperMetric, ...] = ()
    """Published figures of this setting, which `fedstill compare` prints beside ours."""

    plugins: tuple[str, ...] = ()
    """Folders in which `module:Name` is looked for, beside the current one and what is installed. A file that
    names what lies beside it has its own folder here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ArgumentError("name", self.name, "letters, digits, '.', '_' and '-', as it names a folder")
        check_registered_names(self.method, "method")
        check_paper_metrics(self.paper, [self.task])


def load(target: str) -> RunConfig:
    """The run that a preset or a ``.toml`` file describes.

    Raises:
        FedstillError: there is no such preset or file, or it does not describe a run.
    """
    known = target.endswith(".toml") or any(f"-{name}".endswith(f"-{target}") for name in presets.names())
    if target in METHODS and not known:  # else presets with it are suggested
        typed, given = f"`demo --method.name {target}`", f'"demo" with {{"method.name": {target!r}}}'
        raise UnknownName("preset", target, presets.names(), suggestion=by_caller(typed, given, given))
    return from_dict(presets.read(target, RunConfig))


def load_toml(path: str | Path) -> RunConfig:
    """The run that a TOML file describes.

    Raises:
        FedstillError: there is no such file, it is not TOML or does not describe a run.
    """
    return from_dict(presets.read_file(Path(path), RunConfig))


def read_toml(text: str) -> RunConfig:
    """The run that TOML describes.

    Raises:
        FedstillError: the text is not TOML or does not describe a run.
    """
    return from_dict(presets.parse(text, kind=RunConfig))


def to_toml(config: RunConfig) -> str:
    """A run, complete, as TOML; :func:`read_toml` gives the same run back."""
    return tomli_w.dumps(to_dict(config))


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """The run that a table describes; what it does not name has its default.

    Raises:
        UnknownName: a key or a method that does not exist.
        ArgumentError: a value of the wrong type or outside what is allowed.
    """
    add_search_folders(read_value(tuple[str, ...], table.get("plugins", ()), "plugins"))
    return read_table(RunConfig, {"method": {}, **table})


def fingerprint_options(config: RunConfig) -> dict[str, str]:
    """The options that a run keeps from its beginning to its end, as texts by dotted name: all but where data
    lie, what computes, who listens, and how long nodes are waited for and which are believed."""
    options = flatten(to_dict(config))
    return {name: str(value) for name, value in options.items() if not re.fullmatch(RESUMABLE_OPTIONS, name)}


def to_dict(config: RunConfig) -> dict[str, Any]:
    """A run as a table of what TOML can hold; :func:`from_dict` gives the same run back.

    Raises:
        ArgumentError: its method is none.
    """
    method_name(config.method)
    table: dict[str, Any] = to_table(config)
    return table
