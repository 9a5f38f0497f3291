"""Features as a picture: two principal axes, one dot an input, one colour a class (FedMD-CG, Fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from markupsafe import Markup

from fedstill.errors import ArgumentError

SIDE, GAP, HEADING = 220, 20, 30  # pixels of a panel, between two, and above each
COLOURS = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
)


class Panel(NamedTuple):
    """One cloud of dots: its title, places ``(N, 2)`` and class indices ``(N,)``."""

    title: str
    points: torch.Tensor
    labels: torch.Tensor


def pca(features: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the ``count`` directions of largest variance, largest first.

    An axis points where its largest entry is positive, so that no machine draws it the other way round.

    Args:
        features: ``(N, p)``.
        count: axes, at most N and p.

    Returns:
        ``(p,)`` and ``(p, count)``: ``(features - mean) @ axes`` are the coordinates.

    Raises:
        ArgumentError: more axes than there can be.

    >>> mean, axes = pca(torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]), 1)
    >>> mean, axes
    (tensor([2., 1.]), tensor([[1.],
            [0.]]))
    """
    if not 1 <= count <= min(features.shape):
        raise ArgumentError("count", count, f"from 1 to {min(features.shape)}")
    mean = features.mean(0)
    axes = torch.linalg.svd(features - mean, full_matrices=False).Vh[:count].T  # (p, count)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))  # (1, count)
    return mean, axes * largest.sign() + 0.0  # no -0


def scatter(panels: Sequence[Panel], classes: Sequence[str]) -> Markup:
    """Panels side by side on one scale, as an SVG file of its own with the classes' names below.

    Args:
        panels: at least one.
        classes: names by class index.

    Raises:
        ArgumentError: no panel.
    """
    if not panels:
        raise ArgumentError("panels", panels, "at least one")
    every = torch.cat([panel.points for panel in panels])
    low, high = every.min(0).values, every.max(0).values
    scale = SIDE / float((high - low).max().clamp_min(1e-12))
    parts = []
    for place, panel in enumerate(panels):
        dots = [
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="1.6" fill="{}"/>').format(
                x, SIDE - y, COLOURS[label % len(COLOURS)]
            )
            for (x, y), label in zip(
                ((panel.points - low) * scale).tolist(), panel.labels.tolist(), strict=True
            )
        ]
        parts.append(
            Markup(
                '<g transform="translate({x} {y})"><text y="-10">{title}</text>'
                '<rect width="{side}" height="{side}"/>{dots}</g>\n'
            ).format(
                x=place * (SIDE + GAP), y=HEADING, title=panel.title, side=SIDE, dots=Markup("").join(dots)
            )
        )
    for index, name in enumerate(classes):
        parts.append(
            Markup('<text x="{}" y="{}" style="fill:{}">{}</text>\n').format(
                60 * index, HEADING + SIDE + 24, COLOURS[index % len(COLOURS)], name
            )
        )
    width = max(len(panels) * (SIDE + GAP) - GAP, 60 * len(classes))
    style = "text{font:13px sans-serif;fill:#777}rect{fill:none;stroke:#9996}"
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" viewBox="-2 0 {w} {h}"'
        ' width="{w}" height="{h}"><style>{style}</style>\n{parts}</svg>\n'
    ).format(
        label="Features on two principal axes: " + ", ".join(panel.title for panel in panels),
        w=width + 4,
        h=HEADING + SIDE + 34,
        style=Markup(style),
        parts=Markup("").join(parts),
    )
