"""A picture in which objects are told apart, before it is cut into patches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import DataError
from fedstill.data.images import Bytes


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture and its objects.

    Args:
        image: ``(3, H, W)`` uint8, or floats in [0, 1].
        instances: ``(H, W)``, 0 where there is no object.
        name: of the picture, no other has it.
        site: an organ, a source: what nodes may be.
        test: whether it is for testing; None where the source does not say.
        patient: whose picture it is; empty where that is not known.
    """

    image: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    instances: npt.NDArray[np.int32]
    name: str
    site: str = ""
    test: bool | None = None
    patient: str = ""


def picture(
    image: Bytes, instances: npt.NDArray[np.int32], name: str, site: str, test: bool | None, what: str
) -> Picture:
    """A picture in colour: grey becomes colour by repetition.

    Raises:
        DataError: objects of another size than the image; begins with ``what``.
    """
    if image.shape[1:] != instances.shape:
        sizes = f"{image.shape[1]} x {image.shape[2]} and its objects {instances.shape}"
        raise DataError(f"{what}: the image is {sizes}: allowed are equal sizes")
    return Picture(image if len(image) == 3 else np.repeat(image[:1], 3, axis=0), instances, name, site, test)
