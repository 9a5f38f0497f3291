"""Paths of the experiments' presets and packs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.dataset import DataSet
from fedstill.core.registry import add_search_folders
from fedstill.data import load, make_data_config
from fedstill.tasks import TaskConfig

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "experiments" / "presets"
DATA = Path(os.environ.get("FEDSTILL_DATA") or ROOT.parent / "shared" / "data")
add_search_folders([str(PRESETS)])


def pack(name: str, file: str, task: TaskConfig, **options: Any) -> DataSet:
    """Return a pack's data, or skip the test if its file is missing."""
    if not (DATA / file).is_file():
        pytest.skip(f"{file} is not here")
    return load(make_data_config(f"packs.{name}", root=str(DATA), **options), task)
