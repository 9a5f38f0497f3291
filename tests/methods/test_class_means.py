"""FD, FedProto and FedTGP: class statistics of the nodes, their aggregation, and training with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from fedstill.methods import LabelHistogram, Method, Responses
from fedstill.methods.fd import FD, mean_of_others
from fedstill.methods.fedproto import FedProto
from fedstill.methods.fedtgp import FedTGP, class_margin, contrastive_loss
from fedstill.node import local_training
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.events import Event, total_cost
from fedstill.privacy.noisy_outputs import OutputsConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.simulation import Simulation
from tests.support import digits_world, small_world
from tests.support.errors import raises_invalid, raises_refused
from tests.support.privacy import make_mechanism
from tests.support.small_world import CLASSES, World, few, kinds_of, made, make_nodes, run, same

pytestmark = pytest.mark.usefixtures("steady_adam")

LOCAL = LocalConfig(epochs=4, batch=4, lr=1e-2, smoothing=0.0)
MIXED = ("mlp:8", "lenet5:6", "mlp:8", "mlp:4")
P = 5


def world(
    config: Method, *, specs: Sequence[str] = ("mlp:8",) * 3, sizes: Sequence[int] = (6, 11, 16, 21)
) -> World:
    parted = config.needs().split_models
    models = [made(spec, index, parted=parted).eval() for index, spec in enumerate(specs)]
    nodes = make_nodes(models, sizes=sizes, classes=few)
    student = made("mlp:8", "student", parted=parted)
    return small_world.world(config, nodes, student, local=LOCAL, architectures=kinds_of(nodes))


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# --- FD ----------------------------------------------------------------------------------------------


def test_fd_target_is_the_mean_of_other_holders() -> None:
    """Excludes each node's own mean; the target is zero for a class that no other node has."""
    here = run(world(FD(rounds=3)), 1)
    F_sum, sent = here.server.state.F_sum, []
    for node in here.nodes:
        with torch.no_grad():
            p = node.model.eval()(node.data.inputs).softmax(1)
        rows = [p[node.data.targets == label] for label in range(CLASSES)]
        sent.append([each.mean(0) if len(each) else None for each in rows])
        mine = [each if each is not None else torch.zeros(CLASSES) for each in sent[-1]]
        close(node.buffers("sent")["F"], torch.stack(mine))
    for index, node in enumerate(here.nodes):
        target = mean_of_others(F_sum, node.buffers("sent"), 1)
        for label in range(CLASSES):
            rest = [each[label] for at, each in enumerate(sent) if at != index and each[label] is not None]
            close(target[label], torch.stack(rest).mean(0) if rest else torch.zeros(CLASSES))
    assert sent[0][2] is sent[1][2] is None  # only the third node has class 2
    assert not mean_of_others(F_sum, here.nodes[2].buffers("sent"), 1)[2].any()
    # A node that did not respond in the previous round subtracts nothing.
    close(mean_of_others(F_sum, here.nodes[2].buffers("sent"), 2)[2], sent[2][2])


def test_fd_counts_holders_before_clipping_negative_noise() -> None:
    sent = {"F": torch.zeros(2, 2), "round": torch.tensor(-1)}
    F_sum = torch.tensor([[0.9, -0.7], [1.4, -0.4]])  # classes held by 0.2 and 1.0 nodes
    close(mean_of_others(F_sum, sent, 1), torch.tensor([[0.0, 0.0], [1.4, 0.0]]))


def test_fd_round_at_a_node_by_hand() -> None:
    """phi(F, y) + gamma phi(F, F_hat), phi the cross-entropy, on the node's own batches."""
    config = FD(rounds=2, gamma=0.7)
    here = run(world(config, specs=("mlp:8",) * 2, sizes=(4, 4)), 1)  # one batch per epoch
    node, F_sum = here.nodes[1], here.server.state.F_sum
    F_hat = mean_of_others(F_sum, node.buffers("sent"), 1)
    model = copy.deepcopy(node.model).requires_grad_()
    optimizer = local_training.make_optimizer([*model.parameters()], LOCAL)
    for step in range(2, 4):  # the second half
        optimizer.param_groups[0]["lr"] = local_training.cosine_lr(step, 4, LOCAL.lr, LOCAL.lr_end)
        log_q, y = model(node.data.inputs).log_softmax(1), node.data.targets
        loss = -log_q[range(4), y].mean() - 0.7 * (F_hat[y] * log_q).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    here.server.step()
    same(node.model, model, rtol=1e-3, atol=1e-5)
    assert here.audit.traffic_totals()["by_kind"]["class scores"]["up"] == 2 * 2 * CLASSES**2 * 4


