"""Drawings: what is on them and where."""

from __future__ import annotations

import base64
import itertools
import re
import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import DataError
from fedstill.report import axes, plots, png
from fedstill.report.table import Row


def decoded(address: str) -> npt.NDArray[np.uint8]:
    """The pixels (H, W, channels) of a PNG that png.picture wrote, read independently of it."""
    head = "data:image/png;base64,"
    assert address.startswith(head)
    png = base64.b64decode(address[len(head) :], validate=True)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, content = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", png[place + 8 + length : place + 12 + length])
        assert zlib.crc32(kind + content) == checksum
        chunks[kind] = content
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, bits, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    channels = {0: 1, 2: 3}[colour]
    assert bits == 8
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()  # no filter
    return rows[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_picture_keeps_every_pixel(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (channels, 5, 8), dtype=np.uint8)
    assert np.array_equal(decoded(png.picture(image)), image.transpose(1, 2, 0))


def test_large_picture_is_averaged_in_blocks() -> None:
    image = np.zeros((1, 128, 128), np.uint8)
    image[0, 0, 0] = 200  # one of the four pixels of the first block
    small = decoded(png.picture(image))
    assert small.shape == (64, 64, 1)
    assert small[0, 0, 0] == 50
    assert small.sum() == 50


def test_long_thin_picture_keeps_a_row() -> None:
    assert decoded(png.picture(np.full((1, 1, 640), 9, np.uint8))).shape == (1, 64, 1)


@pytest.mark.parametrize(
    "image", [np.zeros((2, 4, 4), np.uint8), np.zeros((4, 4), np.uint8), np.zeros((1, 4, 4), np.float32)]
)
def test_what_is_no_picture_is_refused(image: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(DataError, match="allowed is uint8"):
        png.picture(image)


def test_accuracy_plot_places_line_and_references() -> None:
    # The axis runs from 0% to 100% over 320 pixels, so 25% lies at 240 and 75% at 80.
    drawing = plots.metric_plot(
        [(0, 0.0), (50, 25.0), (100, 100.0)], [("centralised", "solid", 75.0)], "student"
    )
    assert 'points="0.0,320.0 500.0,240.0 1000.0,0.0"' in drawing
    assert '<line class="reference solid" x1="0" x2="100%" y1="80.0" y2="80.0"/>' in drawing
    assert "centralised 75.0%" in drawing
    assert "student 100.0%" in drawing
    assert "<title>step 50: 25.0%</title>" in drawing


def test_accuracy_axis_shows_at_least_one_percent() -> None:
    drawing = plots.metric_plot([(1, 98.4), (2, 98.4)], [], "student")
    assert ">97.4%</text>" in drawing
    assert ">98.4%</text>" in drawing
    low = plots.metric_plot([(1, 0.2)], [], "student")
    assert ">0%</text>" in low
    assert ">1%</text>" in low
    assert "-" not in "".join(re.findall(r">([^<]*%)</text>", low))


def test_labels_at_the_same_level_do_not_cover_each_other() -> None:
    places = axes.spread([100.0, 100.0, 101.0, 318.0], gap=18, bottom=320)
    ordered = sorted(places)
    assert all(b - a >= 18 for a, b in itertools.pairwise(ordered))
    assert max(places) <= 320


def test_small_plot_names_at_least_two_levels() -> None:
    drawing = plots.small_plot("balance", [(1, -2.272), (2, -2.204)])
    assert re.findall(r">(-[0-9.]+)</text>", drawing) == ["-2.26", "-2.24", "-2.22"]


@pytest.mark.parametrize("value", [0.0, 1e20, -3.0, 5e-324])
def test_flat_line_and_single_point_can_be_drawn(value: float) -> None:
    for line in ([(1.0, value)], [(1.0, value), (2.0, value)]):
        drawing = plots.small_plot("gan", line)
        assert "nan" not in drawing
        assert f",{96 / 2:.1f}" in drawing  # in the middle


def test_the_step_of_a_single_point_stands_below_it() -> None:
    assert '<text class="tick middle" x="50%" y="116" dx="0">50</text>' in plots.small_plot(
        "node", [(50.0, 0.3)]
    )


def test_long_lines_are_thinned_and_keep_their_mean() -> None:
    line = [(float(step), float(step % 7)) for step in range(6000)]
    short = axes.thin(line)
    assert len(short) == axes.MOST_POINTS
    assert np.mean([y for _, y in short]) == pytest.approx(np.mean([y for _, y in line]))


def test_bar_shows_mean_spread_and_nodes() -> None:
    bar = plots.value_bar(Row("standalone mean", "", 60.0, 10.0, (50.0, 70.0)))
    assert 'width="60.00%"' in bar
    assert 'x1="50.00%" x2="70.00%"' in bar
    assert bar.count("<circle") == 2
    assert plots.value_bar(Row("centralised", "", None)) == ""


def test_names_are_escaped_in_drawings() -> None:
    drawing = plots.small_plot('"><script>', [(0, 1.0), (1, 2.0)])
    assert "<script>" not in drawing
    assert "&#34;&gt;&lt;script&gt;" in drawing


@given(st.floats(0, 99), st.floats(0.1, 60))
def test_no_level_lies_outside_its_drawing(low: float, room: float) -> None:
    frame = axes.Frame((0.0, 1.0), axes.percentages([(low, 0.0), (low + room, 0.0)]), 340)
    heights = [float(y) for y in re.findall(r'y1="([-0-9.]+)"', "".join(axes.levels(frame)))]
    assert heights
    assert all(0 <= y <= 340 for y in heights)
