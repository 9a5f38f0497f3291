"""A few small nodes and a server that runs a method over them, which most tests of methods use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.checkpoint import load_state, save_state
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.data.public import PublicData
from fedstill.federation.federation import SentQuery
from fedstill.federation.inprocess import InProcess
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.secure_aggregation import SecureAggregation
from fedstill.methods import count_labels_query, count_samples_query
from fedstill.methods._input_generators import GeneratorTraining
from fedstill.methods._server import Server
from fedstill.models import build
from fedstill.models.extractor_head import split_model
from fedstill.models.module_utils import to_vector
from fedstill.node.architectures import stacking_key
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method
from fedstill.protocol.node_side import NodeSetting, NodeSide
from fedstill.protocol.queries import Query
from fedstill.runs.simulation import group_nodes
from fedstill.tasks import Task
from fedstill.tasks.classification import Classification

SHAPE, CLASSES, SEED = (1, 8, 8), 3, 4
TASK = Classification(CLASSES)
OPEN = PolicyConfig(outputs_only=False)


def made(name: str, *names: str | int, parted: bool = False) -> nn.Module:
    """Return a network, split into extractor and head if ``parted``."""
    model = build(name, SHAPE, CLASSES, 0, *names)
    return split_model(model, "model") if parted else model


def public_data(count: int) -> PublicData:
    """Return labeled public images."""
    generator = torch.Generator().manual_seed(99)
    inputs = torch.randn(count, *SHAPE, generator=generator)
    return PublicData("made", inputs, torch.randint(CLASSES, (count,), generator=generator))


def changed(config: Any, **options: Any) -> Any:
    """Return a method with other options; a group may be a table, such as ``student={"steps": 1}``."""
    options = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in options.items()
    }
    return replace(config, **options)


def disagreeing(model: nn.Module) -> nn.Module:
    """Scale the weights of a network up, so that the predictions of untrained nodes differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model.eval()


def few(index: int) -> int:
    """Return the number of classes of a node: the first has class 0 only, the second 0 and 1, and so on."""
    return min(index + 1, CLASSES)


def make_nodes(
    models: Sequence[nn.Module],
    *,
    sizes: Sequence[int] = (6, 11, 16, 21, 26),
    classes: Callable[[int], int] = lambda index: CLASSES,
    policy: PolicyConfig = OPEN,
    data: Callable[[int], TensorData] | None = None,
) -> list[Node]:
    """Return nodes n0, n1, ... with these models and ``data``, or with random data of unequal sizes."""

    def random_data(index: int) -> TensorData:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(sizes[index], *SHAPE, generator=generator)
        return TensorData(inputs, torch.randint(classes(index), (sizes[index],), generator=generator))

    audit = AuditLog()
    return [
        Node(f"n{index}", (data or random_data)(index), model, Gate(f"n{index}", policy, audit), SEED)
        for index, model in enumerate(models)
    ]


