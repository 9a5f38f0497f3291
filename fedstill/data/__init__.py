"""Data sets, and how they are divided over nodes.

``config`` says which data and which division; ``loaders`` is the way from a name or a path to a data set,
``private`` that of a node's owner. ``splits`` and ``draws`` divide, ``public`` sets public data aside.

May import models, tasks and core. A newcomer adds a reader: a file here, and a name in ``config``.

>>> import numpy
>>> data = load(DataConfig(name="digits"))
>>> parts = split(data.train.targets, len(data.classes), SplitConfig(nodes=3), numpy.random.default_rng(0))
>>> sum(len(part) for part in parts) == len(data.train)
True
"""

from __future__ import annotations

from fedstill.core.dataset import DataSet, TensorData, check_classification, check_labels
from fedstill.data.config import SplitConfig
from fedstill.data.loaders import DataConfig, available, load
from fedstill.data.splits import split, stratified

__all__ = [
    "DataConfig",
    "DataSet",
    "SplitConfig",
    "TensorData",
    "available",
    "check_classification",
    "check_labels",
    "load",
    "split",
    "stratified",
]
