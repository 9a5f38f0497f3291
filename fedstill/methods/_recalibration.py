"""Server of a run that recalibrates its student's batch norm after the method's last step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from fedstill.methods._server import Server
from fedstill.models.module_utils import to_vector
from fedstill.protocol.recalibration import QUERY, batch_norm_layers, set_statistics


@dataclass(eq=False)
class RecalibratingServer(Server):
    """Server whose last steps each recalibrate one layer (:mod:`fedstill.protocol.recalibration`).

    Args:
        network: the student, whole if the method splits it; both have the same parameters.
        layer_order: numbers of its batch norm layers, in the order of the forward pass.
        clip: largest root mean square of one example's statistics.
    """

    network: nn.Module = field(kw_only=True)
    layer_order: Sequence[int] = field(kw_only=True)
    clip: float = field(kw_only=True)

    @property
    def total_steps(self) -> int:
        """Number of steps of a whole run, with one for each layer."""
        return super().total_steps + len(self.layer_order)

    def step(self) -> Mapping[str, float]:
        """Run one step of the method or, after its last, recalibrate the next layer."""
        done = self.completed_steps - super().total_steps
        if done < 0:
            return super().step()
        number = self.layer_order[done]
        parameters = to_vector(self.network)
        responses = self.query(QUERY, parameters=parameters, layer=number, clip=self.clip)
        sums = responses["moments"].double().sum(0)  # over the nodes
        set_statistics(batch_norm_layers(self.network)[number], sums, self.clip)
        self.completed_steps += 1
        return {}
