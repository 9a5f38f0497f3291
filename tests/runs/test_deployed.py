"""What is said while a run at a deployed federation waits; whole runs are in tests/federation."""

from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("nvflare")

from fedstill.federation.admin import Admin
from fedstill.runs.deployed import _waits_for


class Connected:
    """Stands for the server's word of who is there."""

    def nodes(self) -> dict[str, float]:
        return {"north": 1.0, "south": 2.0}


def test_a_node_that_left_before_the_job_began_is_named() -> None:
    admin = cast(Admin, Connected())
    assert _waits_for(admin, ["north", "east", "south", "west"]).startswith("waiting for east, west, which")
    assert _waits_for(admin, ["north"]) == "waiting: FLARE begins once all these nodes are free"
