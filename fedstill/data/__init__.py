"""Data sets, and how they are divided over nodes.

A data set is one class below ``config.DataConfig``. ``builtin`` has those of the package. Custom ones derive
from ``loading.ImageArrayData``, ``instance_images.InstanceImageData``, ``text_data.TextData`` or
``table_data.TableData`` (docs/custom-data.md). ``user_data`` reads paths, ``in_memory_data`` objects of
Python and Hugging Face.

Each file format has a reader (``table_files``, ``image_folders``, ``nifti``, ``images`` for single files),
which ``user_data`` selects. All end as ``raw_images.RawImages``, texts as ``text_data.LabeledTexts`` and
tables as ``table_data.EncodedRows``; ``loading`` makes the data set and checks it for its task.
``partitioners`` divide it over nodes, ``stratified_sampling`` samples shares, ``augmentation`` transforms
images, and ``public`` selects public data. ``node_data`` loads the data of a node's owner into the
``data_spec`` that a server declares, and ``new_data`` those of a trained student.

May import models, tasks and core. A new reader or split is a class in a file here, or in another package.

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
from fedstill.data.instance_images import InstanceImageData
from fedstill.data.loading import ImageArrayData, load
from fedstill.data.partitioners import (
    IID,
    ByColumn,
    Dirichlet,
    Positives,
    Shards,
    SortedByColumn,
    SplitConfig,
    SplitItems,
    split,
)
from fedstill.data.stratified_sampling import stratified_sample
from fedstill.data.table_data import TableData
from fedstill.data.text_data import TextData
from fedstill.data.user_data import UserFiles, find_file
from fedstill.tasks import Targets

__all__ = [
    "DATA",
    "IID",
    "ByColumn",
    "DataConfig",
    "DataSet",
    "Digits",
    "Dirichlet",
    "ImageArrayData",
    "InstanceImageData",
    "Positives",
    "Shards",
    "SortedByColumn",
    "SplitConfig",
    "SplitItems",
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
