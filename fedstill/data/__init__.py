"""Data sets, and how they are divided over nodes.

A data set is one class below ``config.DataConfig``: ``vision`` and ``builtin_tables`` have the package's own,
``array_data``, ``instance_images``, ``text_data`` and ``table_data`` the bases of one's own
(docs/own-data.md), ``user_data`` reads paths, ``hugging_face`` data sets of that library,
``python_examples`` other objects of Python, and ``pil_images`` images among these. Each form of file
has a reader (``csv_tables``, ``parquet_tables``, ``image_folders``, ``nifti``; ``image_files`` for single
ones), which ``user_data`` chooses, and all end as ``raw``, but for rows of a table, which ``tables`` checks
against their schema, and of which ``row_features`` are what models take;
``preparation`` makes the data set, ``loader`` checks it for its task. ``splits`` divide it over nodes, on
``split_base``; ``stratified_sampling`` draws shares, ``augment`` moves images, ``public`` sets public data
aside.
``node_data`` is what a node's owner has, as ``node_data_config`` says, brought by ``node_readers`` and
``spec_tensors`` into the ``input_spec`` that a server declares.

May import models, tasks and core. A newcomer adds a reader or a split: a class in a file here, or anywhere.

>>> import numpy
>>> data = load(Digits())
>>> parts = split(data.train.targets, len(data.classes), Dirichlet(nodes=3), numpy.random.default_rng(0))
>>> sum(len(part) for part in parts) == len(data.train)
True
"""

from __future__ import annotations

from fedstill.core.dataset import DataSet, TensorData
from fedstill.data.builtin import Digits
from fedstill.data.config import DATA, DataConfig, make_data_config
from fedstill.data.loading import ArrayData, load
from fedstill.data.object_images import InstanceImageData
from fedstill.data.splits import (
    IID,
    ByColumn,
    Dirichlet,
    Positives,
    Shards,
    Sorted,
    SplitConfig,
    SplitItems,
    split,
)
from fedstill.data.stratified_sampling import stratified_sample
from fedstill.data.tables import TableData
from fedstill.data.text import TextData
from fedstill.data.user_data import UserFiles, find_file
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
    "SplitItems",
    "InstanceImageData",
    "Positives",
    "Shards",
    "Sorted",
    "SplitConfig",
    "TableData",
    "Targets",
    "TensorData",
    "TextData",
    "UserFiles",
    "find_file",
    "load",
    "make_data_config",
    "split",
    "stratified_sample",
]
