"""Configuration of a run as frozen dataclasses, and its TOML form.

The dataclass of each table is defined next to the code that it configures. Reading a table (from TOML or
Python) is strict: unknown keys and implicit conversions are errors, except that an integer is also a number.
TOML has no null, so None is written as ``"none"``.
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
from fedstill.core.options import CheckedOptions, NonNegativeInt, PositiveFloat
from fedstill.core.registry import add_search_folders, check_registered_names
from fedstill.data.builtin import Digits
from fedstill.data.config import DataConfig
from fedstill.data.partitioners import Dirichlet, SplitConfig
from fedstill.data.public import GAUSSIAN, PublicConfig
from fedstill.federation.adversaries import Adversary, NoAdversary
from fedstill.federation.link_config import LinkConfig
from fedstill.models.backbones import Features
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, Method, method_name
from fedstill.protocol.recalibration import Recalibration
from fedstill.runs import presets
from fedstill.tasks import TASKS, TaskConfig
from fedstill.tasks.classification import ClassificationConfig

Name = Annotated[str, MinLen(1), "the name of a model"]


# Options that may change when a run is resumed: they do not affect its metrics, except for the rules on nodes
# that fail.
RESUMABLE_OPTIONS = (
    r"name|plugins|track\b.*|(data|public)\.(root|path)|link\.(wait|quorum|outlier)"
    r"|features\.(weights|batch|cache|cache_gib)"
    r"|engine\.(backend|batching|device|threads|cuda_graphs|watch_random|channels_last|startup_kit|ray\..*)"
)


@dataclass(frozen=True)
class NodesConfig(CheckedOptions):
    """Options of the nodes: models, local training, policy, privacy."""

    section: ClassVar[str] = "nodes"

    models: Annotated[tuple[Name, ...], MinLen(1), "a list of one model or more"] = ("small-cnn",)
    """The nodes' models, assigned cyclically: with two names, the third node has the first again.
    "resnet8:16" is a ResNet-8 of width 16; "package.module:factory" is a custom one. A .skops or .onnx file,
    or an address of this machine, is a trained model that can only predict; a .toml file has the keys of a
    node's [model]. "unet:timm:NAME" is a U-Net with a pretrained encoder."""

    encoder_weights: str = ""
    """A .safetensors file with the pretrained weights of the encoders of these models, except for those of
    .toml files, which name their own. Needed for timm and torchvision."""

    local: LocalConfig = field(default_factory=LocalConfig)
    """Local training of a node's model on its own data."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Rules of a node's gate for releases."""

    privacy: PrivacyConfig = field(default_factory=NoPrivacy)
    """Privacy mechanism of a node and its budget."""

    perceptual: str = ""
    """A backbone (timm:NAME, torchvision:NAME or package.module:factory), or a safetensors file of VGG-16 or
    VGG-19 weights with torchvision's names, at every node, for perceptual losses. Without it these losses are
    off."""

    perceptual_weights: str = ""
    """A .safetensors file with the weights of the backbone in nodes.perceptual."""


@dataclass(frozen=True)
class StudentConfig(CheckedOptions):
    """Options of the student, the global model that is trained from the nodes' responses."""

    section: ClassVar[str] = "student"

    model: Name = "small-cnn"
    """The student's network, a name as in nodes.models."""

    encoder_weights: str = ""
    """A .safetensors file with the pretrained weights of the student's encoder. Needed for timm and
    torchvision. The student's own file has all weights, and does not need this one."""

    recalibrate: bool = False
    """After the last step, give the student's batch norm the running statistics of the nodes' data: each node
    releases sums ("batch-norm statistics"), in one query for each layer."""

    recalibrate_clip: PositiveFloat = 2.0
    """Largest root mean square of one example's statistics of a layer, in units of its running statistics;
    longer vectors are scaled down. Noise of a privacy mechanism grows with it."""

    @property
    def declared_recalibration(self) -> Recalibration | None:
        """Recalibration of a student that is not built, for declarations of queries; None: none."""
        return Recalibration() if self.recalibrate else None


