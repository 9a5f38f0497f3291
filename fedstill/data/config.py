"""DataConfig, the base class of all data sets, and DATA, the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast, get_args

from annotated_types import Ge, Interval, MultipleOf

from fedstill.core.config_tables import read_table
from fedstill.core.dataset import DataSet
from fedstill.core.errors import ArgumentError
from fedstill.core.options import NonNegativeInt
from fedstill.core.registry import Registrable, Registry
from fedstill.tasks import Targets, TaskConfig

Limit = Annotated[int, Ge(0), "0 (all) or an integer from 1 up"]
Side = Annotated[int, Ge(0), MultipleOf(4), "0, or a multiple of 4"]  # of images, as networks halve it twice
MEAN = STD = 0.5  # normalization of all channels and data sets: pixels 0..255 become -1..1


@dataclass(frozen=True, kw_only=True)
class DataConfig(Registrable, ABC):
    """Base class of data sets and their options.

    A data set is a frozen dataclass; its fields are its options. Most data sets only return their examples
    and derive from :class:`fedstill.data.loading.ImageArrayData` or a similar class. A name that is not in
    the registry is a path (:class:`fedstill.data.user_data.UserFiles`).

    Attributes:
        targets: kinds of targets that its examples can teach.
        title: name in results; empty: the name by which it was requested.
        note: remark for readers of a result.
    """

    section: ClassVar[str] = "data"
    default: ClassVar[str | None] = "digits"
    same_meaning: ClassVar[bool] = True
    targets: ClassVar[tuple[Targets, ...]]
    title: ClassVar[str] = ""
    note: ClassVar[str] = ""

    root: str = ""
    """Folder of the data files. If empty: ./data, then the folders listed (as in PATH) by the environment
    variable FEDSTILL_DATA.
    """

    train_limit: Limit = 0
    """Use at most this many training examples, sampled so that classes keep their shares; 0: all. Of data
    with patients, whole patients with at most so many examples.
    """

    test_fraction: Annotated[float, Interval(gt=0, lt=1), "a number between 0 and 1"] = 0.2
    """Share of the examples used for testing if the source has no split; of data with patients, the share of
    each site's patients.
    """

    validation: Annotated[float, Interval(ge=0, lt=1), "0 (none), or a number between 0 and 1"] = 0.0
    """To choose hyperparameters: evaluate on this share of the training examples (of each site's patients or
    slides, if there are any) instead of the test examples, which the run then does not use.
    """

    seed: NonNegativeInt = 0
    """Seed of that split and of sampling for train_limit."""

    @staticmethod
    def validate_class(kind: Any) -> str | None:
        """Return why a class cannot be registered: its name or its kinds of targets; None if it can."""
        if problem := Registrable.validate_class(kind):
            return problem
        if kind.targets and set(kind.targets) <= set(get_args(Targets)):
            return None
        return f"one with targets, a tuple of some of {', '.join(get_args(Targets))}"

    @abstractmethod
    def read(self, task: TaskConfig) -> DataSet:
        """Return the data set: decoded, normalized, and divided into training and test parts.

        Args:
            task: a task that the data support.

        Raises:
            ArgumentError: an option has no effect on these data, or an unknown value.
            DataError: no data were found (the message says where it looked), or they cannot be used.
        """


DATA: Registry[type[DataConfig]] = Registry(
    "data set",
    {
        "digits": "fedstill.data.builtin:Digits",
        "mnist": "fedstill.data.builtin:MNIST",
        "fashion-mnist": "fedstill.data.builtin:FashionMNIST",
        "cifar10": "fedstill.data.builtin:CIFAR10",
        "cifar100": "fedstill.data.builtin:CIFAR100",
        "breast-cancer": "fedstill.data.builtin:BreastCancer",
        "wine": "fedstill.data.builtin:Wine",
        "diabetes": "fedstill.data.builtin:Diabetes",
    },
    base=DataConfig,
    fallback=("a path", "fedstill.data.user_data:UserFiles"),
)

DataConfig.registry = DATA


def make_data_config(name: str, **options: Any) -> DataConfig:
    """Return the configuration of a data set, by name or path.

    Args:
        name: name in the registry, ``package.module:Class``, or a path.
        options: options of the data set.

    Raises:
        ArgumentError: the name cannot be imported, or the data set has no such option.

    >>> make_data_config("digits", train_limit=100)
    Digits(root='', train_limit=100, test_fraction=0.2, validation=0.0, seed=0)
    """
    base: Any = DataConfig
    return cast(DataConfig, read_table(base, {"name": name, **options}, "data."))


def check_supports_task(config: DataConfig, task: TaskConfig) -> None:
    """Check that a data set supports a task.

    Raises:
        ArgumentError: it does not; the message lists data sets that do.

    >>> from fedstill.tasks.segmentation import SegmentationConfig
    >>> check_supports_task(make_data_config("digits"), SegmentationConfig())
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid data.name = 'digits' (expected a path for task segmentation)
    """
    if task.targets not in config.targets:
        supporting = [
            name for name, kind in DATA.importable_objects().items() if task.targets in kind.targets
        ]
        known = f"{', '.join(supporting)} or a path" if supporting else "a path"
        raise ArgumentError("data.name", config.registered_name, f"{known} for task {task.registered_name}")


def check_no_validation(config: DataConfig) -> None:
    """Check that ``data.validation`` is 0, where nodes bring their own data.

    A server cannot hold out data of such nodes.

    Raises:
        ArgumentError: ``data.validation`` is not 0.
    """
    if config.validation:
        expected = "0, as nodes with their own data hold out none for a server"
        raise ArgumentError("data.validation", config.validation, expected)
