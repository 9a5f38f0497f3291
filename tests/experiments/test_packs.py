"""Readers of the research data sets: contents, sites, parts and vocabularies."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedstill.core.dataset import DataSet
from fedstill.core.errors import ArgumentError
from fedstill.data import load, make_data_config
from fedstill.data.partitioners import SortedByColumn, split
from fedstill.data.public import PublicConfig, load_public
from fedstill.tasks.classification import ClassificationConfig, TextConfig
from fedstill.tasks.instances import InstancesConfig
from fedstill.tasks.multi_label import MultiLabelConfig
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig
from tests.support.packs import DATA, pack

INSTANCES = InstancesConfig()


def mri(task: Any, **options: Any) -> DataSet:
    return pack("mri:BrainMRI", "brain_mri_lgg.npz", task, size=64, **options)


def monuseg(**options: Any) -> DataSet:
    return pack("nuclei:MoNuSeg", "nuclei_monuseg.npz", INSTANCES, scale=0.25, **options)


def dsb(**options: Any) -> DataSet:
    return pack("nuclei:DSB2018", "nuclei_dsb2018.npz", INSTANCES, **options)


def test_brain_mri() -> None:
    data = mri(SegmentationConfig())
    assert (data.name, len(data.train), len(data.test)) == ("brain-mri", 696, 176)
    assert set(data.columns["site"]) == {"CS", "DU", "FG", "HT"}
    assert data.test.cases is not None
    sites = [data.test.cases.sites[n] for n in data.test.cases.present_ids()]
    assert [sites.count(site) for site in ("CS", "DU", "FG", "HT")] == [3, 9, 3, 7]
    tested = {data.test.cases.names[n] for n in data.test.cases.present_ids()}
    assert not tested & set(data.columns["patient"])
    assert "EZ" in data.note


def test_brain_mri_is_divided_by_size_of_tumor() -> None:
    """Nodes have whole patients; a later one has larger tumors, on average over its slices."""
    data = mri(SegmentationConfig())
    patients, random = data.columns["patient"], np.random.default_rng(0)
    config = SortedByColumn(nodes=10, column="tumor", minimum=1)
    parts = split(data.train.targets, 2, config, random, data.columns, patients)
    sizes = [data.train.targets[part].double().mean() for part in parts]
    assert sizes == sorted(sizes)
    assert sum(len(set(patients[part])) for part in parts) == len(set(patients))


def test_brain_mri_reconstruction_uses_flair() -> None:
    data = mri(ReconstructionConfig(), sites=("CS",))
    every = mri(SegmentationConfig(), sites=("CS",))
    assert torch.equal(data.test.targets, every.test.inputs[:, 1:2])


def test_chest_xray() -> None:
    data = pack("xray:ChestXray", "chest_xray_nih1000.npz", MultiLabelConfig())
    counts = (torch.cat([data.train.targets, data.test.targets]) == 1).sum(0)
    assert dict(zip(data.classes, counts.tolist(), strict=True))["Effusion"] == 170
    assert "53 of 264 patients" in data.note
    assert len(data.train) + len(data.test) == 1000
    assert len(np.unique(data.columns["patient"])) == 211


def test_monuseg_has_organs_and_its_official_split() -> None:
    data = monuseg(patch=128)
    assert set(data.columns["organ"]) == {"breast", "colon", "kidney", "lung", "prostate"}
    assert len(set(data.columns["slide"])) == 13
    assert data.test.cases is not None
    assert len(data.test.cases.present_ids()) == 10
    assert data.test.cases.sizes[0] == (250, 250)
    whole = monuseg(patch=128, sites=("bladder", "breast"))
    assert whole.test.cases is not None
    assert len(whole.test.cases.present_ids()) == 4  # two of bladder, an organ without training images
    assert set(whole.columns["organ"]) == {"breast"}


@pytest.mark.slow
def test_dsb_has_tissue_by_default_and_is_public_for_monuseg() -> None:
    data = dsb(train_limit=20)
    assert set(data.columns["site"]) == {"he_256x320"}
    assert "tested on 21 of 107 slides" in data.note
    assert data.train.inputs.shape[1:] == (3, 256, 256)
    with pytest.raises(ArgumentError, match=r"some of fluo_256, .*he_256x320"):
        dsb(sites=("he",))
    private = monuseg(patch=64, sites=("colon",))
    config = PublicConfig("packs.nuclei:DSB2018", root=str(DATA), limit=6)
    public = load_public(config, private, INSTANCES)[1]
    assert public is not None
    assert public.inputs.shape == (6, 3, 64, 64)
    assert public.labels is not None
    assert public.labels.shape == (6, 64, 64)


def test_sst2_is_complete() -> None:
    data = pack("texts:SST2", "sst2.csv.gz", TextConfig())
    assert (len(data.train), len(data.test), data.classes) == (6920 + 872, 1821, ("negative", "positive"))


@pytest.mark.slow
def test_ag_news_is_complete() -> None:
    data = pack("texts:AGNews", "ag_news_tokens.npz", TextConfig())
    assert (len(data.train), len(data.test), len(data.classes)) == (120_000, 7_600, 4)
    assert torch.bincount(data.test.targets).tolist() == [1900] * 4


def test_word_numbers_by_hand(tmp_path: Path) -> None:
    """The file has two parts; unknown word numbers get their own ids."""
    words = [b"<pad>", b"film", b"", *[b"w"] * 65_533, b"last"]
    np.savez(
        tmp_path / "ag_news_tokens.npz",
        tokens_lo=np.array([1, 2, 0, 1], dtype=np.uint16),
        tokens_hi=np.array([0, 0, 1, 0], dtype=np.uint8),
        lengths=np.array([3, 1], dtype=np.uint8),
        labels=np.array([1, 0], dtype=np.uint8),
        split=np.array([0, 1], dtype=np.uint8),
        vocab=np.frombuffer(b"\n".join(words), dtype=np.uint8),
        classes=np.array(["x", "y"]),
    )
    config = make_data_config("packs.texts:AGNews", root=str(tmp_path), length=4)
    data = load(config, TextConfig())
    film, unknown, last = (1 + zlib.crc32(word) % 16384 for word in (b"film", b"#2", b"last"))
    assert data.train.inputs.tolist() == [[film, unknown, last, 0]]
    assert data.test.inputs.tolist() == [[film, 0, 0, 0]]
    assert data.classes == ("x", "y")
    texts = make_data_config("packs.texts:AGNews", root=str(tmp_path), vocabulary="hf:some").labeled_texts()  # type: ignore[attr-defined]
    assert texts.texts == [["film", "\ufffd", "last"], ["film"]]


@pytest.mark.slow
def test_jpeg_copies_of_cifar() -> None:
    ten = pack("cifar:CIFAR10", "cifar10_jpeg.npz", ClassificationConfig(), train_limit=100)
    assert (len(ten.test), ten.name, ten.classes[0]) == (10_000, "cifar10", "airplane")
    data = pack("cifar:CIFAR100", "cifar100_mosaic.npz", ClassificationConfig(), train_limit=1000)
    assert data.train.targets.bincount().tolist() == [10] * 100
    assert data.test.targets.bincount().tolist() == [100] * 100
    assert (data.classes[0], data.classes[99]) == ("apple", "worm")
    means = (data.test.inputs.mean(dim=(0, 2, 3)) + 1) / 2
    assert means.tolist() == pytest.approx([0.507, 0.487, 0.441], abs=0.01)
    assert "not the official one" in data.note


def test_mosaics_are_cut_by_rows_and_end_with_test_images(tmp_path: Path) -> None:
    """Tile t of class c has a constant color: red t // 4, green 100 + t % 4 * 30, blue 200 c."""
    tiles, streams = np.arange(600), []
    for label in range(2):
        flat = np.stack([tiles // 4, 100 + tiles % 4 * 30, 200 * label + 0 * tiles], axis=1).astype(np.uint8)
        mosaic, stream = flat.reshape(30, 20, 3).repeat(32, axis=0).repeat(32, axis=1), io.BytesIO()
        Image.fromarray(mosaic).save(stream, "JPEG", quality=95, subsampling=0)
        streams.append(stream.getvalue())
    np.savez(
        tmp_path / "cifar100_mosaic.npz",
        jpeg=np.frombuffer(b"".join(streams), dtype=np.uint8),
        offsets=np.cumsum([0, *map(len, streams)]),
        classes=["a", "b"],
    )
    data = load(make_data_config("packs.cifar:CIFAR100", root=str(tmp_path)))
    assert (len(data.train), len(data.test), data.classes) == (1000, 200, ("a", "b"))
    for i in (0, 1, 19, 20, 499, 500, 999):
        tile, label = i % 500, i // 500
        assert data.train.targets[i] == label
        expected = torch.tensor([tile // 4, 100 + tile % 4 * 30, 200 * label])
        pixels = data.train.inputs[i].flatten(1) * 127.5 + 127.5
        assert (pixels - expected[:, None]).abs().max() <= 4