@dataclass(frozen=True)
class EvaluationConfig(CheckedOptions):
    """Options of evaluation on the test set."""

    section: ClassVar[str] = "evaluation"

    every: NonNegativeInt | None = None
    """Steps or rounds between two evaluations; 0: only at the end, none: ten evaluations per run."""

    centralized: bool = True
    """Also train one model on the pooled data of all nodes, the centralized upper bound."""

    samples: NonNegativeInt = 12
    """Number of generated inputs that are saved at each evaluation, for the report."""

    best: bool = False
    """Also report the best evaluation. That is selection on the test data, as in some published results; the
    run's own metrics are those of its end."""


@dataclass(frozen=True, kw_only=True)
class PaperMetric(CheckedOptions):
    """A published metric, to print next to the measured one."""

    section: ClassVar[str] = "paper"

    method: str
    """The method, or its name in a comparison."""

    metric: str = "accuracy"
    """Key of a metric of the task, as "dice" or "hd95", of the global model on all test data. With the prefix
    "local ": of the nodes' own models (the main metric: on their shares of the test data)."""

    value: float
    """Value in the metric's unit, percent by default."""

    std: float | None = None
    """Its published standard deviation, if there is one."""

    source: Annotated[str, MinLen(1), "the paper with its table or page"]
    """Source: paper, table, page."""

    setting: str = ""
    """The setting of a comparison that it belongs to; empty: every setting."""


def check_paper_metrics(results: Iterable[PaperMetric], tasks: Iterable[TaskConfig]) -> None:
    """Check the names and values of published metrics.

    Args:
        tasks: custom tasks, in addition to the registered ones.

    Raises:
        UnknownName: no task has such a metric.
        ArgumentError: a value is out of range.
    """
    results = list(results)
    kinds = [task.task_class for task in (*(TASKS.importable_objects().values() if results else ()), *tasks)]
    known = {metric.key: metric for kind in kinds for metric in kind.metrics}
    for paper in results:
        key = paper.metric.removeprefix("local ")
        if key not in known:
            raise UnknownName("published metric", paper.metric, known)
        most = 100 if known[key].unit == "%" else math.inf
        allowed = "from 0 to 100, in percent" if most == 100 else "a number from 0 up"
        if not 0 <= paper.value <= most or math.isinf(paper.value):
            raise ArgumentError("paper.value", paper.value, allowed)
        if paper.std is not None and (not 0 <= paper.std <= most or math.isinf(paper.std)):
            raise ArgumentError("paper.std", paper.std, f"{allowed}, or none")


