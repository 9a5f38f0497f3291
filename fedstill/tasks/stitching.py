"""Patches put back into the pictures that they were cut from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedstill.core.dataset import Cases
from fedstill.core.errors import DataError


@dataclass(frozen=True, eq=False)
class Picture:
    """What models say of one case: ``values`` (C, height, width), 0 where no patch is, as ``covered``
    tells."""

    case: int
    values: torch.Tensor
    covered: torch.Tensor


def stitch(outputs: torch.Tensor, cases: Cases) -> Iterator[Picture]:
    """Whole pictures from patches ``(N, C, h, w)``, one case after another; patches that overlap are
    averaged.

    Average probabilities, not logits: a patch that is sure does not outweigh one that is not. What sticks out
    of a picture at its right or lower end is cut off.

    Raises:
        DataError: a patch that lies outside its picture, or cases without places.

    >>> cases = Cases(torch.tensor([0, 0]), ("a",), ("",), torch.tensor([[0, 0], [0, 1]]), ((1, 3),))
    >>> patches = torch.tensor([[1.0, 1.0], [3.0, 3.0]]).view(2, 1, 1, 2)
    >>> [picture.values.tolist() for picture in stitch(patches, cases)]
    [[[[1.0, 2.0, 3.0]]]]
    """
    if cases.places is None:
        raise DataError("cases have no places: allowed are patches with the place of each in its picture")
    places = cases.places.tolist()
    for case in cases.present():
        height, width = cases.sizes[case]
        total = outputs.new_zeros(outputs.shape[1], height, width)
        count = outputs.new_zeros(height, width)
        for n in torch.nonzero(cases.of == case).flatten().tolist():
            top, left = places[n]
            if not (0 <= top < height and 0 <= left < width):
                size = f"{height} x {width}"
                raise DataError(
                    f"patch {n} is at ({top}, {left}): allowed are places in its picture of {size}"
                )
            patch = outputs[n, :, : height - top, : width - left]
            bottom, right = top + patch.shape[1], left + patch.shape[2]
            total[:, top:bottom, left:right] += patch
            count[top:bottom, left:right] += 1
        yield Picture(case, total / count.clamp_min(1), count > 0)
