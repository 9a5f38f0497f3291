"""A node's part of a sum over nodes, as it leaves through the gate: weighed, in whole numbers, and masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fedstill.core.errors import DataError, QueryRefused
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import Replacement, SumWeighting, sum_contributions
from fedstill.protocol.wire_format import Tensors


@dataclass(frozen=True)
class SumContribution:
    """How a release becomes a part of a sum.

    Args:
        counts: counts that the node has let out, noised if they had to be: it is weighed by these, and by
            nothing that has not left through its gate.
        min_count: that a count is taken for in weighing: noise may leave one node alone with any of a class that
            nobody has, and the sum would be that node's answer.
        add_mask: what is added to each part, by its place; None: nothing, which changes no sum.
        replacement, always_replace: as :func:`~fedstill.protocol.secure_aggregation.sum_contributions` has them.
        check_weights: refuses counts or sizes, by the way of weighing, that differ from those of earlier runs.
    """

    counts: dict[str, torch.Tensor]
    min_count: float = 0.0
    add_mask: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    replacement: Replacement | None = None
    always_replace: bool = False
    check_weights: Callable[[str, torch.Tensor], None] | None = None

    def mask(self, node: str, query: Query, released: Tensors) -> dict[str, torch.Tensor]:
        """What leaves of what the gate lets out, as whole numbers of 64 bits.

        Raises:
            QueryRefused: numbers that are none, where no mask hides whose they are; or weights that were
                not asked for before.
        """
        kinds = query.released_kinds()
        try:
            parts = sum_contributions(
                released, kinds, query.sums, self.counts, self.replacement, self.always_replace
            )
        except DataError as error:
            raise QueryRefused(node, query.name, f"sums: {error}") from error
        except KeyError as missing:
            rule = f"sums: {missing} of its data, which weigh its answer, were not asked before"
            raise QueryRefused(node, query.name, rule) from missing
        if self.check_weights is not None:
            for weighting, counts in self._released_counts(query, released):
                self.check_weights(weighting, counts)
        if self.add_mask is None:
            return parts
        return {name: self.add_mask(parts[name], index) for index, name in enumerate(sorted(parts))}

    def record_counts(self, query: Query, released: Tensors) -> None:
        """Weigh by counts that have left, from now on: by the first, as noise is another each time."""
        for weighting, counts in self._released_counts(query, released):
            self.counts.setdefault(weighting, counts.clamp_min(self.min_count))

    @staticmethod
    def _released_counts(query: Query, released: Tensors) -> Iterator[tuple[SumWeighting, torch.Tensor]]:
        """The counts and sizes in a release, by the way of weighing."""
        kinds = query.released_kinds()
        for name, tensor in released.items():
            if kinds[name].category == "counts" and query.sums.get(name) == "sum":
                yield "counts" if tensor.ndim else "size", tensor.detach().cpu().clone()
