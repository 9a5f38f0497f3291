"""DataConfig, the base of all data sets, and DATA, where their names are looked up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast, get_args

from annotated_types import Ge, Interval, MultipleOf

from fedstill.core.config_tables import read_table
from fedstill.core.dataset import DataSet
from fedstill.core.errors import ArgumentError
from fedstill.core.options import NonNegativeInt
from fedstill.core.registry import Registered, Registry
from fedstill.tasks import Targets, TaskConfig

Limit = Annotated[int, Ge(0), "0 (all) or a whole number from 1 up"]
Side = Annotated[int, Ge(0), MultipleOf(4), "0, or a multiple of 4"]  # of images: others do not fit networks
MEAN = STD = 0.5  # for every channel and every data set: pixels 0..255 become -1..1


@dataclass(frozen=True, kw_only=True)
class DataConfig(Registered, ABC):
    """A data set, all of it: which it is, how much of it, and how it is read.

    Each is a frozen dataclass; its fields are its options. Most need only say what they hold:
    :class:`fedstill.data.loading.ArrayData` does the rest. What is no name in the registry is a path
    (:class:`fedstill.data.user_data.UserFiles`).

    Attributes:
        targets: what its examples can teach.
        title: what results call it; empty: the name by which it is asked for.
        note: what a reader of a figure must know of it.
    """

    under: ClassVar[str] = "data"
    default: ClassVar[str | None] = "digits"
    alike: ClassVar[bool] = True
    targets: ClassVar[tuple[Targets, ...]]
    title: ClassVar[str] = ""
    note: ClassVar[str] = ""

    root: str = ""
    """The folder that holds the data files; without it ./data, then the folders that the
    environment variable FEDSTILL_DATA lists, as PATH does."""

    train_limit: Limit = 0
    """Use only so many training examples, drawn with the classes' shares kept; 0 is all. Of data with
    patients, whole patients with at most so many examples."""

    test_fraction: Annotated[float, Interval(gt=0, lt=1), "a number between 0 and 1"] = 0.2
    """The part of the examples kept for testing, where the source has no split of its own; of data with
    patients, the part of each site's patients."""

    validation: Annotated[float, Interval(ge=0, lt=1), "0 (none), or a number between 0 and 1"] = 0.0
    """To choose options by: measure on this part of the training examples (of each site's patients or
    pictures, where there are such) instead of on the test examples, which the run then does not use."""

    seed: NonNegativeInt = 0
    """Seed of that split and of the draw for train_limit."""

    @staticmethod
    def lacks(kind: Any) -> str | None:
        """As of all that have a name; and what it can teach must be something that is known."""
        if missing := Registered.lacks(kind):
            return missing
        if kind.targets and set(kind.targets) <= set(get_args(Targets)):
            return None
        return f"one with targets, a tuple of some of {', '.join(get_args(Targets))}"

    @abstractmethod
    def read(self, task: TaskConfig) -> DataSet:
        """The data set, decoded and normalized, with its test part apart, as a task needs it.

        Args:
            task: one that it serves.

        Raises:
            ArgumentError: an option that cannot be followed.
            DataError: nothing found (what was looked for, and where), or data that cannot be used.
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
    others=("a path", "fedstill.data.user_data:UserFiles"),
)

DataConfig.registry = DATA


def make_data_config(name: str, **options: Any) -> DataConfig:
    """The data set of a name or path, with its options.

    Raises:
        ArgumentError: a name that cannot be imported, or an option that the data do not have.

    >>> make_data_config("digits", train_limit=100)
    Digits(root='', train_limit=100, test_fraction=0.2, validation=0.0, seed=0)
    """
    base: Any = DataConfig
    return cast(DataConfig, read_table(base, {"name": name, **options}, "data."))


def check_supports_task(config: DataConfig, task: TaskConfig) -> None:
    """Refuse a data set that does not serve a task.

    Raises:
        ArgumentError: naming those that do.

    >>> from fedstill.tasks.segmentation import SegmentationConfig
    >>> check_supports_task(make_data_config("digits"), SegmentationConfig())
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid data.name = 'digits' (expected a path for task segmentation)
    """
    if task.targets not in config.targets:
        serving = [name for name, kind in DATA.working().items() if task.targets in kind.targets]
        known = f"{', '.join(serving)} or a path" if serving else "a path"
        raise ArgumentError("data.name", config.called, f"{known} for task {task.called}")


def check_no_validation(config: DataConfig) -> None:
    """Refuse validation data where nodes bring data of their own, which no server can set aside.

    Raises:
        ArgumentError: ``data.validation`` is not 0.
    """
    if config.validation:
        allowed = "0, as nodes that hold data of their own set nothing aside for a server"
        raise ArgumentError("data.validation", config.validation, allowed)