def test_fd_response_does_not_share_memory_with_next_round() -> None:
    config = FD(rounds=2)
    here = world(config, specs=("mlp:8",), sizes=(4,))
    view = NodeView(NodeGroup([here.nodes[0]]), here.side.setting)
    response = config.train_locally(view, torch.zeros(CLASSES, CLASSES), 0)["F"]
    before, buffer = response.clone(), here.nodes[0].buffers("sent")["F"]
    assert torch.equal(buffer, before)
    buffer.add_(1)
    assert torch.equal(response, before)


def test_fd_supports_noise_on_means_and_refuses_dp_sgd() -> None:
    noisy = make_mechanism("noisy-outputs", outputs=OutputsConfig(noise=0.5, bound=1.0))
    budgets = Simulation(digits_world.setting("fd", {}, privacies=[noisy] * 3)).nodes[0].gate.budgets
    assert budgets is not None
    # One record changes each of ten rows of ten numbers by at most 2, in each of two rounds.
    assert total_cost(budgets.mechanism.run_costs()) == {Event("laplace", 0.5 / (2 * 10)): 20}
    with raises_refused("privacy", "class scores"):
        Simulation(digits_world.setting("fd", {}, privacies=[make_mechanism("dp-sgd")] * 3))


# --- FedProto ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [0, P])
def test_fedproto_prototype_is_the_count_weighted_mean(
    features: int,
) -> None:
    """The mean is over all records of a class at all nodes, which is Eq. 6 without its first factor."""
    here = run(world(FedProto(rounds=2, features=features), specs=("mlp:8",) * 3), 1)
    sums, counts = torch.zeros(CLASSES, features or 8), torch.zeros(CLASSES)
    for node in here.nodes:
        with torch.no_grad():
            f = node.model.eval().get_submodule("extractor")(node.data.inputs)
        f = torch.nn.functional.adaptive_avg_pool1d(f, P) if features else f
        for label, each in zip(node.data.targets.tolist(), f, strict=True):
            sums[label] += each
            counts[label] += 1
    close(here.server.state.C, sums / counts.unsqueeze(1))


