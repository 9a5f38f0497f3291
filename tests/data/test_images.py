"""Resizing and patches, against slow references; images in unusual modes.

All entry points must read the visible pixels of an image.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedstill.core.errors import DataError
from fedstill.data import load, make_data_config, node_data
from fedstill.data.images import (
    UnreadableImage,
    decode_image,
    patch_corners,
    read_instance_map,
    read_pil_pixels,
    resize_class_maps,
    resize_images,
    to_array,
    to_arrays,
)
from fedstill.data.new_data import EvaluationDataOptions, load_unlabeled
from fedstill.data.node_data import NodeDataConfig


def test_images_are_box_averaged() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 12, 8), dtype=np.uint8)
    boxes = images.reshape(2, 3, 4, 3, 4, 2).mean((3, 5)) / 255
    assert resize_images(images, 4, 4) == pytest.approx(boxes, abs=1e-6)
    floats = (images / 255).astype(np.float32)
    assert resize_images(floats, 4, 4) == pytest.approx(boxes, abs=1e-6)


@given(st.integers(0, 10**6), st.integers(2, 4))
def test_resized_mask_pixel_is_the_majority_class(seed: int, classes: int) -> None:
    maps = np.random.default_rng(seed).integers(0, classes, (2, 6, 4))
    small = resize_class_maps(torch.from_numpy(maps), 3, 2).numpy()
    for n, row, column in np.ndindex(2, 3, 2):
        box = maps[n, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten()
        counts = np.bincount(box, minlength=classes)
        assert small[n, row, column] == max(k for k in range(classes) if counts[k] == counts.max())


@given(st.integers(4, 60), st.integers(4, 60), st.integers(1, 4))
def test_patches_cover_an_image_and_stay_inside(height: int, width: int, patch: int) -> None:
    covered = np.zeros((height, width), dtype=int)
    corners = patch_corners(height, width, patch)
    for top, left in corners:
        assert 0 <= top <= height - patch
        assert 0 <= left <= width - patch
        covered[top : top + patch, left : left + patch] += 1
    assert covered.min() >= 1
    assert len(corners) == -(-height // patch) * -(-width // patch)  # minimum number of patches


GRAY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
COLOR = np.stack([GRAY, GRAY[::-1], GRAY.T], axis=-1)
ALPHA = np.array([0, 51, 255], dtype=np.uint8)  # transparent, one fifth, opaque
BLENDED = [255, 225, 105]  # gray value 105 on white: 255, 0.2 * 105 + 0.8 * 255, 105


def save_image(path: Path, image: Any, **save_options: Any) -> Path:
    image.save(path, **save_options)
    return path


def transparent_image(mode: str) -> Any:
    gray = np.full((1, 3), 105, dtype=np.uint8)
    bands = [gray] * (len(mode) - 1)
    return Image.merge(mode, [Image.fromarray(band) for band in [*bands, ALPHA[None]]])


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_transparent_pixels_are_blended_with_white(tmp_path: Path, mode: str, suffix: str) -> None:
    save_options = {"lossless": True, "exact": True} if suffix == "webp" else {}
    pixels = decode_image(save_image(tmp_path / f"a.{suffix}", transparent_image(mode), **save_options), "a")
    assert len(pixels) == (1 if mode == "LA" and suffix != "webp" else 3)
    assert pixels[:, 0].tolist() == [BLENDED] * len(pixels)


@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_transparent_palette_color_becomes_white(tmp_path: Path, suffix: str) -> None:
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([200, 10, 20, 30, 40, 50])
    pixels = decode_image(save_image(tmp_path / f"a.{suffix}", palette, transparency=0), "a")
    assert pixels[:, 0].T.tolist() == [[255, 255, 255], [30, 40, 50]]
    for image, transparency in (
        (Image.fromarray(np.array([[7, 8]], dtype=np.uint8)), 7),
        (Image.fromarray(np.array([[[7, 7, 7], [8, 8, 8]]], dtype=np.uint8)), (7, 7, 7)),
    ):
        pixels = decode_image(save_image(tmp_path / "b.png", image, transparency=transparency), "b")
        assert pixels[:, 0].tolist() == [[255, 8]] * len(pixels)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_opaque_alpha_changes_nothing(mode: str) -> None:
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert(mode)
    opaque = image.convert({"L": "LA", "RGB": "RGBA"}[mode])
    assert np.array_equal(read_pil_pixels(opaque, "a"), np.asarray(image))


def test_palette_masks_keep_numbers_despite_transparency(tmp_path: Path) -> None:
    mask = Image.fromarray(np.array([[0, 1, 2, 1]], dtype=np.uint8), "P")
    mask.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0])
    file = save_image(tmp_path / "m.png", mask, transparency=0)
    assert read_instance_map(file, "m").tolist() == [[0, 1, 2, 1]]


def test_decodes_bilevel_and_cmyk_colors(tmp_path: Path) -> None:
    cases: list[tuple[str, Any, dict[str, Any], Any]] = [
        ("bw.png", Image.fromarray(GRAY > 100), {}, (GRAY > 100) * 255),
        ("bw.tif", Image.fromarray(GRAY > 100), {"compression": "group4"}, (GRAY > 100) * 255),
        ("cmyk.tif", Image.fromarray(COLOR).convert("CMYK"), {}, COLOR),
        ("cmyk.jpg", Image.fromarray(COLOR).convert("CMYK"), {"quality": 100, "subsampling": 0}, COLOR),
    ]
    for name, image, save_options, expected in cases:
        pixels = decode_image(save_image(tmp_path / name, image, **save_options), name)
        pixels = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0]
        assert np.abs(pixels.astype(int) - expected).max() <= (1 if name == "cmyk.jpg" else 0), name


def test_16_bit_colors_keep_their_high_bytes(tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    lines = b"".join(b"\0" + (row.astype(">u2") * 256 + 9).astype(">u2").tobytes() for row in COLOR)
    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    pixels = decode_image(io.BytesIO(b"\x89PNG\r\n\x1a\n" + content), "a")
    assert np.array_equal(pixels.transpose(1, 2, 0), COLOR)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_rejects_gray_of_more_than_8_bits_with_advice(tmp_path: Path, kind: type) -> None:
    file = save_image(tmp_path / "a.tif", Image.fromarray(GRAY.astype(kind)))
    with pytest.raises(DataError, match=r"a\.tif: .* 8 bits"):
        decode_image(file, "a.tif")


def test_rejects_truncated_images(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for suffix in ("jpg", "png", "webp", "gif", "tif", "bmp"):
        content = save_image(tmp_path / f"a.{suffix}", noise).read_bytes()
        (tmp_path / f"a.{suffix}").write_bytes(content[: len(content) * 2 // 3])
        with pytest.raises(UnreadableImage, match=f"a.{suffix}: cannot be read as an image"):
            decode_image(tmp_path / f"a.{suffix}", f"a.{suffix}")


def test_stacks_pil_images_of_a_list() -> None:
    gray, color = Image.fromarray(GRAY), Image.fromarray(COLOR)
    assert np.array_equal(to_array([gray, gray], "images")[1], GRAY)
    mixed = to_array([gray, color], "images")
    assert np.array_equal(mixed, np.stack([np.stack([GRAY] * 3, axis=-1), COLOR]))
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([200, 10, 20, 30, 40, 50])
    assert to_array([palette], "images")[0, 0].tolist() == [[200, 10, 20], [30, 40, 50]]
    assert to_array([palette], "masks", numbers=True)[0, 0].tolist() == [0, 1]
    with pytest.raises(DataError, match=r"image 1 is 4 x 8.* 0 is 8 x 8"):
        to_array([gray, gray.resize((8, 4))], "images")


def test_named_arrays_read_masks_as_numbers_and_images_as_colors() -> None:
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([200, 10, 20, 30, 40, 50])
    arrays = to_arrays({"images": [palette], "masks": [palette], "labels": ["a"]}, "mine")
    assert arrays["images"][0, 0].tolist() == [[200, 10, 20], [30, 40, 50]]
    assert arrays["masks"][0].tolist() == [[0, 1]]
    assert arrays["labels"].tolist() == ["a"]


def test_pil_photograph_is_rotated_by_exif() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    Image.fromarray(GRAY[:4]).save(stream, "png", exif=exif)
    with Image.open(io.BytesIO(stream.getvalue())) as image:
        assert np.array_equal(to_array([image], "images")[0], np.rot90(GRAY[:4], -1))


def test_run_node_and_new_data_read_transparent_images_alike(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(2):
            image = Image.new("RGBA", (8, 8), (9, 8, 7, 255))
            image.putpixel((0, 0), (9, 8, 7, 0))
            image.save(tmp_path / "pets" / name / f"{number}.png")
    run = load(make_data_config(str(tmp_path / "pets")))
    node, spec = node_data.load_node_data(NodeDataConfig(source="folder", path="pets"), tmp_path)
    _, new_data = load_unlabeled(str(tmp_path / "pets"), spec, EvaluationDataOptions())
    for pixels in (run.train.inputs / 2 + 0.5, node.inputs / 2 + 0.5, new_data):
        assert (pixels[:, :, 0, 0] == 1).all()
        torch.testing.assert_close(pixels[0, :, 1, 1] * 255, torch.tensor([9.0, 8.0, 7.0]), atol=1e-4, rtol=0)
