"""Views of nodes: a stacked call equals calls node by node, and a captured call equals both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.cuda_graphs import WARMUP_CALLS, CudaGraphStep
from fedstill.core.dataset import TensorData
from fedstill.methods import Method, adam, cosine_lr
from fedstill.models.module_utils import to_vector
from fedstill.node import captured_functions
from fedstill.node.captured_functions import CapturedFunctions
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import PUBLIC_BATCH, NodeView
from fedstill.node.stacked_calls import QuerySamples, map_nodes
from fedstill.privacy import noise
from fedstill.privacy.dpsgd import DPParameters
from fedstill.protocol.local_config import FULL_TRAINING, LocalConfig, Span
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.queries import Query, QueryDetails
from tests.support.errors import raises_invalid, raises_refused
from tests.support.small_world import CLASSES, SHAPE, TASK, FakeCapture, made, make_nodes, public_data

pytestmark = pytest.mark.usefixtures("steady_adam")

SIZES, NUMBER = (6, 16, 11), 3
LOCAL = LocalConfig(epochs=2, batch=4, lr=0.01, optimizer="sgd", smoothing=0.1)
Outputs = Mapping[str, torch.Tensor]


def map_group(
    function: Any, group: NodeGroup, setting: NodeSetting, number: int, tensors: Mapping[str, torch.Tensor]
) -> Any:
    """Return ``function(node, **tensors)`` of all nodes of a group in one stacked call."""
    return map_nodes(function, partial(NodeView, group, setting, number), len(group), tensors)


def nodes_of(spec: str = "mlp:8", count: int = 3, parted: bool = False) -> list[Node]:
    """Return nodes of one architecture with data of different sizes, each with its own critic."""
    nodes = make_nodes([made(spec, index, parted=parted) for index in range(count)], sizes=SIZES)
    for index, node in enumerate(nodes):
        torch.manual_seed(index)
        critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        node.add_module("critic", critic, partial(adam, lr=0.05), lambda taken: cosine_lr(taken, 9, 0.05, 0))
    return nodes


def setting_of(local: LocalConfig = LOCAL, compute: Compute | None = None) -> NodeSetting:
    return NodeSetting(TASK, local, compute or Compute(), public_data(30))


def states(nodes: list[Node]) -> list[torch.Tensor]:
    return [to_vector(module) for node in nodes for module in node.modules.values()]


def check(
    function: Callable[..., Outputs],
    spec: str = "mlp:8",
    *,
    local: LocalConfig = LOCAL,
    parted: bool = False,
    changes: bool = False,
    tolerance: float = 0.0,
    **tensors: torch.Tensor,
) -> list[Outputs]:
    """Check that a stacked call of a function equals calls for single nodes, and return the outputs of these.

    Args:
        function: function of a node view and of tensors of that node.
        spec: architecture of the nodes.
        local: options of local training.
        parted: models consist of extractor and head.
        changes: networks change, each to other weights.
        tolerance: tolerated difference, as stacked kernels sum in another order.
        tensors: tensors ``(3, ...)``.
    """
    stacked, alone, before = (nodes_of(spec, parted=parted) for _ in range(3))
    for node in (*stacked, *alone):
        for module in node.modules.values():
            module.eval()
    outputs = map_group(function, NodeGroup(stacked), setting_of(local), NUMBER, tensors)
    setting, expected = setting_of(local), []
    for row, node in enumerate(alone):
        view = NodeView(NodeGroup([node]), setting, NUMBER)
        expected.append(function(view, **{name: tensor[row] for name, tensor in tensors.items()}))
    for name, output in outputs.items():
        assert len(output) == len(alone)
        for row, each in enumerate(expected):
            torch.testing.assert_close(output[row], each[name], rtol=tolerance, atol=tolerance, msg=name)
    for one, other in zip(states(stacked), states(alone), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    for node, first in zip(alone, before, strict=True):
        moved = [not torch.equal(a, b) for a, b in zip(states([node]), states([first]), strict=True)]
        assert any(moved) == changes
    for node in (*stacked, *alone):
        assert not any(module.training for module in node.modules.values())
        assert "model" not in node.optimizers
    return expected


# --- data and random numbers ---------------------------------------------------------------------


def mirrored(data: TensorData) -> TensorData:
    return TensorData(data.inputs.flip(-1), data.targets)


def test_samples_of_a_stacked_call_equal_those_of_each_node() -> None:
    def take(node: NodeView) -> Outputs:
        x, y = node.sample(5, "critic")
        other, _ = node.sample(5, "critic", each_query=False)
        flipped, _ = node.sample(5, "critic", data=mirrored)
        return {"x": x, "y": y, "other": other, "flipped": flipped}

    outputs = check(take)
    for node, each in zip(nodes_of(), outputs, strict=True):
        batch = node.sample_batch(5, "critic", NUMBER)
        assert torch.equal(each["x"], batch.inputs)
        assert torch.equal(each["y"], batch.targets)
        assert torch.equal(each["other"], node.sample_batch(5, "critic").inputs)
        assert torch.equal(each["flipped"], batch.inputs.flip(-1))
    assert not torch.equal(outputs[0]["x"], outputs[1]["x"]), "each node uses its own data"


def test_random_numbers_of_a_stacked_call_equal_those_of_each_node() -> None:
    def sample(node: NodeView) -> Outputs:
        return {"z": node.random(lambda generator: torch.randn(4, 2, generator=generator), "z", 1)}

    outputs = check(sample)
    for node, each in zip(nodes_of(), outputs, strict=True):
        assert torch.equal(each["z"], torch.randn(4, 2, generator=node.random_generator("z", 1)))
    assert not torch.equal(outputs[0]["z"], outputs[1]["z"])


# --- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mlp:8", "resnet8:4"])
def test_outputs_of_a_stacked_call_equal_those_of_each_node(spec: str) -> None:
    many = torch.randn(PUBLIC_BATCH + 3, *SHAPE, generator=torch.Generator().manual_seed(0))

    def compute(node: NodeView, x: torch.Tensor, y: torch.Tensor) -> Outputs:
        z = node.model(x)
        losses = torch.stack([node.loss(z, y), node.loss(z, y, 0.0)])
        return {
            "z": z,
            "losses": losses,
            "all": node.predict(many),
            "public": node.predict(node.public.inputs),
        }

    x = torch.randn(3, 4, *SHAPE, generator=torch.Generator().manual_seed(1))
    y = torch.randint(CLASSES, (3, 4), generator=torch.Generator().manual_seed(2))
    outputs = check(compute, spec, tolerance=1e-5, x=x, y=y)
    plain = [F.cross_entropy(outputs[0]["z"], y[0], label_smoothing=each) for each in (0.1, 0.0)]
    torch.testing.assert_close(outputs[0]["losses"], torch.stack(plain))
    assert outputs[0]["all"].shape == (len(many), CLASSES)
    node = nodes_of(spec)[0]
    torch.testing.assert_close(outputs[0]["all"], node.model.eval()(many), rtol=1e-4, atol=1e-5)


def test_gradients_of_a_stacked_call_equal_those_of_each_node() -> None:
    """Gradients of each node's inputs, also through a part that is computed node by node."""

    def compute(node: NodeView, x: torch.Tensor) -> torch.Tensor:
        far = node.separately(lambda node, x: (x - node.data.inputs[0]).square().mean(), x)
        return node.model(x).square().sum() + far

    gradients = []
    for stacked in (True, False):
        nodes, x = nodes_of(), torch.ones(3, 2, *SHAPE, requires_grad=True)
        if stacked:
            total = map_group(compute, NodeGroup(nodes), setting_of(), 0, {"x": x}).sum()
        else:
            views = [NodeView(NodeGroup([node]), setting_of()) for node in nodes]
            total = torch.stack([compute(view, each) for view, each in zip(views, x, strict=True)]).sum()
        gradients += torch.autograd.grad(total, x)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert (gradients[1].flatten(1).abs().sum(1) > 0).all()


