"""Server of a run that recalibrates its student's batch norm after the method's last step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fedstill.methods._server import Server
from fedstill.models.module_utils import to_vector
from fedstill.protocol.recalibration import QUERY, Recalibration, set_statistics


@dataclass(eq=False)
class RecalibratingServer(Server):
    """Server whose last steps are passes of a recalibration (:mod:`fedstill.protocol.recalibration`).

    Args:
        network: the student, whole if the method splits it; both have the same parameters.
        recalibration: the number of passes.
        clip: largest root mean square of one example's statistics.
    """

    network: nn.Module = field(kw_only=True)
    recalibration: Recalibration = field(kw_only=True)
    clip: float = field(kw_only=True)

    @property
    def total_steps(self) -> int:
        """Number of steps of a whole run, with the passes."""
        return super().total_steps + self.recalibration.passes

    def step(self) -> Mapping[str, float]:
        """Run one step of the method, or one pass after its last."""
        if self.completed_steps < super().total_steps:
            return super().step()
        sums = (
            self.query(QUERY, parameters=to_vector(self.network), clip=self.clip)["moments"].double().sum(0)
        )
        set_statistics(self.network, sums, self.clip)
        self.completed_steps += 1
        return {}
