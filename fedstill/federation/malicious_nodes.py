"""Federation of nodes of one process, some of which an adversary controls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, list_names
from fedstill.core.seeds import torch_generator
from fedstill.federation.adversaries import Adversary
from fedstill.federation.federation import SentQuery
from fedstill.federation.inprocess import InProcess
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.responses import Responses
from fedstill.node.exchanges import MAX_EXCHANGES
from fedstill.node.node import Node
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors
from fedstill.tasks import Task


class Coalition(NamedTuple):
    """Nodes of a simulation that an adversary controls.

    Args:
        adversary: what they do.
        names: the malicious nodes.
        seed: the run's seed.
    """

    adversary: Adversary
    names: frozenset[str]
    seed: int

    @property
    def notes(self) -> list[str]:
        """Line for the run's report; none without malicious nodes."""
        if not self.names:
            return []
        what = self.adversary.registered_name
        return [f"malicious nodes ({what}): {list_names(sorted(self.names))}; local metrics include them"]

    def data_of(self, name: str, data: TensorData, task: Task) -> TensorData:
        """Return the data that a node learns from."""
        return self.adversary.poison(data, task) if name in self.names else data

    def corrupt(
        self, name: str, z: torch.Tensor, honest: Sequence[torch.Tensor], *place: str | int
    ) -> torch.Tensor:
        """Return what a malicious node responds, in the wire format of ``z``; arguments as of
        :meth:`.Adversary.corrupt`."""
        alike = [each.float() for each in honest if each.shape == z.shape]
        stacked = torch.stack(alike) if alike else torch.zeros(0, *z.shape, device=z.device)
        generator = torch_generator(self.seed, name, "adversary", *place)
        corrupted = self.adversary.corrupt(z.float(), stacked, generator)
        if not z.is_floating_point():  # quantization levels: others than these would be found
            known = torch.cat([stacked, z.float().unsqueeze(0)])
            corrupted = corrupted.round().clamp(known.min(), known.max())
        return corrupted.to(z.dtype)


def form_coalition(
    adversary: Adversary, nodes: Sequence[str], task: Task, seed: int, secure_aggregation: bool
) -> Coalition:
    """Sample the nodes that an adversary controls.

    Raises:
        ArgumentError: no node would be honest, or the adversary cannot attack such a run.
    """
    name = adversary.registered_name
    if adversary.count >= len(nodes):
        raise ArgumentError("adversary.nodes", adversary.count, f"fewer than the {len(nodes)} nodes")
    if adversary.task_kinds and task.kind not in adversary.task_kinds:
        expected = f"another one, as targets of this task are of kind {task.kind!r}"
        raise ArgumentError("adversary.name", name, expected)
    if adversary.categories and secure_aggregation:
        expected = "label-flipping or none, as with link.secure_aggregation the server gets sums alone"
        raise ArgumentError("adversary.name", name, expected)
    order = torch.randperm(len(nodes), generator=torch_generator(seed, "adversary")).tolist()
    return Coalition(adversary, frozenset(nodes[i] for i in order[: adversary.count]), seed)


class InProcessWithAdversary(InProcess):
    """Federation of nodes of this process, some of which an adversary controls.

    Args:
        coalition: the malicious nodes.
        nodes, groups, side, compute, link: as of :class:`.InProcess`.

    Raises:
        ArgumentError: nodes release nothing that the adversary could change.
    """

    def __init__(
        self,
        coalition: Coalition,
        nodes: Sequence[Node],
        groups: Sequence[Sequence[Node]],
        side: NodeSide,
        compute: Compute,
        link: LinkConfig | None = None,
    ) -> None:
        super().__init__(nodes, groups, side, compute, link)
        self._coalition = coalition
        self._unchanged: OrderedDict[int, Mapping[str, Tensors]] = OrderedDict()
        categories = coalition.adversary.categories
        if categories and not any(self._changed(query) for query in side.queries.values()):
            expected = (
                f"one that changes what this method's nodes release, not {' or '.join(sorted(categories))}"
            )
            raise ArgumentError("adversary.name", coalition.adversary.registered_name, expected)

    def _changed(self, query: Query) -> tuple[str, ...]:
        """Return the names of the tensors that malicious nodes change."""
        categories = self._coalition.adversary.categories
        return tuple(name for name, kind in query.releases.items() if kind.category in categories)

    def collect_responses(self, queried: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        responses = super().collect_responses(queried, sent)
        changed = self._changed(self.queries[sent.query])
        if not changed:
            return responses
        if sent.differentiable:
            self._unchanged[sent.number] = responses
            while len(self._unchanged) > MAX_EXCHANGES:
                self._unchanged.popitem(last=False)
        return {
            node: self._corrupt(node, tensors, responses, changed, sent.number)
            for node, tensors in responses.items()
        }

    def _corrupt(
        self,
        node: str,
        tensors: Tensors,
        responses: Mapping[str, Tensors],
        changed: Sequence[str],
        number: int,
    ) -> Tensors:
        if node not in self._coalition.names:
            return tensors
        corrupted = dict(tensors)
        for name in changed:
            if name in tensors:
                honest = [
                    each[name]
                    for other, each in responses.items()
                    if other not in self._coalition.names and name in each
                ]
                corrupted[name] = self._coalition.corrupt(node, tensors[name], honest, number, name)
        return corrupted

    def collect_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], encoding: Any = None
    ) -> Mapping[str, Tensors]:
        """Return gradients; those of malicious nodes are of what they responded."""
        changed, responses = self._changed(self.queries[query]), self._unchanged.get(number)
        if changed and responses is not None:
            output_gradients = {
                node: self._honest_gradients(node, gradients, responses, changed, number)
                for node, gradients in output_gradients.items()
            }
        return super().collect_gradients(number, query, output_gradients, encoding)

    def _honest_gradients(
        self,
        node: str,
        gradients: Tensors,
        responses: Mapping[str, Tensors],
        changed: Sequence[str],
        number: int,
    ) -> Tensors:
        """Return the gradient with respect to a node's honest response, given that of what it responded."""
        if node not in self._coalition.names:
            return gradients
        with torch.enable_grad():
            own = responses[node]
            z = {name: own[name].detach().float().requires_grad_() for name in changed if name in own}
            corrupted = self._corrupt(node, z, {**responses, node: z}, changed, number)
        back = dict(gradients)
        for name in changed:
            if name not in gradients:
                continue
            back[name] = torch.zeros_like(gradients[name])
            if corrupted[name].requires_grad:
                weights = gradients[name].to(corrupted[name])
                (found,) = torch.autograd.grad(corrupted[name], z[name], weights)
                back[name] = found.to(gradients[name].dtype)
        return back

    def as_responses(self, nodes: Sequence[str], outputs: Tensors) -> Responses:
        """Return outputs ``(K, ...)`` of some nodes as the server would receive them."""
        by_node = {
            node: {name: each[row] for name, each in outputs.items()} for row, node in enumerate(nodes)
        }
        scores = {name for query in self.queries.values() for name in self._changed(query)}
        changed = [name for name in outputs if name in scores]
        corrupted = [self._corrupt(node, tensors, by_node, changed, -1) for node, tensors in by_node.items()]
        return super().as_responses(
            nodes, {name: torch.stack([each[name] for each in corrupted]) for name in outputs}
        )