def test_steps_of_a_stacked_call_equal_those_of_each_node() -> None:
    """Losses of any shape are averaged; learning rates decrease from step to step."""

    def train(node: NodeView, x: torch.Tensor, of_scalar: bool = False) -> Outputs:
        critic, losses = node.module("critic"), []
        for number in range(3):
            real, _ = node.sample(4, "critic", number)
            with torch.enable_grad():
                critic.train(True)
                loss = critic(real).square() - critic(x).sigmoid()  # (4, 1)
                node.step("critic", loss.mean() if of_scalar else loss)
            losses.append(loss.detach())
        critic.train(False)
        return {"loss": torch.stack(losses), "d": critic(x)}

    x = torch.randn(3, 4, *SHAPE, generator=torch.Generator().manual_seed(0))
    each, scalar = (
        check(partial(train, of_scalar=of_scalar), changes=True, tolerance=1e-4, x=x)
        for of_scalar in (False, True)
    )
    for one, other in zip(each, scalar, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_learning_rates_follow_the_steps_of_each_node() -> None:
    nodes = nodes_of()

    def train(node: NodeView) -> Outputs:
        with torch.enable_grad():
            node.module("critic").train(True)
            loss = node.module("critic")(node.sample(4, "critic")[0]).mean()
            node.step("critic", loss)
        return {"loss": loss}

    for number in range(4):
        map_group(train, NodeGroup(nodes), setting_of(), number, {})
        for node in nodes:
            rate = node.optimizers["critic"].param_groups[0]["lr"]
            assert rate == pytest.approx(cosine_lr(number, 9, 0.05, 0))


def test_networks_of_a_group_follow_switches_by_others() -> None:
    """A query of a single node may leave its network in training mode, which the group notices."""
    node = nodes_of("resnet8:4")[0]
    group, before = NodeGroup([node]), to_vector(node.model)
    for mode in (True, True, False, False):
        NodeView(NodeGroup([node]), setting_of()).model.train(not mode)
        NodeView(group, setting_of()).model.train(mode)
        assert node.model.training == mode
        wanted = [parameter.requires_grad for parameter in node.model.parameters()]
        assert wanted == [mode] * len(wanted)
    NodeView(group, setting_of()).model(torch.randn(4, *SHAPE))
    assert torch.equal(to_vector(node.model), before), "evaluation does not change statistics"


# --- local training ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mlp:8", "resnet8:4"])
@pytest.mark.parametrize("span", [FULL_TRAINING, Span.part(1, 3)])
def test_stacked_training_equals_training_of_each_node(spec: str, span: Span) -> None:
    """Nodes have data of different sizes, so some train for fewer steps."""

    def train(node: NodeView) -> Outputs:
        node.train(span)
        return {"parameters": node.parameters()}

    check(train, spec, changes=True, tolerance=1e-4)


@pytest.mark.parametrize("span", [FULL_TRAINING, Span.part(1, 2)])
def test_stacked_training_gives_each_step_the_tensors_of_its_node(span: Span) -> None:
    """Also if only the nodes with most data still train, in another order than the group's."""
    numbers: list[int] = []

    def step(node: NodeView, number: int, x: torch.Tensor, y: torch.Tensor, anchor: torch.Tensor) -> Any:
        numbers.append(number)
        z = node.model(x)
        noise = node.random(lambda generator: torch.rand((), generator=generator), "noise", number)
        own, _ = node.sample(2, "own", number)
        loss = node.loss(z, y) + (z - anchor).square().mean() + 0.1 * noise * node.model(own).square().mean()
        parameters = node.model.named_parameters()
        loss = loss + 0.01 * sum(weights.square().sum() for weights in parameters.values())
        node.step("model", loss)
        return loss

    def train(node: NodeView, anchor: torch.Tensor) -> Outputs:
        node.train(span, step, given={"anchor": anchor})
        return {"parameters": node.parameters()}

    anchor = 3.0 * torch.randn(3, CLASSES, generator=torch.Generator().manual_seed(0))
    check(train, changes=True, tolerance=1e-4, anchor=anchor)
    steps = [len(span.steps(-(-2 * size // LOCAL.batch))) for size in SIZES]
    assert numbers == [*range(max(steps)), *(number for each in steps for number in range(each))]


@pytest.mark.parametrize("span", [FULL_TRAINING, Span.part(1, 2)])
def test_stacked_training_adds_the_term_of_each_node(span: Span) -> None:
    numbers: list[int] = []

    def term(node: NodeView, number: int, anchor: torch.Tensor) -> torch.Tensor:
        numbers.append(number)
        noise = node.random(lambda generator: torch.rand((), generator=generator), "noise", number)
        parameters = node.model.named_parameters()
        return (0.5 + noise) * sum((w - anchor.mean()).square().sum() for w in parameters.values())

    def train(node: NodeView, anchor: torch.Tensor) -> Outputs:
        node.train(span, term=term, given={"anchor": anchor})
        return {"parameters": node.parameters()}

    def step(node: NodeView, number: int, x: torch.Tensor, y: torch.Tensor, anchor: torch.Tensor) -> Any:
        loss = node.loss(node.model(x), y) + term(node, number, anchor)
        node.step("model", loss)
        return loss

    def train_by_steps(node: NodeView, anchor: torch.Tensor) -> Outputs:
        node.train(span, step, given={"anchor": anchor})
        return {"parameters": node.parameters()}

    anchor = torch.randn(3, CLASSES, generator=torch.Generator().manual_seed(0))
    check(train, changes=True, tolerance=1e-4, anchor=anchor)
    steps = [len(span.steps(-(-2 * size // LOCAL.batch))) for size in SIZES]
    assert numbers == [*range(max(steps)), *(number for each in steps for number in range(each))]
    found = map_group(train, NodeGroup(nodes_of()), setting_of(), NUMBER, {"anchor": anchor})
    by_steps = map_group(train_by_steps, NodeGroup(nodes_of()), setting_of(), NUMBER, {"anchor": anchor})
    torch.testing.assert_close(found, by_steps, rtol=0, atol=0)


def test_training_takes_a_step_or_a_term() -> None:
    def train(node: NodeView) -> Outputs:
        node.train(
            FULL_TRAINING, lambda node, *batch: torch.zeros(()), term=lambda node, number: torch.ones(())
        )
        return {}

    with raises_invalid("term of node.train", ANY, "step"):
        map_group(train, NodeGroup(nodes_of()), setting_of(), 0, {})


def test_stacked_training_of_other_networks_equals_training_of_each_node() -> None:
    local = LocalConfig(epochs=1, batch=4, lr=0.02, optimizer="adam")

    def step(node: NodeView, number: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (node.module("critic")(x).flatten() - y).square().mean()
        node.step("critic", loss)
        return loss

    def train(node: NodeView) -> Outputs:
        node.train(FULL_TRAINING, step, roles=("critic",), purpose="critic", local=local)
        return {"critic": node.parameters(role="critic"), "model": node.parameters()}

    outputs = check(train, changes=True, tolerance=1e-4)
    for node, each in zip(nodes_of(), outputs, strict=True):
        assert torch.equal(each["model"], to_vector(node.model)), "the model is not trained"


@pytest.mark.parametrize("loss", ["task", "own"])
def test_stacked_training_on_given_examples_equals_training_of_each_node(loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, *SHAPE, generator=generator), torch.randint(CLASSES, (10,), generator=generator)
    targets = y if loss == "task" else torch.randn(10, CLASSES, generator=generator)
    own = None if loss == "task" else lambda z, wanted: (z - wanted).square().sum(1)

    def train(node: NodeView) -> Outputs:
        node.train_on(x, targets, own, "digest", 0, epochs=2, batch=4, lr=0.01)
        return {"parameters": node.parameters()}

    outputs = check(train, changes=True, tolerance=1e-4)
    if loss == "own":
        node, z = nodes_of()[0], targets
        before = (node.model.eval()(x) - z).square().mean()
        NodeView(NodeGroup([node]), setting_of()).load_parameters(outputs[0]["parameters"])
        assert (node.model.eval()(x) - z).square().mean() < before


# --- separately, parameters, cached --------------------------------------------------------------


def test_parts_computed_separately_see_one_node() -> None:
    def compute(node: NodeView, x: torch.Tensor) -> Outputs:
        def one(node: NodeView, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert node.network() is node.network("model")
            order = torch.randperm(5, generator=node.random_generator("order"))
            size = torch.tensor([float(len(node.data)), float(node.name[1:]), float(node.seed), x.item()])
            return size, torch.cat([node.model(node.data.inputs[:2]).flatten(), z[order]])

        size, values = node.separately(one, x, 2 * x * torch.arange(5.0))
        alone = node.separately(lambda node, x: x * len(node.data), x)
        return {"size": size, "values": values, "alone": alone}

    outputs = check(compute, tolerance=1e-6, x=torch.tensor([0.5, 1.5, 2.5]))
    assert [each["size"][:2].tolist() for each in outputs] == [[6, 0], [16, 1], [11, 2]]
    assert [each["alone"].item() for each in outputs] == [3.0, 24.0, 27.5]


@pytest.mark.parametrize(
    ("part", "role"), [("", "model"), ("head", "model"), ("", "critic"), ("1", "critic")]
)
def test_parameters_of_a_stacked_call_equal_those_of_each_node(part: str, role: str) -> None:
    def change(node: NodeView, shift: torch.Tensor) -> Outputs:
        before = node.parameters(part, role)
        node.load_parameters(before + shift, part, role)
        return {"before": before, "after": node.parameters(part, role), "all": node.parameters()}

    shift = torch.tensor([1.0, 2.0, 3.0])
    outputs = check(change, changes=True, parted=True, shift=shift)
    for row, (node, each) in enumerate(zip(nodes_of(parted=True), outputs, strict=True)):
        assert torch.equal(each["before"], to_vector(node.modules[role].get_submodule(part)))
        assert torch.equal(each["after"], each["before"] + shift[row])


def test_vectors_that_all_nodes_get_are_loaded_into_each() -> None:
    vector = to_vector(made("mlp:8", "other"))

    def load(node: NodeView) -> Outputs:
        node.load_parameters(vector)
        return {"parameters": node.parameters()}

    assert all(torch.equal(each["parameters"], vector) for each in check(load, changes=True))


def test_parameters_are_loaded_into_the_nodes_that_still_train() -> None:
    """In the last steps only the nodes with most data train; the others keep their parameters."""

    def step(node: NodeView, number: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = node.loss(node.model(x), y)
        node.step("model", loss)
        node.load_parameters(0.9 * node.parameters().detach())
        return loss

    def train(node: NodeView) -> Outputs:
        node.train(FULL_TRAINING, step)
        return {"parameters": node.parameters()}

    check(train, changes=True, tolerance=1e-4)


@pytest.mark.parametrize("stacked", [True, False])
def test_cached_tensors_are_computed_once_for_a_key(stacked: bool) -> None:
    nodes, setting, calls = nodes_of(), setting_of(), 0

    def cached(node: NodeView, key: int) -> Outputs:
        def compute() -> torch.Tensor:
            nonlocal calls
            calls += 1
            return key * node.predict(node.public.inputs)

        return {"z": node.cached("predictions", key, compute)}

    def call(key: int) -> torch.Tensor:
        if stacked:
            response: Any = map_group(partial(cached, key=key), NodeGroup(nodes), setting, NUMBER, {})
            return response["z"]
        views = [NodeView(NodeGroup([node]), setting, NUMBER) for node in nodes]
        return torch.stack([cached(view, key)["z"] for view in views])

    per_key = 1 if stacked else len(nodes)
    first = call(1)
    torch.testing.assert_close(first, torch.stack([n.model.eval()(setting.public.inputs) for n in nodes]))
    for key, expected in ((1, 1), (2, 2), (2, 2), (1, 3)):  # only the tensor of the last key is stored
        assert torch.equal(call(key), key * first)
        assert calls == expected * per_key
    one = NodeView(NodeGroup(nodes[1:2]), setting).cached("predictions", 1, lambda: first[0])
    assert torch.equal(one, first[0 if stacked else 1]), "subgroups use the tensors of their nodes"


@pytest.mark.parametrize("holds", ["closure", "partial"])
def test_training_step_with_tensor_of_node_is_refused(holds: str) -> None:
    """Training sorts nodes by their numbers of steps, and the tensor keeps the order of the call."""

    def train(node: NodeView, z: torch.Tensor) -> Outputs:
        w = node.parameters()

        def step(node: NodeView, number: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = node.loss(node.model(x), y) + w.square().sum()
            node.step("model", loss)
            return loss

        def other(w: torch.Tensor, node: NodeView, *batch: Any) -> torch.Tensor:
            raise NotImplementedError

        node.train(Span(0, 1, 1), step if holds == "closure" else partial(other, w))
        return {"p": node.parameters()}

    with raises_invalid("step of node.train", ANY, "given"):
        map_group(train, NodeGroup(nodes_of()), setting_of(), 0, {"z": torch.zeros(3, 1)})


# --- captured calls ------------------------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[FakeCapture]:
    """Replace captures of this test's queries, and return them, one per query."""
    made_captures: list[FakeCapture] = []

    def capture(step: Any, static_buffers: Any, capture: Any = None) -> CudaGraphStep:
        made_captures.append(FakeCapture(static_buffers))
        return CudaGraphStep(step, static_buffers, made_captures[-1])

    monkeypatch.setattr(captured_functions, "CudaGraphStep", capture)
    return made_captures


def capturing(monkeypatch: pytest.MonkeyPatch) -> Compute:
    compute = Compute(EngineConfig())
    monkeypatch.setattr(compute, "uses_cuda_graphs", lambda *modules: True, raising=False)
    return compute


def score(node: NodeView, x: torch.Tensor) -> Outputs:
    """Train the critic for one step on samples of two purposes, and return its output on a third."""
    critic = node.module("critic")
    real, labels = node.sample(4, "critic")
    same, _ = node.sample(3, "critic", each_query=False, data=mirrored)
    with torch.enable_grad():
        critic.train(True)
        node.step("critic", critic(real).sigmoid() - critic(x).sigmoid() + 0.1 * labels.unsqueeze(1))
    critic.train(False)
    return {"d": critic(x), "own": critic(same), "z": node.model(x)}


def scoring(**changes: Any) -> Query:
    declaration: dict[str, Any] = {
        "sends": {"x": "inputs"},
        "releases": {"d": "critic", "own": "critic", "z": "logits"},
        "trains": ("critic",),
        "stackable": True,
        **changes,
    }
    return Query(score, **declaration)


def answers(nodes: list[Node], compute: Compute, query: Query, count: int = 8) -> list[Outputs]:
    runner = CapturedFunctions(NodeGroup(nodes), setting_of(compute=compute), compute)
    outputs = []
    for number in range(count):
        x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(number))
        outputs.append(runner(query, number, {"x": x.expand(len(nodes), *x.shape)}, {}))
    return outputs


@pytest.mark.parametrize("count", [1, 3])
def test_captured_queries_have_their_own_samples_and_learning_rates(
    captures: list[FakeCapture], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    eager, captured = nodes_of(count=count), nodes_of(count=count)
    expected = answers(eager, Compute(), scoring())
    assert not captures
    for one, other in zip(answers(captured, capturing(monkeypatch), scoring()), expected, strict=True):
        for name, output in one.items():
            torch.testing.assert_close(output, other[name], rtol=1e-4, atol=1e-5)
    assert [capture.captures for capture in captures] == [1]
    for one, other in zip(states(captured), states(eager), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for node in captured:
        assert float(node.optimizers["critic"].param_groups[0]["lr"]) == pytest.approx(
            cosine_lr(7, 9, 0.05, 0)
        )
    assert not torch.equal(expected[0]["d"], expected[1]["d"])


def test_captured_calls_take_samples_before_the_call(
    captures: list[FakeCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed graph runs no Python code: from the second call on, the function samples nothing."""
    nodes, inside, taken = nodes_of(), False, []
    sample, put = Node.sample_batch, QuerySamples.put

    def counted(node: Node, size: int, *purpose: Any) -> TensorData:
        taken.append((inside, size, purpose))
        return sample(node, size, *purpose)

    def enter(samples: QuerySamples, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal inside
        inside = True
        put(samples, tensors)

    monkeypatch.setattr(Node, "sample_batch", counted)
    monkeypatch.setattr(QuerySamples, "put", enter)
    runner = CapturedFunctions(NodeGroup(nodes), setting_of(), capturing(monkeypatch))
    for number in range(WARMUP_CALLS + 3):
        inside = False
        taken.clear()
        runner(scoring(), number, {"x": torch.ones(3, 4, *SHAPE)}, {})
        wanted = [*[(4, ("critic", number))] * 3, *[(3, ("critic",))] * 3]
        assert [each[1:] for each in taken] == wanted
        assert [each[0] for each in taken] == [number == 0] * 6
    assert captures[0].captures == 1


def test_samples_of_another_size_belong_to_their_query(
    captures: list[FakeCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function requests a size that is not known yet, so it is sampled in the call, not before."""

    def take(node: NodeView, x: torch.Tensor) -> Outputs:
        return {"own": node.sample(len(x), "taken")[0].flatten(1)}

    query = Query(take, sends={"x": "inputs"}, releases={"own": "critic"}, stackable=True)
    eager, captured = (
        CapturedFunctions(NodeGroup(nodes_of()), setting_of(compute=compute), compute)
        for compute in (Compute(), capturing(monkeypatch))
    )
    for number, size in enumerate([4, 4, 4, 4, 4, 2, 2]):
        sent = {"x": torch.ones(3, size, *SHAPE)}
        expected = eager(query, number, sent, {})["own"]
        assert torch.equal(captured(query, number, sent, {})["own"], expected), number


@pytest.mark.parametrize(
    "operate",
    [
        lambda node: node.random(lambda generator: torch.rand(2, generator=generator), "some"),
        lambda node: node.shared(lambda: torch.rand(2)),
        lambda node: node.cached("some", 0, lambda: torch.zeros(2)),
        lambda node: node.train(Span(0, 1, 1)),
        lambda node: node.train_on(torch.zeros(2, *SHAPE), torch.zeros(2), epochs=1, batch=2, lr=0.1),
    ],
)
def test_sampling_and_training_in_python_are_never_captured(
    monkeypatch: pytest.MonkeyPatch, operate: Callable[[NodeView], Any]
) -> None:
    """A graph would repeat its first random numbers and batches. Outside of a capture it works."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    view = NodeView(NodeGroup(nodes_of(count=1)), setting_of(), samples=QuerySamples())
    with pytest.raises(RuntimeError, match="reads_values"):
        operate(view)


def test_samples_taken_before_a_call_are_returned_in_it() -> None:
    nodes, samples = nodes_of(), QuerySamples()
    request = (4, ("critic", None), None)
    first = samples.get(nodes, 0, request)
    assert samples.requests == [request]
    tensors = samples.take(nodes, 1)
    inputs, targets = (torch.stack(parts) for parts in zip(*(
        (batch.inputs, batch.targets) for batch in (node.sample_batch(4, "critic", 1) for node in nodes)
    ), strict=True))  # fmt: skip
    tensors["x"] = torch.ones(3)
    samples.put(tensors)
    assert list(tensors) == ["x"], "remaining arguments are those of the function"
    x, y = samples.get(nodes, 0, request)
    assert torch.equal(x, inputs)
    assert torch.equal(y, targets)
    assert not torch.equal(x, first[0])
    assert samples.requests == [request], "registered once"


@pytest.mark.parametrize(
    "changes",
    [
        {"stackable": False},
        {"details": QueryDetails(reads_values=True)},
        {"sends": {"x": "inputs", "round": "schedule"}},
    ],
)
def test_other_queries_are_not_captured(changes: dict[str, Any]) -> None:
    assert scoring().is_capturable
    assert not scoring(**changes).is_capturable


def test_queries_of_nodes_that_train_privately_are_not_captured(
    captures: list[FakeCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step could not sample records with their noise."""
    (node,) = nodes_of(count=1)
    node.dp_sgd_parameters = {"critic": DPParameters(1.0, 1.0, partial(noise.seeded_sampler, 0))}

    def look(node: NodeView, x: torch.Tensor) -> Outputs:
        return {"z": node.model(x)}

    query = Query(look, sends={"x": "inputs"}, releases={"z": "logits"}, stackable=True)
    answers([node], capturing(monkeypatch), query)
    assert not captures


# --- what a stacked call refuses ----------------------------------------------------------------


USES = {
    "data": lambda node: node.data.inputs.mean(),
    "name": lambda node: torch.tensor(float(len(node.name))),
    "seed": lambda node: torch.tensor(float(node.seed)),
    "network": lambda node: next(node.network().parameters()).mean(),
    "random_generator": lambda node: torch.rand((), generator=node.random_generator("z")),
    "buffers": lambda node: node.buffers("count")["n"].sum(),
}


@pytest.mark.parametrize("use", USES)
def test_stackable_functions_cannot_use_properties_of_one_node(use: str) -> None:
    def compute(node: NodeView) -> Outputs:
        return {"z": USES[use](node)}

    def separate(node: NodeView) -> Outputs:
        return {"z": node.separately(lambda node: USES[use](node))}

    nodes = nodes_of()
    for node in nodes:
        node.add_buffers("count", n=torch.ones(2))
    with pytest.raises(TypeError, match=r"node\.separately"):
        map_group(compute, NodeGroup(nodes), setting_of(), 0, {})
    alone = [compute(NodeView(NodeGroup([node]), setting_of()))["z"] for node in nodes]
    together = map_group(separate, NodeGroup(nodes), setting_of(), 0, {})["z"]
    torch.testing.assert_close(together, torch.stack(alone))
    assert map_group(compute, NodeGroup(nodes[:1]), setting_of(), 0, {})["z"] == alone[0], (
        "a group of one node"
    )


def test_unknown_roles_and_models_without_optimizers_are_refused() -> None:
    def role(node: NodeView) -> Outputs:
        return {"d": node.module("twin")(torch.ones(2, *SHAPE))}

    def step(node: NodeView) -> Outputs:
        node.model.train(True)
        node.step("model", node.model(torch.ones(2, *SHAPE)).mean())
        return {"z": torch.zeros(())}

    for nodes in (nodes_of(), nodes_of(count=1)):
        with raises_invalid("role", "twin", "one of model, critic"):
            map_group(role, NodeGroup(nodes), setting_of(), 0, {})
        with raises_invalid("role of node.step", "model", "an optimizer"):
            map_group(step, NodeGroup(nodes), setting_of(), 0, {})


# --- declarations that a subclass inherits -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Predicting(Method):
    """A method whose functions have declarations about their inputs."""

    title = "Predicting"

    def queries(self, setting: NodeSetting) -> Any:
        for function in (self.predict, self.rate):
            yield Query(
                function,
                sends={"x": "inputs"},
                releases={"logits": "logits"},
                depends_on_records=(),
                stackable=True,
            )

    def predict(self, node: NodeView, x: torch.Tensor) -> Outputs:
        return {"logits": self.network(node, x)}

    def network(self, node: NodeView, x: torch.Tensor) -> torch.Tensor:
        return node.model(x)

    def rate(self, node: NodeView, x: torch.Tensor) -> Outputs:
        return self.predict(node, x)


class Overriding(Predicting):
    def predict(self, node: NodeView, x: torch.Tensor) -> Outputs:
        return {"logits": node.model(x) + node.data.inputs.mean()}


class OverridingFurther(Overriding):
    pass


class Adding(Predicting):
    """Overrides a function, and adds another query to the inherited ones."""

    def queries(self, setting: NodeSetting) -> Any:
        yield from super().queries(setting)
        yield Query(self.look, releases={"logits": "logits"}, depends_on_records=())

    def predict(self, node: NodeView, x: torch.Tensor) -> Outputs:
        return {"logits": node.model(x) + node.data.inputs.mean()}

    def look(self, node: NodeView) -> Outputs:
        return {"logits": torch.zeros(1)}


class Mixin:
    def predict(self, node: NodeView, x: torch.Tensor) -> Outputs:
        return {"logits": node.data.inputs.flatten(1)[:, :CLASSES]}


class Mixed(Mixin, Predicting):
    pass


class Declaring(Overriding):
    def queries(self, setting: NodeSetting) -> Any:
        for query in super().queries(setting):
            yield replace(query, times=2)


class Named(Predicting):
    title = "Named"


class Helping(Predicting):
    """Overrides a helper of a query's function."""

    def network(self, node: NodeView, x: torch.Tensor) -> torch.Tensor:
        numbers.append(node.query_number)
        return super().network(node, x)


numbers: list[int] = []


@pytest.mark.parametrize("kind", [Overriding, OverridingFurther, Adding, Mixed])
def test_overridden_functions_lose_their_declaration(kind: type[Predicting]) -> None:
    queries = kind().node_side(setting_of()).queries
    assert queries["predict"].depends_on_records is None, "the dependence is unknown"
    assert not queries["predict"].stackable
    assert not queries["predict"].is_capturable
    assert queries["predict"].releases == {"logits": "logits"}
    assert queries["rate"].depends_on_records == (), "the declared function"
    if kind is Adding:
        assert queries["look"].depends_on_records == ()


@pytest.mark.parametrize("kind", [Predicting, Declaring, Named])
def test_functions_with_own_declaration_keep_it(kind: type[Predicting]) -> None:
    for query in kind().node_side(setting_of()).queries.values():
        assert query.depends_on_records == ()
        assert query.stackable
        assert query.is_capturable == (kind is Predicting)


@pytest.mark.parametrize("kind", [Predicting, Helping])
def test_helpers_that_a_custom_subclass_overrides_see_each_query(
    captures: list[FakeCapture], monkeypatch: pytest.MonkeyPatch, kind: type[Predicting]
) -> None:
    """A captured graph would repeat the values that these functions read at the capture."""
    numbers.clear()
    query = kind().node_side(setting_of()).queries["predict"]
    answers(nodes_of(), capturing(monkeypatch), query)
    assert [capture.captures for capture in captures] == ([1] if kind is Predicting else [])
    assert numbers == ([] if kind is Predicting else [*range(8)])


def test_private_step_on_record_data_counts_as_read() -> None:
    """The function that generates data sees the records, so later training examples may depend on them."""
    (node,) = nodes_of(count=1)
    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    node.add_module("critic", critic, partial(adam, lr=0.05))
    dp = DPParameters(1.0, 1.0, lambda *names: noise.seeded_sampler(0, *names))
    node.dp_sgd_parameters = {"model": dp, "critic": dp}
    view = NodeView(NodeGroup([node]), setting_of())

    def step(**data: Any) -> None:
        view.private_step(
            "critic",
            lambda module, inputs, targets: module(inputs).flatten(),
            lambda module: module[1].bias.sum(),
            batch=2,
            **data,
        )

    def train() -> None:
        view.train_on(torch.zeros(2, *SHAPE), torch.zeros(2, dtype=torch.int64), epochs=1, batch=2, lr=0.1)

    step()
    train()
    step(data=lambda data: replace(data, inputs=1 - data.inputs))
    with raises_refused("privacy", "after a read"):
        train()
