"""Images with instances: patches, corners, parts and targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedstill.core.errors import DataError
from fedstill.data import UserFiles, load, make_data_config
from fedstill.data.instance_images import (
    InstanceImage,
    cut_patches,
    patch_case_index,
    prepare_instance_images,
)
from fedstill.data.public import PublicConfig, hold_out
from fedstill.tasks.instances import InstancesConfig, classes_from_objects
from tests.support.errors import raises_invalid

INSTANCES = InstancesConfig()


def make_image(number: int, height: int = 20, width: int = 26, **more: Any) -> InstanceImage:
    """Return an image with row, column and image number in red, green and blue, and two instances."""
    image = np.zeros((3, height, width), dtype=np.uint8)
    image[0], image[1], image[2] = np.arange(height)[:, None], np.arange(width), number
    instances = np.zeros((height, width), dtype=np.int32)
    instances[3:9, 2:9], instances[3:9, 9:14] = 40, 700
    return InstanceImage(image, instances, f"n{number}", **{"site": "ab"[number % 2], **more})


def make_pixels(inputs: torch.Tensor) -> torch.Tensor:
    return (inputs * 127.5 + 127.5).round().long()


def test_patches_match_their_corners() -> None:
    images = [make_image(0), make_image(1, 16, 16), make_image(2, 10, 30)]
    cases = patch_case_index(images, 16)
    data = cut_patches(images, cases, np.arange(len(cases.case_ids)), 16)
    assert cases.case_ids.tolist() == [0] * 4 + [1] + [2] * 2
    assert cases.sizes == ((20, 26), (16, 16), (10, 30))
    assert cases.corners is not None
    for n, (top, left) in enumerate(cases.corners.tolist()):
        pixels = make_pixels(data.inputs[n])
        assert pixels[:, 0, 0].tolist() == [top, left, int(cases.case_ids[n])]
        assert pixels[1, 0].tolist() == list(range(left, left + 16))
    assert make_pixels(data.inputs[5])[0, 9:13, 0].tolist() == [
        9,
        9,
        8,
        7,
    ]  # padded by reflection at the bottom


def test_cut_instances_have_no_contour_at_patch_borders() -> None:
    images = [make_image(0)]
    cases = patch_case_index(images, 8)
    data = cut_patches(images, cases, np.arange(len(cases.case_ids)), 8)
    whole = torch.from_numpy(classes_from_objects(images[0].instances).astype(np.int64))
    assert cases.corners is not None
    for n, (top, left) in enumerate(cases.corners.tolist()):
        assert torch.equal(data.targets[n], whole[top : top + 8, left : left + 8])
    # The instances touch between columns 8 and 9, and both sides are contour.
    assert whole[5, 8:10].tolist() == [2, 2]
    assert whole[5, 5] == 1


def test_images_of_one_patient_stay_together() -> None:
    """Each patient has three images from different sites; images without a patient form their own unit."""
    images = [make_image(n, site="ab"[n // 3 % 2], patient=f"p{n // 3}") for n in range(18)]
    images.append(make_image(18, site="a"))
    for seed in range(5):
        config = UserFiles(name="mine", patch=8, seed=seed, train_limit=100)
        data = prepare_instance_images(images, config, "mine", "", "site")
        assert data.group_column == "patient"
        owners = lambda inputs: {n // 3 for n in make_pixels(inputs)[:, 2, 0, 0].tolist()}  # noqa: E731
        assert not owners(data.train.inputs) & owners(data.test.inputs)
        assert len(data.train) % 12 == 0  # 12 patches per image, images are not divided
        named = data.columns["patient"]
        assert set(named) <= {*(f"p{n}" for n in range(6)), "n18"}
        rest, selected = hold_out(PublicConfig("held-out", share=0.4), data)
        assert not owners(data.train.inputs[rest]) & owners(data.train.inputs[selected])
        assert data.train.groups is not None
        assert len(set(data.train.groups.tolist())) == len(set(named))


def test_official_split_is_kept_and_the_rest_is_sampled() -> None:
    fixed = [make_image(n, split=n < 2, site="x") for n in range(4)]
    open_ones = [make_image(n, site="y") for n in range(10, 20)]
    data = prepare_instance_images([*fixed, *open_ones], UserFiles(name="mine", patch=8), "both", "", "site")
    assert data.test.cases is not None
    names = {data.test.cases.names[n] for n in data.test.cases.present_ids()}
    assert {"n0", "n1"} <= names
    assert len(names) == 4  # two fixed and 20 % of ten images
    assert "tested on 2 of 10 slides" in data.note


def test_scale_of_one_half_halves_the_image() -> None:
    images = [make_image(n) for n in range(4)]
    data = prepare_instance_images(images, UserFiles(name="mine", patch=8, scale=0.5), "mine", "", "site")
    assert data.test.cases is not None
    assert data.test.cases.sizes[0] == (10, 13)
    assert set(np.unique(data.test.cases.instances[0])) == {0, 40, 700}
    # Red is the row: the mean of rows 0 and 1 is 0.5.
    assert (data.train.inputs[0, 0, 0, 0] * 127.5 + 127.5).item() == pytest.approx(0.5, abs=1e-3)


def test_rejects_unknown_sites() -> None:
    with raises_invalid("data.sites", "c", "some of a, b"):
        prepare_instance_images(
            [make_image(0), make_image(1)], UserFiles(name="mine", sites=("c",)), "mine", "", "site"
        )
    with pytest.raises(DataError, match="has one slide"):
        prepare_instance_images([make_image(0)], UserFiles(name="mine"), "mine", "", "site")


# User files


def test_reads_a_folder_of_instance_images(tmp_path: Path) -> None:
    for part in ("images", "masks"):
        (tmp_path / "mine" / part).mkdir(parents=True)
    for n in range(4):
        one = make_image(n)
        Image.fromarray(one.image.transpose(1, 2, 0)).save(tmp_path / "mine" / "images" / f"n{n}.png")
        mask = Image.fromarray(one.instances.astype(np.uint16))  # 700 needs 16 bits
        mask.save(tmp_path / "mine" / "masks" / f"n{n}.png")
    (tmp_path / "mine" / "cases.csv").write_text(
        "name,site,split,patient\nn0,a,train,p\nn1,b,train,p\nn2,a,test,\nn3,b,test,q\n"
    )
    data = load(make_data_config(str(tmp_path / "mine"), patch=8), INSTANCES)
    assert data.group_column == "patient"
    assert set(data.columns["patient"]) == {"p"}
    expected = prepare_instance_images(
        [make_image(n, split=n > 1) for n in range(4)], UserFiles(name="mine", patch=8), "mine", "", "site"
    )
    for part, other in ((data.train, expected.train), (data.test, expected.test)):
        assert torch.equal(part.inputs, other.inputs)
        assert torch.equal(part.targets, other.targets)
        assert part.cases is not None
        assert other.cases is not None
        assert all(
            np.array_equal(a, b) for a, b in zip(part.cases.instances, other.cases.instances, strict=True)
        )
    assert data.columns["site"].tolist() == expected.columns["site"].tolist()


def test_reads_an_npz_of_instance_images(tmp_path: Path) -> None:
    some = [make_image(n) for n in range(4)]
    arrays = {
        "images": np.stack([one.image for one in some]),
        "instances": np.stack([one.instances for one in some]),
        "split": np.array([0, 0, 1, 1]),
    }
    np.savez(tmp_path / "mine.npz", **arrays)
    data = load(make_data_config(str(tmp_path / "mine.npz"), patch=8), INSTANCES)
    assert set(make_pixels(data.test.inputs)[:, 2, 0, 0].tolist()) == {2, 3}
    assert data.group_column == "slide"
    np.savez(tmp_path / "mine.npz", **arrays, patient=np.array([7, 7, 8, 9]))
    data = load(make_data_config(str(tmp_path / "mine.npz"), patch=8), INSTANCES)
    assert data.group_column == "patient"
    assert set(data.columns["patient"]) == {"7"}
    np.savez(tmp_path / "mine.npz", **arrays | {"instances": arrays["instances"][:, :4]})
    with pytest.raises(DataError, match=r"instances .*int32"):
        load(make_data_config(str(tmp_path / "mine.npz"), patch=8), INSTANCES)
    np.savez(tmp_path / "mine.npz", **arrays | {"split": np.array([0, 0, 1, 3])})
    with pytest.raises(DataError, match=r"split .* 4 images"):
        load(make_data_config(str(tmp_path / "mine.npz"), patch=8), INSTANCES)


def test_rejects_instances_of_another_size(tmp_path: Path) -> None:
    for part, side in (("images", 8), ("masks", 12)):
        (tmp_path / part).mkdir()
        Image.fromarray(np.zeros((side, 8), dtype=np.uint8)).save(tmp_path / part / "a.png")
    with pytest.raises(DataError, match=r"a\.png: .*8 x 8.*\(12, 8\)"):
        load(make_data_config(str(tmp_path)), INSTANCES)
