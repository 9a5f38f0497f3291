"""A node's part of a sum over nodes, as it leaves through the gate: weighed, in whole numbers, and masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fedstill.core.errors import DataError, QueryRefused
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import Corruption, SumWeighting, sum_contributions
from fedstill.protocol.wire_format import Tensors


@dataclass(frozen=True)
class SumContribution:
    """How a release becomes a part of a sum.

    Args:
        told: counts that the node has let out, noised if they had to be: it is weighed by these, and by
            nothing that has not left through its gate.
        least: that a count is taken for in weighing: noise may leave one node alone with any of a class that
            nobody has, and the sum would be that node's answer.
        mask: what is added to each part, by its place; None: nothing, which changes no sum.
        spoil, always: as :func:`~fedstill.protocol.secure_aggregation.sum_contributions` has them.
        settle: refuses counts or sizes, by the way of weighing, that differ from those of earlier runs.
    """

    told: dict[str, torch.Tensor]
    least: float = 0.0
    mask: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    spoil: Corruption | None = None
    always: bool = False
    settle: Callable[[str, torch.Tensor], None] | None = None

    def cover(self, node: str, query: Query, released: Tensors) -> dict[str, torch.Tensor]:
        """What leaves of what the gate lets out, as whole numbers of 64 bits.

        Raises:
            QueryRefused: numbers that are none, where no mask hides whose they are; or weights that were
                not asked for before.
        """
        kinds = query.kinds()
        try:
            added = sum_contributions(released, kinds, query.sums, self.told, self.spoil, self.always)
        except DataError as error:
            raise QueryRefused(node, query.name, f"sums: {error}") from error
        except KeyError as missing:
            rule = f"sums: {missing} of its data, which weigh its answer, were not asked before"
            raise QueryRefused(node, query.name, rule) from missing
        if self.settle is not None:
            for way, counts in self._counts(query, released):
                self.settle(way, counts)
        if self.mask is None:
            return added
        return {name: self.mask(added[name], place) for place, name in enumerate(sorted(added))}

    def keep(self, query: Query, released: Tensors) -> None:
        """Weigh by counts that have left, from now on: by the first, as noise is another each time."""
        for way, counts in self._counts(query, released):
            self.told.setdefault(way, counts.clamp_min(self.least))

    @staticmethod
    def _counts(query: Query, released: Tensors) -> Iterator[tuple[SumWeighting, torch.Tensor]]:
        """The counts and sizes in a release, by the way of weighing."""
        kinds = query.kinds()
        for name, tensor in released.items():
            if kinds[name].of == "counts" and query.sums.get(name) == "sum":
                yield "counts" if tensor.ndim else "size", tensor.detach().cpu().clone()
