"""A node's contribution to a sum over nodes: weighted, as integers, and masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fedstill.core.errors import DataError, QueryRefused
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import Replacement, SumWeighting, sum_contributions
from fedstill.protocol.wire_format import Tensors


@dataclass(frozen=True)
class SumEncoder:
    """Conversion of a release into a contribution to a sum.

    Args:
        counts: counts that the node has released, with noise if required. They weight its responses;
            nothing else that has not passed the gate does.
        min_count: lower bound of a count used as a weight. Noise may leave one node alone with a positive
            count of a class that no node has, and the sum would be that node's response.
        add_mask: adds the mask to one tensor, given its index; None: no mask, which leaves all sums
            unchanged.
        replacement, always_replace: arguments of
            :func:`~fedstill.protocol.secure_aggregation.sum_contributions`.
        check_weights: refuses counts or sizes that differ from those of earlier runs, by weighting.
    """

    counts: dict[str, torch.Tensor]
    min_count: float = 0.0
    add_mask: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    replacement: Replacement | None = None
    always_replace: bool = False
    check_weights: Callable[[str, torch.Tensor], None] | None = None

    def encode(self, node: str, query: Query, released: Tensors) -> dict[str, torch.Tensor]:
        """Return the contribution to release: 64-bit integers by name.

        Raises:
            QueryRefused: numbers are not finite and no mask hides their owner, or the weights were not
                queried before.
        """
        kinds = query.released_kinds()
        try:
            parts = sum_contributions(
                released, kinds, query.sums, self.counts, self.replacement, self.always_replace
            )
        except DataError as error:
            raise QueryRefused(node, query.name, f"sums: {error}") from error
        except KeyError as missing:
            rule = f"sums: {missing} of its data, which weight its response, were not queried before"
            raise QueryRefused(node, query.name, rule) from missing
        if self.check_weights is not None:
            for weighting, counts in self._released_counts(query, released):
                self.check_weights(weighting, counts)
        if self.add_mask is None:
            return parts
        return {name: self.add_mask(parts[name], index) for index, name in enumerate(sorted(parts))}

    def record_counts(self, query: Query, released: Tensors) -> None:
        """Use released counts as weights from now on; only the first release counts."""
        for weighting, counts in self._released_counts(query, released):
            self.counts.setdefault(weighting, counts.clamp_min(self.min_count))

    @staticmethod
    def _released_counts(query: Query, released: Tensors) -> Iterator[tuple[SumWeighting, torch.Tensor]]:
        """Yield the counts and sizes in a release, with their weighting."""
        kinds = query.released_kinds()
        for name, tensor in released.items():
            if kinds[name].category == "counts" and query.sums.get(name) == "sum":
                yield "counts" if tensor.ndim else "size", tensor.detach().cpu().clone()