@dataclass(frozen=True, kw_only=True)
class RunSpec(CheckedOptions):
    """Specification of a run: all its options.

    TOML files, the command line and :func:`fedstill.distil` all make one, and a run is built from it
    (:mod:`fedstill.runs.build`). Remote nodes get to know a part of it
    (:func:`fedstill.runs.remote_run.make_run_plan`) and never its options of nodes: these are their owners'.
    """

    name: str = "custom"
    """Name of the run, a part of its folder's name."""

    seed: NonNegativeInt = 0
    """Seed of all random draws of the run."""

    task: TaskConfig = field(default_factory=ClassificationConfig)
    """The task."""

    data: DataConfig = field(default_factory=Digits)
    """The data set; in TOML its key `name` says which: one that has a name, or a path."""

    split: SplitConfig = field(default_factory=Dirichlet)
    """How the training data are split over the nodes; in TOML its key `name` says which split."""

    public: PublicConfig = field(default_factory=PublicConfig)
    """Public data, for methods that need some."""

    features: Features = field(default_factory=Features)
    """Pretrained backbone, whose features the models take in place of images or texts."""

    nodes: NodesConfig = field(default_factory=NodesConfig)
    """Options of the nodes."""

    method: Method
    """The method; in TOML its key `name` says which one."""

    student: StudentConfig = field(default_factory=StudentConfig)
    """Options of the student."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Device, precision, and how the nodes' models are computed."""

    link: LinkConfig = field(default_factory=LinkConfig)
    """Communication with the nodes: wire formats, timeout, quorum, secure aggregation."""

    adversary: Adversary = field(default_factory=NoAdversary)
    """Malicious nodes of a simulation; in TOML its key `name` says what they do."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Options of evaluation."""

    track: tuple[str, ...] = ()
    """Trackers of the run's metrics: tensorboard, mlflow, wandb, or `module:Name`. They write into the run's
    folder; remote nodes do not know of them."""

    paper: tuple[PaperMetric, ...] = ()
    """Published metrics of this setting, which `fedstill compare` prints next to the measured ones."""

    plugins: tuple[str, ...] = ()
    """Folders that are searched for custom modules, in addition to the current one and installed modules. A
    file that names modules in its own folder lists that folder here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ArgumentError("name", self.name, "letters, digits, '.', '_' and '-', as it names a folder")
        if self.public.name == GAUSSIAN and not self.features:
            expected = "another source, as normally distributed inputs need features (features.backbone)"
            raise ArgumentError("public.name", GAUSSIAN, expected)
        check_registered_names(self.method, "method")
        check_paper_metrics(self.paper, [self.task])


def load(target: str) -> RunSpec:
    """Load the configuration of a preset or a ``.toml`` file.

    Raises:
        FedstillError: there is no such preset or file, or it does not describe a run.
    """
    known = target.endswith(".toml") or any(f"-{name}".endswith(f"-{target}") for name in presets.names())
    if target in METHODS and not known:  # otherwise presets of this method would be suggested
        typed, given = f"`demo --method.name {target}`", f'"demo" with {{"method.name": {target!r}}}'
        raise UnknownName("preset", target, presets.names(), suggestion=by_caller(typed, given, given))
    return from_dict(presets.read(target, RunSpec))


def load_toml(path: str | Path) -> RunSpec:
    """Load the configuration of a TOML file.

    Raises:
        FedstillError: there is no such file, it is not TOML or does not describe a run.
    """
    return from_dict(presets.read_file(Path(path), RunSpec))


def read_toml(text: str) -> RunSpec:
    """Parse a configuration from TOML text.

    Raises:
        FedstillError: the text is not TOML or does not describe a run.
    """
    return from_dict(presets.parse(text, kind=RunSpec))


def to_toml(spec: RunSpec) -> str:
    """Return a complete configuration as TOML; :func:`read_toml` returns an equal configuration."""
    return tomli_w.dumps(to_dict(spec))


def from_dict(table: Mapping[str, Any]) -> RunSpec:
    """Build a configuration from a table; missing keys have their defaults.

    Raises:
        UnknownName: a key or a method that does not exist.
        ArgumentError: a value of the wrong type or outside what is allowed.
    """
    add_search_folders(read_value(tuple[str, ...], table.get("plugins", ()), "plugins"))
    return read_table(RunSpec, {"method": {}, **table})


def fingerprint_options(spec: RunSpec) -> dict[str, str]:
    """Return the options that a resumed run must keep, as texts by dotted name.

    These are all except ``RESUMABLE_OPTIONS``: paths of data, computing, trackers, and the rules on nodes
    that fail. Without a backbone, options of features have no effect.
    """
    options = flatten(to_dict(spec))
    if not spec.features:
        options = {name: value for name, value in options.items() if not name.startswith("features.")}
    return {name: str(value) for name, value in options.items() if not re.fullmatch(RESUMABLE_OPTIONS, name)}


def to_dict(spec: RunSpec) -> dict[str, Any]:
    """Return a configuration as a table of TOML values; :func:`from_dict` returns an equal configuration.

    Raises:
        ArgumentError: its method is invalid.
    """
    method_name(spec.method)
    table: dict[str, Any] = to_table(spec)
    return table