def test_fedproto_class_without_prototypes_keeps_its_last() -> None:
    here = world(FedProto(), specs=("mlp:8",) * 2)
    state = here.server.state
    state.histogram = LabelHistogram(("n0", "n1"), torch.tensor([[3.0, 0.0, 0.0], [1.0, 2.0, 0.0]]))
    state.C = torch.full((CLASSES, 2), 9.0)
    sent = torch.tensor([[[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [[3.0, 4.0], [5.0, 0.0], [0.0, 0.0]]])
    C = FedProto().aggregate(state, Responses(0, ("n0", "n1"), {"C": sent}))
    close(C, torch.tensor([[1.5, 2.5], [5.0, 0.0], [9.0, 9.0]]))


def test_fedproto_round_at_a_node_by_hand() -> None:
    """The loss is the task's plus lambda times the mean squared distance to the existing prototypes."""
    config = FedProto(rounds=1, lam=0.7)
    here = world(config, specs=("mlp:8",), sizes=(4,))
    node = here.nodes[0]
    node.data.targets.copy_(torch.tensor([0, 1, 1, 2]))
    C = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(0))
    C[1] = 0  # no prototype yet
    model = copy.deepcopy(node.model).requires_grad_()
    optimizer = local_training.make_optimizer([*model.parameters()], LOCAL)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = local_training.cosine_lr(step, 4, LOCAL.lr, LOCAL.lr_end)
        f = model.extractor(node.data.inputs)
        L_R = ((f[0] - C[0]).square().mean() + (f[3] - C[2]).square().mean()) / 4
        loss = torch.nn.functional.cross_entropy(model.head(f), node.data.targets) + 0.7 * L_R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    here.federation.query("train_locally", C=C, round=torch.tensor(0))
    same(node.model, model, rtol=1e-3, atol=1e-5)


def test_fedproto_requires_size_for_networks_with_different_features() -> None:
    with raises_invalid("method.features", 0, "8 values of the student", "n1"):
        world(FedProto(), specs=MIXED)
    run(world(FedProto(rounds=2, features=P), specs=MIXED))


@pytest.mark.parametrize("name", ["fedproto", "fedtgp"])
def test_prototypes_need_policy_by_name_and_no_mechanism(name: str) -> None:
    """The mean of a class with one record is that record's features, which are unbounded."""
    with raises_refused("outputs_only: prototypes"):
        Simulation(digits_world.setting(name, {}, policies=[PolicyConfig()] * 3))
    Simulation(digits_world.setting(name, {}, policies=[PolicyConfig(kinds=("prototypes",))] * 3))
    for mechanism in ("dp-sgd", "noisy-outputs"):
        with raises_refused("privacy", "depends_on_records"):
            Simulation(digits_world.setting(name, {}, privacies=[make_mechanism(mechanism)] * 3))


# --- FedTGP ------------------------------------------------------------------------------------------


def test_fedtgp_loss_with_margin_by_hand() -> None:
    draw = torch.Generator().manual_seed(3)
    sent, c = torch.randn(7, P, generator=draw), torch.tensor([0, 1, 2, 2, 1, 0, 0])
    P_hat, delta = torch.randn(CLASSES, P, generator=draw), 1.3
    each = []
    for P_i, own in zip(sent, c.tolist(), strict=True):
        phi = [(P_i - other).square().sum().sqrt() for other in P_hat]
        right = (-(phi[own] + delta)).exp()
        wrong = sum((-phi[other]).exp() for other in range(CLASSES) if other != own)
        each.append(-(right / (right + wrong)).log())
    close(contrastive_loss(sent, c, P_hat, torch.tensor(delta)), torch.stack(each).mean())


def test_fedtgp_margin_is_largest_class_distance_up_to_tau() -> None:
    sent = torch.tensor([[[0.0, 0.0], [6.0, 0.0], [9.0, 9.0]], [[0.0, 2.0], [0.0, 0.0], [9.0, 9.0]]])
    held = torch.tensor([[True, True, False], [True, False, False]])
    # Means: (0, 1) and (6, 0); no node has the third class.
    assert class_margin(sent, held, 100.0).item() == pytest.approx(37**0.5)
    assert class_margin(sent, held, 2.0).item() == 2.0


def test_fedtgp_trains_on_the_prototypes_of_held_classes() -> None:
    """A class that a node does not hold is a row of zeros; a prototype may have values of zero."""
    config = FedTGP(rounds=2, server_epochs=1, tau=100.0, server_lr=0.1)
    server = world(config).server
    state = server.state
    with torch.no_grad():
        before = state.P_hat().clone()
    C = torch.randn(2, *before.shape, generator=torch.Generator().manual_seed(0))
    C[0, 1, 0] = 0.0
    C[1, 0] = 0.0  # node 1 does not hold class 0
    held = torch.cat([C[0], C[1, 1:]])
    c = torch.tensor([*range(CLASSES), *range(1, CLASSES)])
    Q = torch.stack([C[0, 0], *((C[0, label] + C[1, label]) / 2 for label in range(1, CLASSES))])
    margin = torch.pdist(Q).max()
    metrics = config.train_prototypes(server, state, Responses(0, ("a", "b"), {"C": C}), 0)
    expected = contrastive_loss(held, c, before, margin)
    assert metrics == pytest.approx({"contrast": expected.item(), "margin": margin.item()}, rel=1e-5)
    assert not torch.equal(state.C, before)


def test_fedtgp_prototypes_move_apart_and_are_sent() -> None:
    here = world(FedTGP(rounds=2, server_epochs=400, tau=2.0, server_lr=0.05))
    sent = run(here, 1).server.state.C
    mean = run(world(FedProto(rounds=2)), 1).server.state.C
    distance, before = (torch.pdist(C).min() for C in (sent, mean))
    assert distance > 2 * before
    here.server.step()
