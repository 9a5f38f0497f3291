"""Which data: names, options, and which options which data have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from fedstill.core.errors import ArgumentError
from fedstill.tasks import TaskConfig

MEAN = STD = 0.5  # for every channel and every data set: pixels 0..255 become -1..1

# By name: the tasks that a data set serves, and with them all that are like these. A path serves all.
TASKS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "digits": ("classification",),
        "mnist": ("classification",),
        "fashion-mnist": ("classification",),
        "cifar10": ("classification",),
        "cifar100": ("classification",),
        "brain-mri": ("segmentation", "reconstruction"),
        "monuseg": ("instances",),
        "dsb2018": ("instances",),
        "nuclei": ("instances",),
        "chest-xray": ("multi-label",),
        "sst2": ("text",),
        "ag-news": ("text",),
    }
)

# Which data have an option that not all have: names, and for paths the task.
_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "size": ("brain-mri", "chest-xray", "segmentation", "reconstruction", "multi-label"),
        "channels": ("brain-mri", "segmentation", "reconstruction"),
        "sites": (
            *("brain-mri", "monuseg", "dsb2018", "nuclei"),
            *("segmentation", "reconstruction", "instances", "multi-label"),
        ),
        "slices": ("segmentation", "reconstruction"),
        "patch": ("monuseg", "dsb2018", "nuclei", "instances"),
        "scale": ("monuseg", "dsb2018", "nuclei", "instances"),
        "length": ("sst2", "ag-news", "text"),
        "words": ("sst2", "ag-news", "text"),
        "vocabulary": ("sst2", "ag-news", "text"),
    }
)


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how much of it."""

    name: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100 (classification); brain-mri (segmentation,
    reconstruction); monuseg, dsb2018, nuclei (instances); chest-xray (multi-label); sst2, ag-news (text); or
    a path, to an .npz with images and labels or masks, a folder of images by class, of images and masks, or
    of NIfTI volumes, or a csv of findings or texts."""

    root: str = ""
    """The folder that holds the data files; without it ./data, then the folder that the
    environment variable FEDSTILL_DATA names."""

    download: bool = False
    """Let torchvision (the extra "vision") download what is not there."""

    train_limit: int = 0
    """Use only so many training examples, drawn with the classes' shares kept; 0 is all. Of data with
    patients, whole patients with at most so many examples."""

    test_fraction: float = 0.2
    """The part of the examples kept for testing, where the source has no split of its own; of data with
    patients, the part of each site's patients."""

    validation: float = 0.0
    """To choose options by: measure on this part of the training examples (of each site's patients or
    pictures, where there are such) instead of on the test examples, which the run then does not use."""

    seed: int = 0
    """Seed of that split and of the draw for train_limit."""

    size: int = 0
    """brain-mri, chest-xray and data of one's own but nuclei: height and width that images are averaged down
    to, masks by majority; 0: as they are."""

    channels: tuple[int, ...] = ()
    """brain-mri (0 pre-contrast, 1 FLAIR, 2 post-contrast), images and volumes of one's own: which channels;
    empty: all, and for reconstruction FLAIR or the first."""

    sites: tuple[str, ...] = ()
    """Use only these sites: institutions (brain-mri), organs (monuseg), kinds of images (dsb2018), sources
    (nuclei), or what one's own data name; empty: brain-mri those with two patients or more, monuseg the
    organs that are in both parts, dsb2018 the stained tissue, else all."""

    slices: int = 0
    """NIfTI volumes: at most so many axial slices of each, evenly spread; 0: all."""

    patch: int = 0
    """Nuclei: side of the square patches that pictures are cut into; 0: 256."""

    scale: float = 1.0
    """Nuclei: pictures are first averaged down to this part of their height and width; 0.5: 20x from 40x."""

    length: int | None = None
    """Texts: how many tokens of each, cut or filled with padding; none: 64."""

    words: int | None = None
    """Texts: how many ids words are hashed to, or how many of the most frequent public words are known; none:
    16384."""

    vocabulary: str = ""
    """Texts: how words become ids, which never depends on private texts. hash, or empty: by hashing; sst2 or
    ag-news: the most frequent words of those, taken for public; a file of words, one a line; or "hf:" with
    the folder or name of a Hugging Face tokenizer."""


