"""Data of one owner for maps, images, findings and texts, in the spec of a server."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedstill.core.errors import ArgumentError, DataError, MemoryLimitExceeded, UnknownInputFormatError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data import make_data_config
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import load as load_data
from fedstill.data.node_data import NodeDataConfig, load_node_data
from fedstill.data.stratified_sampling import limit_groups
from fedstill.tasks.classification import ClassificationConfig, TabularConfig, TextConfig
from fedstill.tasks.instances import InstancesConfig
from fedstill.tasks.multi_label import MultiLabelConfig
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig
from tests.support.errors import raises_invalid

HALF = (0.5,)
MAPS = DataSpec(SegmentationConfig(), ("background", "tumor"), (1, 8, 8), HALF, HALF)
CLASSES = DataSpec(ClassificationConfig(), ("0", "1"), (1, 8, 8), HALF, HALF)
IMAGES = DataSpec(ReconstructionConfig(), ("image",), (1, 8, 8), HALF, HALF)
FINDINGS = DataSpec(MultiLabelConfig(), ("Mass", "Edema", "Hernia"), (1, 8, 8), HALF, HALF)
NUCLEI = DataSpec(InstancesConfig(), ("background", "inside", "contour"), (3, 8, 8), HALF * 3, HALF * 3)
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 8, 8), dtype=np.uint8)
MASKS = (PIXELS > 200).astype(np.uint8)
NORMALIZED = torch.tensor(PIXELS / 255 * 2 - 1).float()[:, None]


def write_npz(folder: Path, **arrays: Any) -> NodeDataConfig:
    np.savez(folder / "mine.npz", **arrays)
    return NodeDataConfig(path="mine.npz")


def write_pictures(folder: Path, images: Any, masks: Any) -> NodeDataConfig:
    for part, arrays in (("images", images), ("masks", masks)):
        (folder / "mine" / part).mkdir(parents=True)
        for n, array in enumerate(arrays):
            Image.fromarray(array).save(folder / "mine" / part / f"{n}.png")
    return NodeDataConfig(source="folder", path="mine")


def test_npz_and_folder_of_masks_agree(tmp_path: Path) -> None:
    for config in (
        write_npz(tmp_path, images=PIXELS, masks=MASKS),
        write_pictures(tmp_path, PIXELS, MASKS * 255),
    ):
        data, spec = load_node_data(config, tmp_path, MAPS)
        assert torch.allclose(data.inputs, NORMALIZED, atol=1e-6)
        assert torch.equal(data.targets, torch.from_numpy(MASKS).long())
        assert spec == MAPS


def test_test_examples_are_left_out_with_their_groups(tmp_path: Path) -> None:
    config = write_npz(tmp_path, images=PIXELS, masks=MASKS, split=[0, 1, 0, 0, 1, 0], patient=list("aabbcc"))
    data, _ = load_node_data(replace(config, group="patient"), tmp_path, MAPS)
    assert torch.equal(data.targets, torch.from_numpy(MASKS[[0, 2, 3, 5]]).long())
    assert data.groups is not None
    groups = data.groups.tolist()
    assert groups[1] == groups[2]
    assert len(set(groups)) == 3
    with pytest.raises(DataError, match="for testing"):
        load_node_data(write_npz(tmp_path, images=PIXELS, masks=MASKS, split=[1] * 6), tmp_path, MAPS)


def test_owner_may_lack_classes(tmp_path: Path) -> None:
    three = replace(MAPS, classes=("background", "tumor", "oedema"))
    config = write_npz(tmp_path, images=PIXELS, masks=MASKS * 2)  # all images without tumor
    assert torch.equal(load_node_data(config, tmp_path, three)[0].targets, torch.from_numpy(MASKS).long() * 2)


def test_rejects_other_sizes_without_fit(tmp_path: Path) -> None:
    big, masks = PIXELS.repeat(2, 1).repeat(2, 2), MASKS.repeat(2, 1).repeat(2, 2)
    config = write_npz(tmp_path, images=big, masks=masks)
    with pytest.raises(DataError, match=r"1 x 16 x 16 .*data\.fit"):
        load_node_data(config, tmp_path, MAPS)
    data, _ = load_node_data(replace(config, fit=True), tmp_path, MAPS)
    assert torch.equal(data.targets, torch.from_numpy(MASKS).long())
    config = write_pictures(tmp_path, big, masks)
    data, _ = load_node_data(replace(config, fit=True), tmp_path, MAPS)
    assert torch.allclose(data.inputs, NORMALIZED, atol=1e-5)
    assert torch.equal(data.targets, torch.from_numpy(MASKS).long())


def test_selects_channels(tmp_path: Path) -> None:
    both = np.stack([255 - PIXELS, PIXELS], axis=1)
    config = write_npz(tmp_path, images=both, masks=MASKS)
    assert torch.allclose(
        load_node_data(replace(config, channels=(1,)), tmp_path, MAPS)[0].inputs, NORMALIZED, atol=1e-6
    )
    with pytest.raises(ArgumentError, match=r"data\.channels = \[2\]"):
        load_node_data(replace(config, channels=(2,)), tmp_path, MAPS)


def test_measurements_follow_the_server(tmp_path: Path) -> None:
    data, _ = load_node_data(write_npz(tmp_path, images=PIXELS), tmp_path, IMAGES)
    assert torch.allclose(data.targets, NORMALIZED, atol=1e-6)
    assert torch.equal(data.inputs, IMAGES.make_task().observe(data.targets))
    eight = replace(IMAGES, task=ReconstructionConfig(acceleration=8, center=0.0))
    assert not torch.equal(
        load_node_data(write_npz(tmp_path, images=PIXELS), tmp_path, eight)[0].inputs, data.inputs
    )


def test_findings_without_a_column_are_unknown(tmp_path: Path) -> None:
    labels = np.array([[1, 0], [0, 1], [0, 0], [1, 1], [-1, 0], [0, 0]])
    config = write_npz(tmp_path, images=PIXELS, labels=labels, classes=["Hernia", "Mass"])
    data, _ = load_node_data(config, tmp_path, FINDINGS)
    assert data.targets.tolist() == [[mass, -1, hernia] for hernia, mass in labels.tolist()]
    with pytest.raises(DataError, match=r"2 classes .*expected 3"):
        load_node_data(write_npz(tmp_path, images=PIXELS, labels=labels), tmp_path, FINDINGS)


def test_reads_findings_from_columns_or_lists(tmp_path: Path) -> None:
    for n in range(3):
        Image.fromarray(PIXELS[n]).save(tmp_path / f"{n}.png")
    columns = "file,who,Hernia,Mass\n0.png,a,1,0\n1.png,a,,1\n2.png,b,0,-1\n"
    (tmp_path / "mine.csv").write_text(columns)
    config = NodeDataConfig(source="csv", path="mine.csv", image="file", group="who")
    data, _ = load_node_data(config, tmp_path, FINDINGS)
    assert data.targets.tolist() == [[0, -1, 1], [1, -1, -1], [-1, -1, 0]]
    assert data.groups is not None
    assert data.groups[0] == data.groups[1] != data.groups[2]
    (tmp_path / "mine.csv").write_text("file,label\n0.png,Hernia|Mass\n1.png,No Finding\n2.png,Edema\n")
    data, _ = load_node_data(NodeDataConfig(source="csv", path="mine.csv", image="file"), tmp_path, FINDINGS)
    assert data.targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    (tmp_path / "mine.csv").write_text("file,Mass\n0.png,maybe\n")
    with pytest.raises(DataError, match="'Mass' has 'maybe'"):
        load_node_data(NodeDataConfig(source="csv", path="mine.csv", image="file"), tmp_path, FINDINGS)
    (tmp_path / "mine.csv").write_text("file,label\n0.png,Cough\n")
    with pytest.raises(DataError, match=r"'Cough'.* Mass, .*Hernia"):
        load_node_data(NodeDataConfig(source="csv", path="mine.csv", image="file"), tmp_path, FINDINGS)


def test_instance_images_become_patches_of_the_servers_size(tmp_path: Path) -> None:
    image = RNG.integers(0, 256, (12, 20, 3), dtype=np.uint8)
    instances = np.zeros((12, 20), dtype=np.uint8)
    instances[2:7, 2:7] = 5
    data, _ = load_node_data(write_pictures(tmp_path, [image], [instances]), tmp_path, NUCLEI)
    assert data.inputs.shape == (6, 3, 8, 8)
    assert torch.allclose(
        data.inputs[0], torch.tensor(image[:8, :8] / 127.5 - 1).permute(2, 0, 1).float(), atol=1e-5
    )
    assert data.targets[0, 2:7, 2:7].unique().tolist() == [1, 2]
    with pytest.raises(ArgumentError, match=r"data\.fit"):
        load_node_data(NodeDataConfig(source="folder", path="mine", fit=True), tmp_path, NUCLEI)


def test_patches_are_grouped_by_image_or_patient(tmp_path: Path) -> None:
    image = RNG.integers(0, 256, (12, 20, 3), dtype=np.uint8)
    instances = np.zeros((12, 20), dtype=np.uint8)
    config = write_pictures(tmp_path, [image] * 3, [instances] * 3)
    data, _ = load_node_data(config, tmp_path, NUCLEI)
    assert data.groups is not None
    assert [int((data.groups == group).sum()) for group in data.groups.unique()] == [6, 6, 6]
    assert len(limit_groups(data, 4)) == 12  # privacy.group_size = 4
    with raises_invalid("data.group", "patient", "empty ('slide'"):
        load_node_data(replace(config, group="patient"), tmp_path, NUCLEI)
    (tmp_path / config.path / "cases.csv").write_text("name,patient\n0,a\n1,a\n2,b\n", encoding="utf-8")
    for group, sizes in (("", [6, 12]), ("patient", [6, 12]), ("slide", [6, 6, 6])):
        data, _ = load_node_data(replace(config, group=group), tmp_path, NUCLEI)
        assert data.groups is not None
        assert sorted(int((data.groups == one).sum()) for one in data.groups.unique()) == sizes


def test_reads_volumes(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    (tmp_path / "scans").mkdir()
    for n in range(2):
        for part, array in (("image", PIXELS), ("mask", MASKS)):
            volume = np.flip(array, 1).transpose(2, 1, 0)  # slice z is PIXELS[z]
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "scans" / f"c{n}_{part}.nii.gz")
    config = NodeDataConfig(source="nifti", path="scans", slices=3, group="patient")
    data, _ = load_node_data(config, tmp_path, MAPS)
    assert torch.equal(data.targets, torch.from_numpy(np.concatenate([MASKS[1::2]] * 2)).long())
    assert data.groups is not None
    assert len(set(data.groups.tolist())) == 2
    small = replace(MAPS, shape=(1, 4, 4))
    with pytest.raises(DataError, match=r"data\.fit"):
        load_node_data(config, tmp_path, small)
    assert load_node_data(replace(config, fit=True), tmp_path, small)[0].targets.shape == (6, 4, 4)


def test_memory_is_checked_before_images_are_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_if_resized(*_: object) -> None:
        raise AssertionError("resized before the memory check")

    for module in ("images", "nifti"):
        monkeypatch.setattr(f"fedstill.data.{module}.resize_images", fail_if_resized)
    nibabel = pytest.importorskip("nibabel")
    scans = write_pictures(tmp_path, PIXELS, MASKS)
    shutil.copytree(tmp_path / "mine", tmp_path / "by-class")
    for name in ("images", "masks"):
        (tmp_path / "by-class" / name).rename(tmp_path / "by-class" / name.removesuffix("s"))
    (tmp_path / "volumes").mkdir()
    for part, array in (("image", PIXELS), ("mask", MASKS)):
        volume = nibabel.Nifti1Image(array.transpose(2, 1, 0), np.eye(4))
        nibabel.save(volume, tmp_path / "volumes" / f"c_{part}.nii.gz")
    (tmp_path / "mine.csv").write_text("image,Mass\nmine/images/0.png,1\n")
    (tmp_path / "classes.csv").write_text("image,label\nmine/images/0.png,1\n")
    classes = DataSpec(ClassificationConfig(), ("image", "mask"), (1, 8, 8), (0.5,), (0.5,))
    large = (1, 8000, 8000)
    for config, spec in (
        (scans, MAPS),
        (NodeDataConfig(source="nifti", path="volumes"), MAPS),
        (NodeDataConfig(source="csv", path="mine.csv"), FINDINGS),
        (NodeDataConfig(source="csv", path="classes.csv"), classes),
        (replace(scans, path="by-class"), classes),
    ):
        with pytest.raises(MemoryLimitExceeded, match="1 x 8000 x 8000"):
            load_node_data(replace(config, fit=True), tmp_path, replace(spec, shape=large), max_bytes=10**6)


def test_texts_get_the_ids_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("text,label\ngood film,yes\nbad film,no\nno film,no\ngood,yes\n")
    server = load_data(make_data_config(str(tmp_path / "mine.csv"), length=4, words=50), TextConfig())
    spec = DataSpec(TextConfig(), ("no", "yes"), (4,), (), (), server.vocabulary)
    data, _ = load_node_data(NodeDataConfig(source="csv", path="mine.csv"), tmp_path, spec)
    other_data = torch.cat([server.train.inputs, server.test.inputs])
    assert sorted(map(tuple, data.inputs.tolist())) == sorted(map(tuple, other_data.tolist()))
    assert data.targets.tolist() == [1, 0, 0, 1]
    other = replace(spec, classes=("fine", "poor"))
    with pytest.raises(DataError, match="class 'no'"):
        load_node_data(NodeDataConfig(source="csv", path="mine.csv"), tmp_path, other)


@pytest.mark.parametrize(
    ("config", "spec", "line"),
    [
        ({"source": "csv"}, MAPS, r"invalid data.source = 'csv' \(expected npz, folder or nifti"),
        ({"source": "folder"}, FINDINGS, r"invalid data.source = 'folder' \(expected npz or csv"),
        ({"source": "nifti"}, NUCLEI, r"invalid data.source = 'nifti' \(expected npz or folder"),
        ({"vocabulary": "hash"}, MAPS, r"invalid data.vocabulary = 'hash' \(expected empty"),
    ],
)
def test_rejects_sources_that_a_task_does_not_support(
    tmp_path: Path, config: Any, spec: DataSpec, line: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.csv").write_text("image,label\n")
    path = "mine.csv" if config.get("source") == "csv" else "mine"
    with pytest.raises(ArgumentError, match=line):
        load_node_data(NodeDataConfig(path=path, **config), tmp_path, spec)


def test_rejects_slices_without_volumes(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"data\.slices = 3"):
        NodeDataConfig(source="npz", slices=3)
    with raises_invalid("data.source", "nifti", "npz, folder or csv"):
        load_node_data(NodeDataConfig(source="nifti", path="x"), tmp_path, CLASSES)


def test_error_asks_for_a_run_if_data_need_one(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("text,label\ngood film,1\nbad film,0\n")
    findings = write_npz(tmp_path, images=PIXELS, labels=np.zeros((6, 3), dtype=np.int64))
    config = write_pictures(tmp_path, PIXELS, MASKS)
    (tmp_path / "mine.safetensors").write_bytes(b"")
    for source, path, message in (
        ("npz", findings.path, r"labels are int64 of shape \(6, 3\)"),
        ("folder", config.path, "this looks like images and masks"),
        ("nifti", config.path, "data.source = 'nifti'"),
        ("csv", "mine.csv", "has 'good film'"),
        ("tensors", "mine.safetensors", "only a run determines its data spec"),
    ):
        with pytest.raises(UnknownInputFormatError, match=message):
            load_node_data(NodeDataConfig(source=source, path=path), tmp_path)
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.png").write_text("none")
    for value, message in (
        (NodeDataConfig(path="none.npz"), "file not found"),
        (NodeDataConfig(source="folder", path="images"), "cannot be read as an image"),
    ):
        with pytest.raises(DataError, match=message) as wrong:
            load_node_data(value, tmp_path)
        assert not isinstance(wrong.value, UnknownInputFormatError)


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_group_numbers_do_not_depend_on_other_names(form: str, tmp_path: Path) -> None:
    """The teachers of PATE have disjoint groups, which an additional record must not change."""
    names = [5, 2**60, 2**60 + 1, 30, 5, 41]

    def groups(*more: object) -> list[int]:
        who = [*names, *more]
        if form == "npz":
            images, labels = np.zeros((len(who), 8, 8), np.uint8), np.arange(len(who)) % 2
            config = replace(
                write_npz(tmp_path, images=images, labels=labels, who=np.array(who)), group="who"
            )
            data, _ = load_node_data(config, tmp_path, CLASSES)
        else:
            ill = SchemaColumn(name="ill", type="category", categories=("0", "1"))
            schema = TableSchema("ill", (SchemaColumn(name="age", range=(0.0, 9.0)), ill))
            lines = [f"{name},5,{n % 2}" for n, name in enumerate(who)]
            (tmp_path / "mine.csv").write_text("\n".join(["who,age,ill", *lines]))
            spec = DataSpec(TabularConfig(), ("0", "1"), (1,), (), (), schema=schema)
            data, _ = load_node_data(
                NodeDataConfig(source="csv", path="mine.csv", group="who"), tmp_path, spec
            )
        assert data.groups is not None
        return data.groups.tolist()

    alone = groups()
    assert len(set(alone)) == 5
    assert [groups(more)[:6] for more in (777, "A7", "007")] == [alone] * 3
