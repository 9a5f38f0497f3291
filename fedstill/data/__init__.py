"""Data sets, and how they are divided over nodes.

``config`` says which data; ``loaders`` is the way from a name or a path to a data set,
``private`` that of a node's owner. ``splits`` are the ways of dividing and
``dividing`` is what they share, ``public`` sets public data aside.

May import models, tasks and core. A newcomer adds a reader: a file here, and a name in ``config``; a
split: a class in ``splits``, and a line in ``SPLITS``.

>>> import numpy
>>> data = load(DataConfig(name="digits"))
>>> parts = split(data.train.targets, len(data.classes), Dirichlet(nodes=3), numpy.random.default_rng(0))
>>> sum(len(part) for part in parts) == len(data.train)
True
"""

from __future__ import annotations

from fedstill.core.dataset import DataSet, TensorData, check_classification, check_labels
from fedstill.data.dividing import Items, SplitConfig, split
from fedstill.data.loaders import DataConfig, available, load
from fedstill.data.splits import IID, ByColumn, Dirichlet, Positives, Shards, Sorted
from fedstill.data.units import stratified

__all__ = [
    "IID",
    "ByColumn",
    "DataConfig",
    "DataSet",
    "Dirichlet",
    "Items",
    "Positives",
    "Shards",
    "Sorted",
    "SplitConfig",
    "TensorData",
    "available",
    "check_classification",
    "check_labels",
    "load",
    "split",
    "stratified",
]
