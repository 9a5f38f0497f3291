"""Public data: held out, from another data set, or generated from noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.seeds import torch_generator
from fedstill.data import DataSet, Digits, TensorData, load
from fedstill.data.public import PublicConfig, PublicData, conform_images, generate_noise_images, load_public
from tests.support.errors import raises_invalid

DIGITS = load(Digits())


@pytest.fixture(autouse=True)
def _no_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the data folders of the machine, and the cache."""
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def make_data_set(images: Any, classes: tuple[str, ...] = ("a", "b"), mean: float = 0.5) -> DataSet:
    """Return a data set of pixels (N, C, H, W) in [0, 1], all for training."""
    inputs = (torch.as_tensor(images, dtype=torch.float32) - mean) / 0.5
    train = TensorData(inputs, torch.arange(len(inputs)) % len(classes))
    channels = inputs.shape[1]
    return DataSet("made", train, train, classes, (mean,) * channels, (0.5,) * channels)


def load_parts(config: PublicConfig, data: DataSet = DIGITS) -> tuple[TensorData, PublicData]:
    train, public = load_public(config, data)
    assert public is not None
    return train, public


def sorted_pixels(*parts: torch.Tensor) -> list[bytes]:
    return sorted(image.numpy().tobytes() for part in parts for image in part)


# --- none and held-out ---------------------------------------------------------------------------


def test_none_leaves_all_examples_to_the_nodes() -> None:
    train, public = load_public(PublicConfig(), DIGITS)
    assert public is None
    assert train is DIGITS.train


def test_held_out_and_private_examples_are_a_partition() -> None:
    train, public = load_parts(PublicConfig("held-out", share=0.2))
    assert len(public) == round(0.2 * len(DIGITS.train))
    assert sorted_pixels(train.inputs, public.inputs) == sorted_pixels(DIGITS.train.inputs)
    assert public.labels is not None
    # Images keep their labels in both parts.
    label = {
        x.numpy().tobytes(): int(y) for x, y in zip(DIGITS.train.inputs, DIGITS.train.targets, strict=True)
    }
    for part, targets in ((train.inputs, train.targets), (public.inputs, public.labels)):
        assert [label[x.numpy().tobytes()] for x in part] == targets.tolist()


def test_limit_does_not_change_the_private_examples() -> None:
    """This keeps metrics comparable for different amounts of public data."""
    (train, public), (same, few) = (load_parts(PublicConfig("held-out", limit=limit)) for limit in (0, 40))
    assert torch.equal(train.inputs, same.inputs)
    assert len(few) == 40
    assert set(sorted_pixels(few.inputs)) <= set(sorted_pixels(public.inputs))