@dataclass
class World:
    """A federation that a test observes."""

    nodes: list[Node]
    server: Server
    side: NodeSide

    @property
    def audit(self) -> AuditLog:
        return self.nodes[0].gate.ledger.audit

    @property
    def federation(self) -> Any:
        return self.server.federation

    @property
    def public(self) -> Any:
        return self.server.public

    def networks(self) -> list[nn.Module]:
        """Return all networks of the nodes."""
        return [module for node in self.nodes for module in node.modules.values()]

    def states(self) -> list[torch.Tensor]:
        """Return all trained weights, one vector per network."""
        parts = [
            part.G if isinstance(part, GeneratorTraining) else part
            for part in vars(self.server.state).values()
        ]
        modules = [part for part in parts if isinstance(part, nn.Module)]
        return [to_vector(module) for module in (self.server.student, *modules, *self.networks())]

    def preview(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the previewed responses of all nodes to inputs ``(B, ...)``: ``(K, B, ...)`` each."""
        assert self.side.preview_response is not None
        each = []
        with torch.no_grad():
            for node in self.nodes:
                view = NodeView(NodeGroup([node]), self.side.setting)
                each.append(self.side.preview_response(view, x, node.model(x)))
        return {name: torch.stack([response[name] for response in each]) for name in each[0]}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a run needs to resume."""
        return {"server": self.server.state_dict(), "nodes": [node.state_dict() for node in self.nodes]}

    def load_state_dict(self, state: Any) -> None:
        """Resume from a saved state."""
        for node, own in zip(self.nodes, state["nodes"], strict=True):
            node.load_state_dict(own)
        self.server.load_state_dict(state["server"])


def world(
    method: Method,
    nodes: list[Node],
    student: nn.Module,
    *,
    local: LocalConfig,
    stacked: bool = True,
    task: Any = TASK,
    shape: tuple[int, ...] = SHAPE,
    std: float = 0.25,
    features: nn.Module | None = None,
    protect: Callable[[NodeSide, NodeSetting], None] | None = None,
    sums: bool = False,
    compute: Compute | None = None,
    **setting: Any,
) -> World:
    """Return a server over nodes, stacked by architecture, with secure aggregation if ``sums``.

    ``compute`` is the nodes'. ``protect`` adds mechanisms to the nodes before they are prepared. ``setting``
    can have ``public`` and ``kinds``.
    """
    compute = compute or Compute()
    node_setting = NodeSetting(task, local, compute, setting.get("public"), features, secure_aggregation=sums)
    side = method.node_side(node_setting)
    if protect is not None:
        protect(side, node_setting)
    for node in nodes:
        side.prepare(node)
    link = LinkConfig(secure_aggregation=sums)
    engine = InProcess(nodes, group_nodes(nodes, stacked), side, compute, link)
    federation = SecureAggregation.in_process(engine, nodes) if sums else engine
    arguments = (federation, student, task, shape, (0.5,), (std,), Compute(), SEED, local)
    return World(nodes, Server(method, *arguments, **setting), side)


def kinds_of(nodes: Sequence[Node]) -> tuple[tuple[tuple[str, ...], nn.Module], ...]:
    """Return the nodes' names by architecture, each with a network of it."""
    groups: dict[Any, list[Node]] = {}
    for node in nodes:
        groups.setdefault(stacking_key(node.model), []).append(node)
    return tuple((tuple(node.name for node in same), same[0].model) for same in groups.values())


def run(here: World, steps: int | None = None) -> World:
    """Run some steps, or all."""
    for _ in range(here.server.total_steps if steps is None else steps):
        here.server.step()
    return here


def change_responses(here: World, change: Callable[..., Any]) -> None:
    """Replace all further responses of the nodes by those that ``change`` returns.

    It gets the query, the nodes' names, the sent tensors, and a function that returns the true responses.
    """
    response = here.federation.collect_responses

    def changed(nodes: tuple[str, ...], sent: SentQuery) -> Any:
        return change(sent.query, nodes, sent.tensors, partial(response, nodes, sent))

    here.federation.collect_responses = changed


def resumed(make: Callable[[], World], steps: int, folder: Path) -> World:
    """Return a world that resumed from the state of another after some steps."""
    first, second = run(make(), steps), make()
    save_state(folder / "state", first.state_dict())
    second.load_state_dict(load_state(folder / "state"))
    return second


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    """Assert that all weights of two networks are equal or close."""
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, msg=name, **tolerance)


def assert_close_gradients(one: nn.Module, other: nn.Module, atol: float = 1e-6) -> None:
    """Assert that both networks have gradients, and that these are close."""
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=atol)


def in_training(node: Node, setting: NodeSetting, *roles: str) -> NodeView:
    """Return the view of a node with networks of the given roles in training mode, others in eval mode."""
    group = NodeGroup([node])
    for role in node.modules:
        group.module(role).train(role in roles)
    return NodeView(group, setting)


def count_labels(task: Task) -> Query:
    return count_labels_query(NodeSetting(task, LocalConfig(), Compute()))


def count_samples() -> Query:
    return count_samples_query()


SETTING = NodeSetting(Classification(3), LocalConfig(), Compute())


class FakeCapture:
    """Captures a step by keeping the function. A replay runs it again and copies the outputs.

    Capturing restores static buffers, as a CUDA graph leaves them unchanged.
    """

    def __init__(self, static_buffers: Callable[[], Iterator[torch.Tensor]]) -> None:
        self.static_buffers, self.captures = static_buffers, 0

    def warmup(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, step: Callable[[], Mapping[str, torch.Tensor]]) -> tuple[Any, Callable[[], None]]:
        self.captures += 1
        before = [tensor.detach().clone() for tensor in self.static_buffers()]
        outputs = dict(step())
        with torch.no_grad():
            for tensor, saved in zip(self.static_buffers(), before, strict=True):
                tensor.copy_(saved)

        def replay() -> None:
            with torch.enable_grad():
                new = step()
            for name, output in new.items():
                outputs[name].detach().copy_(output.detach())

        return outputs, replay