def check_config(config: DataConfig) -> None:
    """Refuse numbers out of range.

    Raises:
        ArgumentError: naming option, value and what is allowed.
    """
    if not config.name:
        raise ArgumentError("data.name", config.name, f"one of {', '.join(TASKS_OF)}, or a path")
    if config.train_limit < 0:
        raise ArgumentError("data.train_limit", config.train_limit, "0 (all) or a whole number from 1 up")
    if not 0 < config.test_fraction < 1:
        raise ArgumentError("data.test_fraction", config.test_fraction, "a number between 0 and 1")
    if not 0 <= config.validation < 1:
        raise ArgumentError("data.validation", config.validation, "0 (none), or a number between 0 and 1")
    if config.slices < 0:
        raise ArgumentError("data.slices", config.slices, "0 (all) or a whole number from 1 up")
    for name in ("size", "patch"):
        value = getattr(config, name)
        if value < 0 or value % 4:
            raise ArgumentError(f"data.{name}", value, "0, or a multiple of 4")
    if not 0 < config.scale <= 1:
        raise ArgumentError("data.scale", config.scale, "above 0 and at most 1")


def available() -> tuple[str, ...]:
    """The data sets that have a name. Only digits comes with the installation.

    >>> available()[:5]
    ('digits', 'mnist', 'fashion-mnist', 'cifar10', 'cifar100')
    """
    return tuple(TASKS_OF)


def tasks_of(name: str) -> tuple[str, ...]:
    """The tasks that a data set with a name serves.

    >>> tasks_of("brain-mri")
    ('segmentation', 'reconstruction')
    """
    return TASKS_OF[name]


def check_options(config: DataConfig, task: TaskConfig) -> None:
    """Refuse a data set that does not serve a task, and options that the data do not have.

    Raises:
        ArgumentError: naming what is allowed.

    >>> from fedstill.tasks.segmentation import SegmentationConfig
    >>> check_options(DataConfig(name="digits"), SegmentationConfig())
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: data.name is 'digits': allowed is brain-mri or a path ...
    """
    if task.like not in TASKS_OF.get(config.name, (task.like,)):
        serving = [name for name, served in TASKS_OF.items() if task.like in served]
        allowed = ", ".join(serving) + " or a path"
        raise ArgumentError("data.name", config.name, f"{allowed} for task {task.called}")
    kind = config.name if config.name in TASKS_OF else task.like
    for field in fields(config):
        value = getattr(config, field.name)
        if kind not in _OPTIONS.get(field.name, (kind,)) and value != field.default:
            shown = list(value) if isinstance(value, tuple) else value
            default = "empty" if field.default in ((), "") else str(field.default).lower()
            told = f"{default}, as data {config.name!r} have no such option for task {task.called}"
            raise ArgumentError(f"data.{field.name}", shown, told)


How = Literal["iid", "dirichlet", "shards", "column", "sorted", "positives"]


@dataclass(frozen=True)
class SplitConfig:
    """How the training examples are divided over the nodes."""

    how: How = "dirichlet"
    """iid: at random, equal sizes. dirichlet: each class in shares drawn from Dirichlet(alpha).
    shards: a few classes per node. column: one node per value of a column. sorted: by a numeric
    column, cut into equal parts. positives, of findings: equal sizes, but the examples with a finding in
    shares drawn from Dirichlet(alpha)."""

    nodes: int = 5
    """Number of nodes; with how = column also 0, as many as the column has values."""

    alpha: float = 0.5
    """dirichlet, positives: small is skewed (each class at few nodes), large is even."""

    classes_per_node: int = 2
    """shards: how many classes a node holds."""

    column: str = ""
    """column, sorted: the name of the column."""

    minimum: int = 10
    """The least number of examples a node holds."""

    findings: int = 0
    """Findings: how many of the labels a node knows; the others are unknown in its data. All nodes together
    know all labels, and neighbours share some; 0: every node knows all."""
