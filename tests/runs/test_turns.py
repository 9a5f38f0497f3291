"""What is kept of a server's turns: generated inputs, and the maps that they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from fedstill.core.progress import Bars
from fedstill.core.records import Records
from fedstill.methods.server import Server
from fedstill.runs.turns import drive


class Maker:
    """Makes the same images each time, from the same maps: all that :func:`drive` needs of a server."""

    unit, total = "step", 2

    def __init__(self, maps: torch.Tensor | None) -> None:
        self.done, self.maps = 0, maps

    def step(self) -> Mapping[str, float]:
        self.done += 1
        return {"loss": 1.0}

    def imagine(self, count: int) -> torch.Tensor:
        return torch.full((count, 1, 4, 4), 0.5)

    def imagined_from(self, count: int) -> torch.Tensor | None:
        return None if self.maps is None else self.maps[:count]


@pytest.mark.parametrize("told", [True, False])
def test_maps_are_kept_beside_what_was_made_of_them(tmp_path: Path, told: bool) -> None:
    maps = torch.arange(3, dtype=torch.uint8).view(3, 1, 1).expand(3, 4, 4) if told else None
    records = Records(tmp_path)
    drive(
        cast(Server, Maker(maps)),
        records,
        Bars(False),
        metric="dice",
        every=1,
        samples=2,
        pixels=lambda x: x.mul(255).round().to(torch.uint8),
        before=0.0,
        look=lambda: {"dice": 50.0},
        save=lambda: None,
    )
    result: dict[str, Any] = {}
    records.finish(result, None)
    kept = load_file(tmp_path / "samples.safetensors")
    pictures = {"000001", "000002"}
    assert set(kept) == (pictures | {"000001.maps", "000002.maps"} if told else pictures)
    if maps is not None:
        assert torch.equal(kept["000002.maps"], maps[:2])
    assert [line["dice"] for line in records.metrics] == [50.0, 50.0]
