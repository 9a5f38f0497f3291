"""Pictures with objects: patches, places, parts and targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedstill.core.errors import ArgumentError, DataError
from fedstill.data import UserFiles, load, make_data_config
from fedstill.data.instance_images import (
    InstanceImage,
    cut_patches,
    make_patch_cases,
    prepare_instance_images,
)
from fedstill.data.public import PublicConfig, hold_out
from fedstill.tasks.instances import InstancesConfig, classes_from_objects

INSTANCES = InstancesConfig()


def picture(number: int, height: int = 20, width: int = 26, **more: Any) -> InstanceImage:
    """Each pixel tells where it is: red the row, green the column, blue the picture. Two objects."""
    image = np.zeros((3, height, width), dtype=np.uint8)
    image[0], image[1], image[2] = np.arange(height)[:, None], np.arange(width), number
    instances = np.zeros((height, width), dtype=np.int32)
    instances[3:9, 2:9], instances[3:9, 9:14] = 40, 700
    return InstanceImage(image, instances, f"n{number}", **{"site": "ab"[number % 2], **more})


def pixels(inputs: torch.Tensor) -> torch.Tensor:
    return (inputs * 127.5 + 127.5).round().long()


def test_patches_are_what_their_places_say() -> None:
    pictures = [picture(0), picture(1, 16, 16), picture(2, 10, 30)]
    cases = make_patch_cases(pictures, 16)
    data = cut_patches(pictures, cases, np.arange(len(cases.case_ids)), 16)
    assert cases.case_ids.tolist() == [0] * 4 + [1] + [2] * 2
    assert cases.sizes == ((20, 26), (16, 16), (10, 30))
    assert cases.corners is not None
    for n, (top, left) in enumerate(cases.corners.tolist()):
        seen = pixels(data.inputs[n])
        assert seen[:, 0, 0].tolist() == [top, left, int(cases.case_ids[n])]
        assert seen[1, 0].tolist() == list(range(left, left + 16))
    assert pixels(data.inputs[5])[0, 9:13, 0].tolist() == [9, 9, 8, 7]  # continued below by reflection


def test_targets_are_of_whole_pictures_so_that_a_cut_object_has_no_contour_there() -> None:
    pictures = [picture(0)]
    cases = make_patch_cases(pictures, 8)
    data = cut_patches(pictures, cases, np.arange(len(cases.case_ids)), 8)
    whole = torch.from_numpy(classes_from_objects(pictures[0].instances).astype(np.int64))
    assert cases.corners is not None
    for n, (top, left) in enumerate(cases.corners.tolist()):
        assert torch.equal(data.targets[n], whole[top : top + 8, left : left + 8])
    # The objects touch between columns 8 and 9, and both sides are contour.
    assert whole[5, 8:10].tolist() == [2, 2]
    assert whole[5, 5] == 1


def test_pictures_of_one_patient_stay_together() -> None:
    """Three pictures each, of sites of their own; one whose patient is not known is by itself."""
    pictures = [picture(n, site="ab"[n // 3 % 2], patient=f"p{n // 3}") for n in range(18)]
    pictures.append(picture(18, site="a"))
    for seed in range(5):
        config = UserFiles(name="mine", patch=8, seed=seed, train_limit=100)
        data = prepare_instance_images(pictures, config, "mine", "", "site")
        assert data.group_column == "patient"
        owners = lambda inputs: {n // 3 for n in pixels(inputs)[:, 2, 0, 0].tolist()}  # noqa: E731
        assert not owners(data.train.inputs) & owners(data.test.inputs)
        assert len(data.train) % 12 == 0  # 12 patches a picture, and pictures whole
        named = data.columns["patient"]
        assert set(named) <= {*(f"p{n}" for n in range(6)), "n18"}
        kept, taken = hold_out(PublicConfig("held-out", share=0.4), data)
        assert not owners(data.train.inputs[kept]) & owners(data.train.inputs[taken])
        assert data.train.groups is not None
        assert len(set(data.train.groups.tolist())) == len(set(named))


def test_an_official_split_is_kept_and_the_rest_is_drawn() -> None:
    fixed = [picture(n, split=n < 2, site="x") for n in range(4)]
    open_ones = [picture(n, site="y") for n in range(10, 20)]
    data = prepare_instance_images([*fixed, *open_ones], UserFiles(name="mine", patch=8), "both", "", "site")
    assert data.test.cases is not None
    names = {data.test.cases.names[n] for n in data.test.cases.present_ids()}
    assert {"n0", "n1"} <= names
    assert len(names) == 4  # and a fifth of ten
    assert "tested on 2 of 10 pictures" in data.note


def test_half_the_scale_is_half_the_picture() -> None:
    pictures = [picture(n) for n in range(4)]
    data = prepare_instance_images(pictures, UserFiles(name="mine", patch=8, scale=0.5), "mine", "", "site")
    assert data.test.cases is not None
    assert data.test.cases.sizes[0] == (10, 13)
    assert set(np.unique(data.test.cases.instances[0])) == {0, 40, 700}
    # Rows 0 and 1 become 0.5 of 255: means of two.
    assert (data.train.inputs[0, 0, 0, 0] * 127.5 + 127.5).item() == pytest.approx(0.5, abs=1e-3)


def test_sites_that_are_not_there() -> None:
    with pytest.raises(ArgumentError, match="some of a, b"):
        prepare_instance_images(
            [picture(0), picture(1)], UserFiles(name="mine", sites=("c",)), "mine", "", "site"
        )
    with pytest.raises(DataError, match="has one picture"):
        prepare_instance_images([picture(0)], UserFiles(name="mine"), "mine", "", "site")


# One's own


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    for part in ("images", "masks"):
        (tmp_path / "mine" / part).mkdir(parents=True)
    for n in range(4):
        one = picture(n)
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
        [picture(n, split=n > 1) for n in range(4)], UserFiles(name="mine", patch=8), "mine", "", "site"
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


def test_an_npz_of_pictures(tmp_path: Path) -> None:
    some = [picture(n) for n in range(4)]
    arrays = {
        "images": np.stack([one.image for one in some]),
        "instances": np.stack([one.instances for one in some]),
        "split": np.array([0, 0, 1, 1]),
    }
    np.savez(tmp_path / "mine.npz", **arrays)
    data = load(make_data_config(str(tmp_path / "mine.npz"), patch=8), INSTANCES)
    assert set(pixels(data.test.inputs)[:, 2, 0, 0].tolist()) == {2, 3}
    assert data.group_column == "slide"
    np.savez(tmp_path / "mine.npz", **arrays, patient=np.array([7, 7, 8, 9]))
    data = load(make_data_config(str(tmp_path / "mine.npz"), patch=8), INSTANCES)
    assert data.group_column == "patient"
    assert set(data.columns["patient"]) == {"7"}
    np.savez(tmp_path / "mine.npz", **arrays | {"instances": arrays["instances"][:, :4]})
    with pytest.raises(DataError, match="instances are int32 of shape"):
        load(make_data_config(str(tmp_path / "mine.npz"), patch=8), INSTANCES)
    np.savez(tmp_path / "mine.npz", **arrays | {"split": np.array([0, 0, 1, 3])})
    with pytest.raises(DataError, match=r"split is not 0 \(train\), 1 .* for each of the 4 images"):
        load(make_data_config(str(tmp_path / "mine.npz"), patch=8), INSTANCES)


def test_objects_of_another_size_are_refused(tmp_path: Path) -> None:
    for part, side in (("images", 8), ("masks", 12)):
        (tmp_path / part).mkdir()
        Image.fromarray(np.zeros((side, 8), dtype=np.uint8)).save(tmp_path / part / "a.png")
    with pytest.raises(DataError, match=r"a\.png: the image is 8 x 8 and its objects \(12, 8\)"):
        load(make_data_config(str(tmp_path)), INSTANCES)
