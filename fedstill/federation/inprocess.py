"""All nodes in this process: small networks stacked on a GPU; on a CPU mostly several at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch

from fedstill.core.compute import Compute
from fedstill.federation.federation import Federation
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.secure_aggregation import SentQuery
from fedstill.models import PREDICTS, carries_gradient
from fedstill.models.module_utils import parameter_count
from fedstill.node.exchanges import MAX_EXCHANGES
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup, group_by_architecture, has_only_matrix_products, stacking_key
from fedstill.node.request_handler import RequestHandler
from fedstill.protocol.digests import digest
from fedstill.protocol.queries import NodeSide, Query
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import Tensors

NodeGroups = list[list[Node]]


def partition(nodes: Sequence[Node], stacked: bool) -> NodeGroups:
    """Nodes in groups: equal architectures together, or each node alone."""
    return list(alike(nodes)) if stacked else [[node] for node in nodes]


WIDE = 2_000_000  # parameters of a network that fills a GPU by itself


def stacks(compute: Compute, nodes: Sequence[Node], *, alone: bool = False) -> bool:
    """Whether equal architectures are computed together, as the engine says.

    On a GPU ``auto`` stacks small networks, of which one cannot fill it, but for their training alone: there
    steps are recorded, and those of one network after another's are faster (``benchmarks/gpu.py``). On a CPU
    it stacks only networks of matrix products, where each core would have more than three of each kind:
    stacked convolutions are grouped ones, which take two to three times as long there
    (``benchmarks/grid.py``), and nodes that are alone are computed on all cores at once
    (:mod:`fedstill.core.workers`).

    Args:
        alone: for nodes' training by themselves, with no query in it.
    """
    if compute.config.name != "auto":
        return compute.config.name == "stacked"
    if compute.device.type == "cuda":
        models = [node.model for node in nodes]
        if alone and compute.records(*models):
            return False
        return all(parameter_count(model) < WIDE for model in models)
    networks = [network for node in nodes for network in node.modules.values()]
    kinds = len({signature(node.model) for node in nodes})
    return len(nodes) > 3 * compute.workers.count * kinds and all(multiplies_only(each) for each in networks)


class InProcess(Federation):
    """Nodes as objects of this process, in groups (:func:`partition`) that are computed together."""

    def __init__(
        self,
        nodes: Sequence[Node],
        groups: Sequence[Sequence[Node]],
        side: NodeSide,
        compute: Compute,
        link: LinkConfig | None = None,
    ) -> None:
        super().__init__([node.name for node in nodes], side.queries, link)
        self._members = {node.name: node for node in nodes}
        self._side, self._compute = side, compute
        self._groups = [[node.name for node in group] for group in groups]
        self._last = {node.name: -1 for node in nodes}  # the last number that each has served
        self._handlers: OrderedDict[tuple[str, ...], RequestHandler] = OrderedDict()
        self._asked_of: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # number -> who was asked

    def _rule(self, node: str, query: Query) -> str | None:
        member = self._members[node]
        shape = tuple(member.data.inputs.shape[1:])
        if query.differentiable and not carries_gradient(member.model, shape):
            return PREDICTS
        return member.gate.objection(query)

    def _limit(self, node: str) -> int | None:
        return self._members[node].gate.policy.max_queries or None

    def _answer(self, asked: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        self._asked_of[sent.number] = asked
        while len(self._asked_of) > KEPT:
            self._asked_of.popitem(last=False)
        handlers = self._serving(asked)
        responses: dict[str, Tensors] = {}
        content = digest(sent.query, sent.tensors)  # once: each time it would come off the device anew
        for handler in handlers:
            handler.receive(sent.query, sent.number, sent.tensors, sent.differentiable, sent.call, content)
        self._at_once(sent.query, handlers, lambda handler: handler.compute_answers(sent.number))
        for handler in handlers:
            names = [node.name for node in handler.group.nodes]
            responses.update(zip(names, handler.release_answers(sent.number), strict=True))
        return {name: responses[name] for name in asked}

    def _pull_back(
        self, number: int, query: str, pulls: Mapping[str, Tensors], call: SumRequest | None
    ) -> Mapping[str, Tensors]:
        mine: dict[RequestHandler, dict[str, Tensors]] = {}
        # Before anything is computed: they come off the device, which would be waited for each time.
        contents = {node: digest(query, pull) for node, pull in pulls.items()}
        for handler in self._serving(self._asked_of.get(number, tuple(pulls))):
            some = {node.name: pulls[node.name] for node in handler.group.nodes if node.name in pulls}
            if some:
                mine[handler] = some
        self._at_once(
            f"back {query}",
            list(mine),
            lambda handler: handler.compute_gradients(number, mine[handler], call, contents),
        )
        gradients: dict[str, Tensors] = {}
        for handler in mine:
            gradients.update(handler.release_gradients(number, mine[handler]))
        return {name: gradients[name] for name in pulls}

    def _placed(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return self._compute.here(tensors)

    def _at_once(
        self, what: str, handlers: Sequence[RequestHandler], work: Callable[[RequestHandler], None]
    ) -> None:
        """Several handlers at a time; who learns privately is charged meanwhile, and has its turn alone."""
        together = [handler for handler in handlers if not handler.private]
        if len(self._groups) > 1:  # else the one has all cores for itself
            self._compute.workers.each(work, together, [(what, handler.kind) for handler in together])
        for handler in handlers:
            if handler.private or len(self._groups) == 1:
                work(handler)

    def _serving(self, asked: tuple[str, ...]) -> list[RequestHandler]:
        """A request handler for those of each group that are asked, the same whenever the same are asked."""
        handlers: list[RequestHandler] = []
        for group in self._groups:
            names = tuple(name for name in group if name in asked)
            if not names:
                continue
            if names not in self._handlers:
                members = Group([self._members[name] for name in names])
                self._handlers[names] = RequestHandler(
                    members, self._side, self._compute, self._last, self.link
                )
            self._handlers.move_to_end(names)
            handlers.append(self._handlers[names])
        while len(self._handlers) > len(self._groups) + KEPT:  # each keeps answers, in case it is asked again
            self._handlers.popitem(last=False)
        return handlers
