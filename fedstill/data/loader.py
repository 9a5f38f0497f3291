"""From a configuration to a data set, checked for its task."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedstill.core.dataset import DataSet
from fedstill.data.config import DataConfig, check_serves
from fedstill.tasks import TaskConfig
from fedstill.tasks.classification import ClassificationConfig

CLASSIFICATION = ClassificationConfig()

Asked = tuple[DataConfig, TaskConfig, bool]
KEPT = 2  # a run's own data, and those that are public
_last: ContextVar[deque[tuple[Asked, DataSet]] | None] = ContextVar("last", default=None)


@contextmanager
def read_once() -> Iterator[None]:
    """What is loaded within is read once for all that ask for the same: the two data sets loaded last stay.

    The runs of a comparison meet the same data; to decode 120,000 images for each of them takes long.
    """
    token = _last.set(deque(maxlen=KEPT))
    try:
        yield
    finally:
        _last.reset(token)


def load(config: DataConfig, task: TaskConfig = CLASSIFICATION, *, train_needed: bool = True) -> DataSet:
    """Load a data set, decoded and normalised, with its test part apart.

    Args:
        config: which, and how much of it.
        task: what the data are for, which says what their targets are.
        train_needed: refuse data without a training part; a server needs none, as its nodes have theirs.

    Returns:
        Inputs (N, C, H, W) float32 in [-1, 1], or token ids (N, L) int64, and the task's targets.

    Raises:
        ArgumentError: data that serve other tasks, a name that is unknown, an option that does nothing here.
        DataError: nothing found (what was looked for, and where), or data that cannot be used.

    >>> from fedstill.data.config import named
    >>> data = load(named("digits", train_limit=100))
    >>> data.train.inputs.shape, len(data.test), len(data.classes)
    (torch.Size([100, 1, 8, 8]), 359, 10)
    """
    asked, last = (config, task, train_needed), _last.get()
    for before, data in last or ():
        if before == asked:
            return data
    data = _read(config, task, train_needed)
    if last is not None:
        last.append((asked, data))
    return data


def _read(config: DataConfig, task: TaskConfig, train_needed: bool) -> DataSet:
    check_serves(config, task)
    data = config.read(task)
    made = task.make(data.classes)
    if train_needed or len(data.train):
        made.check(data.train, f"train part of {data.name}")
    made.check(data.test, f"test part of {data.name}")
    return data
