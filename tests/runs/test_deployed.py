"""Messages while a run on a deployed federation waits; whole runs are in tests/federation."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

pytest.importorskip("nvflare")

from fedstill.data.loading import load
from fedstill.federation.admin import Admin
from fedstill.runs.deployment import _waiting_reason, unused_data_note
from fedstill.runs.spec import from_dict


class Connected:
    """Replaces the admin's connection; two nodes are connected."""

    def nodes(self) -> dict[str, float]:
        return {"north": 1.0, "south": 2.0}


def test_names_node_that_left_before_job() -> None:
    admin = cast(Admin, Connected())
    assert _waiting_reason(admin, ["north", "east", "south", "west"]).startswith(
        "waiting for east, west, which"
    )
    assert _waiting_reason(admin, ["north"]) == "waiting: FLARE begins once all these nodes are free"


def test_notes_unused_training_data(tmp_path: Path) -> None:
    """In a simulation, the unused four fifths of the server's file would be the nodes' training data."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (50, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "study.npz", images=images, labels=np.arange(50) % 10)
    notes = {}
    for name in ("digits", str(tmp_path / "study.npz")):
        config = from_dict({"method": {"name": "fedkd"}, "data": {"name": name}})
        notes[name] = unused_data_note(config, load(config.data, config.task, train_needed=False))
    line = notes.pop(str(tmp_path / "study.npz"))
    assert line.startswith("The run is tested on 10 examples of study: the other 40 are training examples")
    assert notes == {"digits": ""}
