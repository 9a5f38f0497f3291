"""Data sets, and how they are divided over nodes.

``config`` has the base of all data sets, and their names; ``arrays`` the base of those that are arrays, as
one's own mostly are (docs/own-data.md). ``vision``, ``medical``, ``nuclei`` and ``text`` have the package's
own, ``files`` reads paths, ``private`` what a node's owner has. ``splits`` are the ways of dividing and
``dividing`` is what they share, ``public`` sets public data aside.

May import models, tasks and core. A newcomer adds a reader or a split: a class in a file here, or anywhere.

>>> import numpy
>>> data = load(Digits())
>>> parts = split(data.train.targets, len(data.classes), Dirichlet(nodes=3), numpy.random.default_rng(0))
>>> sum(len(part) for part in parts) == len(data.train)
True
"""

from __future__ import annotations

from fedstill.core.dataset import DataSet, TensorData, check_classification, check_labels
from fedstill.data.arrays import ArrayData
from fedstill.data.config import DATA, DataConfig, named
from fedstill.data.dividing import Items, SplitConfig, split
from fedstill.data.files import Files
from fedstill.data.loaders import load
from fedstill.data.located import find_file
from fedstill.data.nuclei import PictureData
from fedstill.data.splits import IID, ByColumn, Dirichlet, Positives, Shards, Sorted
from fedstill.data.text import TextData
from fedstill.data.units import stratified
from fedstill.data.vision import Digits
from fedstill.tasks import Targets

__all__ = [
    "DATA",
    "IID",
    "ArrayData",
    "ByColumn",
    "DataConfig",
    "DataSet",
    "Digits",
    "Dirichlet",
    "Files",
    "Items",
    "PictureData",
    "Positives",
    "Shards",
    "Sorted",
    "SplitConfig",
    "Targets",
    "TensorData",
    "TextData",
    "check_classification",
    "check_labels",
    "find_file",
    "load",
    "named",
    "split",
    "stratified",
]
