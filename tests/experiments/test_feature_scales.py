"""Comparisons on frozen features: all their runs are built, on zeros in place of a backbone's features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedstill.compare.comparison import (
    SMALL_SCALE,
    ComparisonRun,
    at_scale,
    is_file_listing_methods,
    read_comparison,
)
from fedstill.compare.reproduction import reproductions
from fedstill.core.config_tables import parse_toml
from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ModelError
from fedstill.data.public import GAUSSIAN, HELD_OUT, NONE, PublicData
from fedstill.models.backbones import Features, FeatureScale, RawInputs, load_backbone
from fedstill.runs import presets
from fedstill.runs.build import LoadedData, build_setting
from fedstill.runs.feature_space import FeatureSpace
from fedstill.runs.simulation import Simulation
from fedstill.runs.spec import RunSpec
from tests.support.packs import PRESETS

WIDTH = 4  # features
SIZES = {  # training examples and classes
    "packs.cifar:CIFAR10": (50_000, 10),
    "packs.cifar:CIFAR100": (50_000, 100),
    "packs.texts:SST2": (7_792, 2),
    "packs.texts:AGNews": (120_000, 4),
}


def scales_on_features() -> Iterator[tuple[Path, str]]:
    """Yield files and scales whose base names a backbone."""
    for file in sorted(PRESETS.parent.glob("*.toml")):
        table = parse_toml(file.read_text())
        for scale in (SMALL_SCALE, *table.get("scale", {})):
            base = presets.filled(at_scale(table, scale).get("base", {}), RunSpec, file.parent)
            if is_file_listing_methods(str(file)) and base.get("features", {}).get("backbone"):
                yield file, scale


ON_FEATURES = list(scales_on_features())


def placeholder_data(config: RunSpec) -> LoadedData:
    """Data of a run with zeros as features: three of its nodes, with equally many examples."""
    count, classes = SIZES[config.data.registered_name]
    held_out = round(count * config.public.share) if config.public.name == HELD_OUT else 0
    each = (count - held_out) // config.split.nodes
    part = TensorData(torch.zeros(each, WIDTH), torch.arange(each) % classes)
    data = DataSet(config.data.registered_name, part, part, tuple(map(str, range(classes))), (), ())
    rows = held_out or config.public.limit or (8000 if config.public.name == GAUSSIAN else 50_000)
    public = None if config.public.name == NONE else PublicData("public", torch.zeros(rows, WIDTH))
    backbone = load_backbone(Features("random-conv:1"), RawInputs((1, 8, 8)))  # stands for that of the run
    space = FeatureSpace(config.features, backbone, FeatureScale(), "", "")
    return LoadedData(data, [part] * 3, public, space)


def build(config: RunSpec) -> Simulation:
    return Simulation(build_setting(config, placeholder_data(config)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("file", "scale"), ON_FEATURES, ids=lambda value: getattr(value, "stem", value))
def test_every_run_on_features_can_be_built(file: Path, scale: str) -> None:
    """Heads suit the methods, nodes allow their queries, and a budget allows what leaves them."""
    comparison, built = read_comparison(file, scale=scale), list[RunSpec]()
    for setting in comparison.settings:
        for label in comparison.methods:
            config = comparison.run_config(ComparisonRun(setting, label, 0))
            if (alike := with_one_budget(config)) not in built:
                build(config)
                built.append(alike)


def with_one_budget(config: RunSpec) -> RunSpec:
    """The same run with epsilon 1 in place of another budget: noise takes seconds to calibrate."""
    privacy = config.nodes.privacy
    if math.isinf(privacy.epsilon):
        return config
    return replace(config, nodes=replace(config.nodes, privacy=replace(privacy, epsilon=1.0)))


def test_method_that_heads_do_not_suit_is_refused() -> None:
    file = PRESETS.parent / "fediod_table1.toml"
    comparison = read_comparison(
        file, scale="features", changes={"nodes.models": ("linear",), "student.model": "linear"}
    )
    setting = next(iter(comparison.settings))
    build(comparison.run_config(ComparisonRun(setting, "fedavg", 0)))
    with pytest.raises(ModelError):
        build(comparison.run_config(ComparisonRun(setting, "fedgen", 0)))


def test_scales_on_features_of_papers_have_remarks_for_their_pages() -> None:
    entries = {entry.file.name: entry for entry in reproductions()}
    shown = [(entries[file.name], scale) for file, scale in ON_FEATURES if file.name in entries]
    assert len(shown) >= 7
    for entry, scale in shown:
        assert entry.notes(scale) is not None
