"""FedHydra: weights of the nodes by class, from what generators learn, and the ensemble that uses them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.seeds import torch_generator
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.responses import Responses
from fedstill.methods import LabelHistogram
from fedstill.methods._input_generators import GeneratorTraining, InputGenerator, LabelGenerator
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.dense import DENSE
from fedstill.methods.fedhydra import FedHydra
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from tests.support import small_world
from tests.support.errors import raises_refused
from tests.support.small_world import (
    CLASSES,
    SEED,
    World,
    change_responses,
    disagreeing,
    made,
    make_nodes,
    same,
)

pytestmark = pytest.mark.usefixtures("steady_adam")

TINY: dict[str, Any] = {
    "steps": 2,
    "batch": 4,
    "generator": LabelGenerator(noise=6, width=4),
    "student": ReplayTraining(steps=1, batch=100),
    "tau": 2.0,
    "bn": 0.0,
}
HYDRA = FedHydra(**TINY, class_steps=3)
U = torch.tensor([[3.0, 0.0, 1.0], [1.0, 2.0, 1.0]])  # shares by class: 3/4 and 1/4, 0 and 1, 1/2 and 1/2
Z = torch.tensor([[4.0, 0.0, 0.0], [0.0, 4.0, 8.0]])  # logits of two nodes


def world(
    config: Any, models: list[nn.Module] | None = None, policy: PolicyConfig = small_world.OPEN
) -> World:
    models = models or [disagreeing(made("mlp:8", index)) for index in range(2)]
    nodes = make_nodes(models, policy=policy)
    return small_world.world(
        config,
        nodes,
        made("mlp:8", "student"),
        local=LocalConfig(),
        architectures=small_world.kinds_of(nodes),
    )


def plain_weight(f_k: nn.Module, G: nn.Module, c: int) -> float:
    """Return u_k^c as the paper describes it: plain autograd, no federation."""
    adam = torch.optim.Adam(G.parameters(), 1e-3, betas=(0.5, 0.999))
    w, losses = torch.randn(4, 6, generator=torch_generator(SEED, "class")), []
    for _ in range(3):
        z = f_k(G(w))
        loss = sum(-z[b].log_softmax(0)[c] for b in range(4)) / 4
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return float((max(losses) - min(losses)) / min(losses))


@pytest.mark.parametrize("models", ["queried", "uploaded"])
def test_weights_equal_plain_implementation(models: Any) -> None:
    one = world(replace(HYDRA, models=models))
    start = GeneratorTraining(InputGenerator(noise=6, width=4), one.server).G
    f = [copy.deepcopy(node.model).eval() for node in one.nodes]
    expected = [[plain_weight(f_k, copy.deepcopy(start), c) for c in range(CLASSES)] for f_k in f]
    one.server.step()
    torch.testing.assert_close(one.server.state.U.counts, torch.tensor(expected), rtol=2e-3, atol=1e-6)


def test_node_whose_model_ignores_its_inputs_has_no_weight() -> None:
    constant = made("mlp:8", 0)
    with torch.no_grad():
        for parameter in constant.parameters():
            parameter.zero_()
    one = world(HYDRA, [constant, disagreeing(made("mlp:8", 1))])
    one.server.step()
    counts = one.server.state.U.counts
    assert (counts[0] == 0).all()
    assert (counts[1] > 0).all()
    shares = one.server.state.U.weights(one.server.task, ("n0", "n1"))
    torch.testing.assert_close(shares[:, 0], torch.tensor([[0.0], [1.0]]).expand(2, CLASSES))


def test_ensemble_weighs_nodes_by_the_label_of_each_input() -> None:
    one = world(HYDRA)
    one.server.state.U = LabelHistogram(("n0", "n1"), U, U.sum(1))
    responses = Responses(-1, ("n0", "n1"), {"logits": Z.unsqueeze(1).expand(2, 3, 3)})
    z = HYDRA.ensemble_for_labels(one.server, one.server.state, responses, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(z, torch.tensor([[3.0, 1.0, 2.0], [0.0, 4.0, 8.0], [2.0, 2.0, 4.0]]))


def test_ensemble_without_labels_weighs_each_logit_by_its_class() -> None:
    one = world(HYDRA)
    one.server.state.U = LabelHistogram(("n0", "n1"), U, U.sum(1))
    responses = Responses(-1, ("n0", "n1"), {"logits": Z.unsqueeze(1)})
    z = HYDRA.ensemble_responses(one.server, one.server.state, responses)
    torch.testing.assert_close(z, torch.tensor([[3.0, 4.0, 4.0]]))


@pytest.mark.parametrize("bn", [0.0, 0.3])
def test_equal_weights_give_the_step_of_dense(bn: float) -> None:
    models = [made("resnet8:4", index) for index in range(2)]
    hydra = world(replace(HYDRA, bn=bn), copy.deepcopy(models))
    hydra.server.state.U = LabelHistogram.uniform(("n0", "n1"), CLASSES, hydra.server.device)
    dense = world(DENSE(**{**TINY, "bn": bn}), models)
    for _ in range(2):
        assert hydra.server.step() == pytest.approx(dense.server.step())
    same(hydra.server.student, dense.server.student, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("models", ["queried", "uploaded"])
def test_releases_of_queried_and_uploaded_models(models: Any) -> None:
    """A node is measured with 3 queries for each of 3 classes, which the others do not receive."""
    one = world(replace(HYDRA, models=models))
    for _ in range(2):
        one.server.step()
    entries = [entry for entry in one.audit.entries() if entry["node"] == "n1"]
    numbers = {(entry["query"], entry["number"]) for entry in entries}
    queries = sorted(query for query, _ in numbers)
    uploaded, queried = ["upload_model"], ["predict_class"] * 9 + ["predict_logits"] * 2
    assert queries == (uploaded if models == "uploaded" else queried)
    kinds = {kind for entry in entries for kind in entry["up"]}
    assert kinds == ({"parameters"} if models == "uploaded" else {"logits", "gradients"})


def test_outputs_only_policy_prevents_model_upload() -> None:
    with raises_refused("outputs_only: parameters"):
        world(replace(HYDRA, models="uploaded"), policy=PolicyConfig())
    world(HYDRA, policy=PolicyConfig())


def test_node_that_fails_while_it_is_measured_has_no_weight() -> None:
    one = world(HYDRA, [disagreeing(made("mlp:8", index)) for index in range(3)])
    one.federation.link = LinkConfig(quorum=0.3)
    queried: list[tuple[str, ...]] = []

    def respond(query: str, nodes: Any, sent: Any, response: Any) -> Any:
        queried.append(tuple(nodes))
        if (
            queried[-1] == ("n1",) and queried.count(("n1",)) == 4
        ):  # at its second class, after 3 steps for the first
            one.federation.exclude("n1", query, "no answer", may_rejoin=False)
            return {}
        return response()

    change_responses(one, respond)
    one.server.step()
    assert one.server.state.U.names == ("n0", "n2")
    assert one.server.state.U.counts.shape == (2, CLASSES)