def test_sampling_depends_on_the_seed_only() -> None:
    first, second, other = (load_parts(PublicConfig("held-out", seed=seed))[1] for seed in (0, 0, 1))
    assert torch.equal(first.inputs, second.inputs)
    assert not torch.equal(first.inputs, other.inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0.0}, "public.share = 0.0"),
        ({"share": 1.0}, "public.share = 1.0"),
        ({"limit": -1}, "public.limit = -1"),
    ],
)
def test_rejects_invalid_options(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        PublicConfig(**arguments)


def test_rejects_shares_that_leave_one_side_empty() -> None:
    few = make_data_set(np.zeros((3, 1, 4, 4)))
    with pytest.raises(ArgumentError, match=r"public\.share = 0\.1"):
        load_public(PublicConfig("held-out", share=0.1), few)


# --- another data set ----------------------------------------------------------------------------


def save(path: Path, images: Any, **arrays: Any) -> str:
    np.savez(path, images=images, labels=np.arange(len(images)) % 2, **arrays)
    return str(path)


def test_other_data_set_is_converted_to_the_private_form(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    name = save(tmp_path / "color.npz", images, split=np.zeros(20, dtype=np.uint8) + (np.arange(20) >= 15))
    train, public = load_parts(PublicConfig(name))
    assert train is DIGITS.train
    assert public.inputs.shape == (15, 1, 8, 8)  # test examples are not used
    assert public.labels is None
    assert "its classes differ" in public.note


def test_conversion_matches_a_reference() -> None:
    """Constant images are not changed by averaging."""
    source = make_data_set(np.ones((1, 3, 8, 8)) * np.array([1.0, 0.5, 0.0])[:, None, None])
    gray = make_data_set(np.zeros((1, 1, 4, 4)), mean=0.25)
    (pixel,) = set((conform_images(source.train.inputs, source, gray) * 0.5 + 0.25).flatten().tolist())
    assert pixel == pytest.approx(0.299 + 0.5 * 0.587, abs=1e-5)
    color = make_data_set(np.zeros((1, 3, 12, 8)))
    assert conform_images(gray.train.inputs, gray, color).shape == (1, 3, 12, 8)
    torch.testing.assert_close(conform_images(gray.train.inputs, gray, color), -torch.ones(1, 3, 12, 8))


def test_shrinking_uses_antialiasing() -> None:
    """A checkerboard of single pixels becomes gray."""
    board = np.indices((16, 16)).sum(0) % 2
    source, target = make_data_set(board[None, None]), make_data_set(np.zeros((1, 1, 4, 4)))
    pixels = conform_images(source.train.inputs, source, target) * 0.5 + 0.5
    assert (pixels - 0.5).abs().max() < 0.05


def test_labels_are_kept_only_if_class_names_are_equal(tmp_path: Path) -> None:
    images = np.zeros((10, 8, 8), dtype=np.uint8)
    data = make_data_set(np.zeros((4, 1, 8, 8)), classes=("cat", "dog"))
    for names, known in ((["cat", "dog"], True), (["dog", "cat"], False), (["cat", "dog", "bird"], False)):
        name = save(tmp_path / "other.npz", images, classes=np.array(names))
        public = load_parts(PublicConfig(name), data)[1]
        assert (public.labels is not None) is known
        if known:
            assert len(public.labels) == len(public)  # type: ignore[arg-type]


def test_limit_samples_from_the_other_data_set(tmp_path: Path) -> None:
    images = np.arange(100, dtype=np.uint8)[:, None, None] + np.zeros((100, 8, 8), dtype=np.uint8)
    name = save(tmp_path / "many.npz", images, split=np.zeros(100, dtype=np.uint8))
    with pytest.raises(DataError):
        load_public(PublicConfig(name, limit=10), DIGITS)  # split without a test example
    name = save(tmp_path / "many.npz", images, split=np.arange(100) >= 80)
    few, same, other = (load_parts(PublicConfig(name, limit=10, seed=seed))[1] for seed in (0, 0, 1))
    assert len(few) == 10
    assert torch.equal(few.inputs, same.inputs)
    assert not torch.equal(few.inputs, other.inputs)
    assert "10 of 80, sampled with seed 0" in few.note


def test_rejects_an_empty_name() -> None:
    with raises_invalid("public.name", "", "one of none, held-out, noise"):
        load_public(PublicConfig(""), DIGITS)


def test_rejects_the_private_data_as_public_data() -> None:
    with raises_invalid("public.name", "digits", "held-out, or other data"):
        load_public(PublicConfig("digits"), DIGITS)


def test_rejects_channels_that_cannot_be_converted() -> None:
    two, three = make_data_set(np.zeros((1, 2, 4, 4))), make_data_set(np.zeros((1, 3, 4, 4)))
    with pytest.raises(DataError, match=r"2 channels .*made 3"):
        conform_images(two.train.inputs, two, three)


# --- generated from noise ------------------------------------------------------------------------


def test_noise_needs_no_data_and_has_no_labels() -> None:
    train, public = load_parts(PublicConfig("noise"))
    assert train is DIGITS.train
    assert public.inputs.shape == (2000, 1, 8, 8)
    assert public.labels is None
    assert public.inputs.min() >= -1
    assert public.inputs.max() <= 1
    assert len({image.numpy().tobytes() for image in public.inputs}) == 2000


def test_noise_images_do_not_depend_on_the_limit() -> None:
    few, more = (load_parts(PublicConfig("noise", limit=limit))[1].inputs for limit in (30, 700))
    assert torch.equal(few, more[:30])
    other = load_parts(PublicConfig("noise", limit=30, seed=1))[1].inputs
    assert not torch.equal(few, other)


def test_noise_images_are_smooth_with_varying_contrast() -> None:
    x = generate_noise_images(300, 3, 32, 32, torch_generator(0, "test"))
    across, separate = (x[..., 1:] - x[..., :-1]).abs().mean(), (x[..., 16:] - x[..., :16]).abs().mean()
    assert across < 0.5 * separate  # 1 for independent pixels
    spread = x.flatten(1).std(1)
    assert spread.max() > 3 * spread.min()
    # The direction of the smallest change differs between images.
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean((1, 2, 3))
    along = (x[..., 1:] - x[..., :-1]).abs().mean((1, 2, 3))
    assert (down > 1.3 * along).float().mean() > 0.1
    assert (along > 1.3 * down).float().mean() > 0.1


def test_conversion_of_public_images_is_described(tmp_path: Path) -> None:
    image_list = np.zeros((20, 12, 12, 3), dtype=np.uint8)
    np.savez(tmp_path / "color.npz", images=image_list, labels=np.arange(20) % 2)
    _, public = load_parts(PublicConfig(str(tmp_path / "color.npz")))
    assert public.conversion == "images of 3 x 12 x 12, resized or recolored to 1 x 8 x 8"
    assert public.to("cpu").conversion == public.conversion
    np.savez(tmp_path / "gray.npz", images=image_list[:, :8, :8, 0], labels=np.arange(20) % 2)
    assert load_parts(PublicConfig(str(tmp_path / "gray.npz")))[1].conversion == ""
