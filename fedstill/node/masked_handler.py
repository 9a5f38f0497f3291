"""Request handler of a node whose responses are released under masks, as contributions to sums over nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fedstill.core.compute import Compute
from fedstill.core.errors import QueryRefused
from fedstill.node.exchanges import Exchange
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.request_handler import RequestHandler
from fedstill.node.sum_encoder import SumEncoder
from fedstill.node.sum_masks import SumMasks
from fedstill.protocol.digests import sha256_digest
from fedstill.protocol.queries import NodeSide, Query
from fedstill.protocol.secure_aggregation import SumRequest, power_of_two_scale
from fedstill.protocol.wire_format import Tensors, WireConfig, decompress


class MaskedHandler(RequestHandler):
    """Responds to queries for one node under secure aggregation.

    Args:
        masks: the node's masks in this run.
        group: a group of this node alone. The other arguments are those of :class:`RequestHandler`.
    """

    def __init__(
        self,
        masks: SumMasks,
        group: NodeGroup,
        side: NodeSide,
        compute: Compute,
        last_numbers: dict[str, int],
        wire: WireConfig,
    ) -> None:
        super().__init__(group, side, compute, last_numbers, wire)
        self.masks = masks

    def _hash_history(
        self, name: str, number: int, tensors: Tensors, differentiable: bool, request: SumRequest | None
    ) -> str:
        (node,) = self.group.nodes
        # A node that comes back has missed queries. Only summed queries with recovery may ignore the history:
        # only sums can be read without some nodes.
        summed = bool(self.side.queries[name].sums)
        history = "" if summed and request is not None and request.recover else node.query_history_hash
        return sha256_digest(
            tensors, name, str(number), str(differentiable), history, _memory_layout(tensors)
        )

    def _admit_sum(
        self, query: Query, request: SumRequest | None, output_gradients: Iterable[Tensors] = ()
    ) -> SumRequest | None:
        if not query.sums:
            return request
        if any(decompress(gradients).keys() != query.sums.keys() for gradients in output_gradients):
            rule = f"sums: expected gradients of {', '.join(query.sums)} only"
            raise QueryRefused(self.group.nodes[0].name, query.name, rule)
        if any(power_of_two_scale(decompress(gradients)) != 1.0 for gradients in output_gradients):
            rule = "sums: expected gradients with a scale of 1 (largest value from 0.5 to below 1)"
            raise QueryRefused(self.group.nodes[0].name, query.name, rule)
        (node,) = self.group.nodes
        # Check before computing: otherwise the kind of refusal would reveal a result.
        for weighting in query.sums.values():
            if weighting in ("size", "counts") and weighting not in node.released_counts:
                rule = f"sums: '{weighting}' of its data, which weight its response, were not queried before"
                raise QueryRefused(node.name, query.name, rule)
        return self.masks.admit(
            query.name, request, self.side.weightings(query.name, self._run_name_if_noised)
        )

    def rules_by_refused_query(self) -> dict[str, str]:
        """Return the rule that refuses each query because of earlier sums; checked before any training."""
        if self.masks.policy.sums_may_differ:
            return {}
        return self.masks.history.weighting_conflicts(self.side, self._run_name_if_noised)

    @property
    def _run_name_if_noised(self) -> str:
        """Name of the run if counts have noise, which differs from run to run; else empty."""
        gate = self.group.nodes[0].gate
        return gate.run if gate.budgets is not None and gate.budgets.mechanism.protects else ""

    def _sum_encoder(
        self, node: Node, request: SumRequest | None, exchange: Exchange, gradients: Tensors | None = None
    ) -> SumEncoder | None:
        encoder = super()._sum_encoder(node, request, exchange)
        if encoder is None or request is None:
            return None
        context_hashes = (
            exchange.query_history_hash,
            "" if gradients is None else sha256_digest(gradients, _memory_layout(gradients)),
        )
        mask = self.masks.mask_function(request, exchange.query.name, context_hashes)
        check_weights = (
            None if self._run_name_if_noised else self.masks.check_weights
        )  # noisy counts differ in each run
        replacement, always_replace = (
            self.masks.random_replacement_function(request),
            self.masks.has_reached_corruption_limit,
        )
        return replace(
            encoder,
            add_mask=mask,
            replacement=replacement,
            always_replace=always_replace,
            check_weights=check_weights,
        )


def _memory_layout(tensors: Tensors) -> str:
    """Return the strides of tensors as text. Equal values in another layout give responses with other last
    digits.
    """
    return " ".join(f"{name}{tuple(tensor.stride())}" for name, tensor in sorted(tensors.items()))
