"""Principal axes, and the picture of features on them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

from fedstill.errors import ArgumentError
from fedstill.report.features import COLOURS, Panel, pca, scatter


def test_axes_are_those_of_largest_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([1.0, 5.0, 3.0])
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
    features = torch.randn(4000, 3, generator=generator) * spread @ turn + 7
    mean, axes = pca(features, 2)
    assert mean.tolist() == pytest.approx([7, 7, 7], abs=0.3)
    assert abs(float(axes[:, 0] @ turn[1])) == pytest.approx(1.0, abs=1e-2)
    assert abs(float(axes[:, 1] @ turn[2])) == pytest.approx(1.0, abs=1e-2)
    variances = ((features - mean) @ axes).var(0)
    assert variances.sqrt().tolist() == pytest.approx([5.0, 3.0], rel=0.05)


def test_axes_do_not_flip() -> None:
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    mean, axes = pca(features, 3)
    mirrored = pca(-features, 3)
    torch.testing.assert_close(mirrored[1], axes, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mirrored[0], -mean)
    assert (axes.gather(0, axes.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("count", [0, 3])
def test_no_more_axes_than_there_are(count: int) -> None:
    with pytest.raises(ArgumentError, match="count is"):
        pca(torch.randn(5, 2), count)


def test_the_picture_has_a_dot_for_each_input_in_its_classs_colour() -> None:
    panels = [
        Panel("teacher", torch.tensor([[0.0, 0.0], [10.0, 5.0]]), torch.tensor([0, 1])),
        Panel("a < b", torch.tensor([[10.0, 0.0]]), torch.tensor([1])),
    ]
    svg = scatter(panels, ["zero", "one"])
    root = ElementTree.fromstring(svg)
    dots = root.findall(".//{http://www.w3.org/2000/svg}circle")
    assert [dot.get("fill") for dot in dots] == [COLOURS[0], COLOURS[1], COLOURS[1]]
    places = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in dots]
    assert places == [(0.0, 220.0), (220.0, 110.0), (220.0, 220.0)]  # one scale for all panels, y upwards
    titles = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert titles == ["teacher", "a < b", "zero", "one"]
    assert not re.search(r"nan|inf", svg)


def test_equal_points_and_no_panels() -> None:
    same = Panel("same", torch.ones(3, 2), torch.tensor([0, 0, 0]))
    assert "nan" not in scatter([same], ["zero"])
    with pytest.raises(ArgumentError, match="panels"):
        scatter([], [])
