"""Data sets, and how they are divided over nodes.

A data set is one class below ``config.DataConfig``: ``vision`` has the package's own, ``arrays``,
``pictures`` and ``text`` the bases of one's own (docs/own-data.md), ``files`` reads paths, ``private`` what a
node's owner has. Forms of files have a reader each (``tables``, ``folders``, ``nifti``), which ``files``
chooses, and all end as ``raw``; ``preparation`` makes the data set. ``splits`` divide it, ``dividing`` is
what they share, ``public`` sets public data aside.

May import models, tasks and core. A newcomer adds a reader or a split: a class in a file here, or anywhere.

>>> import numpy
>>> data = load(Digits())
>>> parts = split(data.train.targets, len(data.classes), Dirichlet(nodes=3), numpy.random.default_rng(0))
>>> sum(len(part) for part in parts) == len(data.train)
True
"""

from __future__ import annotations

from fedstill.core.dataset import DataSet, TensorData
from fedstill.data.array_data import ArrayData
from fedstill.data.config import DATA, DataConfig, named
from fedstill.data.instance_images import PictureData
from fedstill.data.loader import load
from fedstill.data.split_base import Items, SplitConfig, split
from fedstill.data.splits import IID, ByColumn, Dirichlet, Positives, Shards, Sorted
from fedstill.data.stratified_sampling import stratified
from fedstill.data.text_data import TextData
from fedstill.data.user_data import Files, find_file
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
    "find_file",
    "load",
    "named",
    "split",
    "stratified",
]
