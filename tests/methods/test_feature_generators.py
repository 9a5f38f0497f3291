"""FedMD-CG, FedCG and FedGEN: local steps and distillation compared with plain loops, and releases.

Engines, stops and refusals: test_all_methods.py.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.methods._feature_generators import (
    FeatureGeneratorOptions,
    GlobalGenerator,
    ServerTraining,
    UploadedGenerators,
    crossed_distillation_loss,
    diversity_loss,
    ensemble_distillation_loss,
    kl,
    sample_noise,
    sample_noise_and_labels,
    stack_uploads,
)
from fedstill.methods.fedcg import FedCG, gamma_share
from fedstill.methods.fedgen import FedGEN
from fedstill.methods.fedmd_cg import FedMDCG
from fedstill.models.gan import FeatureGenerator, append_one_hot
from fedstill.models.module_utils import to_vector
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeTrainStep, NodeView
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method
from fedstill.protocol.node_side import NodeSetting
from tests.support import small_world
from tests.support.small_world import (
    CLASSES,
    SEED,
    TASK,
    World,
    assert_close_gradients,
    in_training,
    made,
    make_nodes,
)

pytestmark = pytest.mark.usefixtures("steady_adam")

LOCAL = LocalConfig(epochs=2, batch=4, smoothing=0.1)
SETTING = NodeSetting(TASK, LOCAL, Compute())
SMALL: dict[str, Any] = {
    "rounds": 2,
    "generator": FeatureGeneratorOptions(noise=4, width=6),
    "server": ServerTraining(steps=3, batch=8),
}
LAMBDAS = {"lambda1": 0.3, "lambda2": 0.5, "lambda3": 0.7, "lambda4": 1.1, "lambda5": 1.3, "lambda6": 1.7}
PRINTED: dict[str, Any] = {"temperature": 1.0, "kl_first": "student"}
MDCG, CG = FedMDCG(**SMALL, **LAMBDAS), FedCG(**SMALL)
GEN = FedGEN(**{**SMALL, "server": ServerTraining(steps=20, batch=16, lr=0.01)})
COUNTS = torch.tensor([4.0, 0.0, 12.0])


def nodes_of(count: int = 2, spec: str = "lenet5:3") -> list[Node]:
    nodes = make_nodes([made(spec, index, parted=True) for index in range(count)])
    for node in nodes:
        with torch.no_grad():
            for w in node.model.head.parameters():
                w.mul_(4)  # so that predictions and the directions of their divergences differ
    return nodes


def prepared(config: Method) -> Node:
    """Return a node with its trainable modules, outside a federation."""
    nodes = nodes_of()
    for node in nodes:
        config.node_side(SETTING).prepare(node)
    local_training.attach_optimizers(nodes, LOCAL)
    return nodes[0]


def served(method: Method, nodes: list[Node] | None = None, local: LocalConfig = LOCAL) -> World:
    nodes = nodes_of() if nodes is None else nodes
    return small_world.world(method, nodes, made("lenet5:3", "student", parted=True), local=local)


def generator_of(config: Any, node: Node) -> nn.Module:
    """Return a generator of the node's features, as the server sends it."""
    if "generator" in node.modules:
        return copy.deepcopy(node.modules["generator"])
    torch.manual_seed(3)
    return config.generator.make(node.model, node.data.inputs[:2], CLASSES)


def received(config: Any, node: Node, t: int = 1) -> GlobalGenerator:
    generator = to_vector(generator_of(config, node))
    return GlobalGenerator(config.generator, NodeView(NodeGroup([node]), SETTING), generator, COUNTS, t)


def stepped(node: Node, roles: tuple[str, ...], train_step: NodeTrainStep) -> float:
    """Return the reported loss of a step on four of a node's examples."""
    x, y = batch(node)
    return train_step(in_training(node, SETTING, *roles), 0, x, y).item()


def batch(node: Node) -> tuple[torch.Tensor, torch.Tensor]:
    return node.data.inputs[:4], node.data.targets[:4]


def slow_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) of rows of probabilities, summed element by element; the mean over rows."""
    each = [
        p[row, c] * (p[row, c].log() - q[row, c].log()) for row in range(len(p)) for c in range(p.shape[1])
    ]
    return torch.stack(each).sum() / len(p)


def slow_divergence(config: FedMDCG, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    p, q = (student / config.temperature).softmax(1), (teacher / config.temperature).softmax(1)
    return slow_kl(q, p) if config.kl_first == "teacher" else slow_kl(p, q)


# --- a step of a node's model --------------------------------------------------------------------


def test_divergence_by_hand() -> None:
    # Odds of 1:1 and 4:1; at temperature 2 the latter are 2:1.
    student, teacher = torch.tensor([0.0, 0.0]), torch.tensor([math.log(4.0), 0.0])
    one, two = replace(MDCG, temperature=1.0), replace(MDCG, temperature=2.0)
    by_hand = [
        (one, 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)),
        (replace(one, kl_first="student"), 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)),
        (two, 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)),
        (replace(two, kl_first="student"), 0.5 * math.log(3 / 4) + 0.5 * math.log(3 / 2)),
    ]
    for config, expected in by_hand:
        assert config.divergence(student, teacher).item() == pytest.approx(expected, abs=1e-6)
    assert two.divergence(student, teacher, 1.0).item() == pytest.approx(by_hand[0][1], abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PRINTED,
        {"rounds": 2, "ramp": 3.0},
        {"rounds": 3, "ramp": 3.0},
        {"rounds": 5, "ramp": 2.0},
        {"temperature": 2.0, "kl_first": "student"},
        {"aggregation": "ave*"},
        {"lambda3": 0.0},
        {"lambda1": 0.0, "lambda2": 0.0},
    ],
)
def test_stage_a_of_fedmd_cg_minimizes_eq_4(changes: dict[str, Any]) -> None:
    config = replace(MDCG, **changes)
    node = prepared(config)
    (x, y), model, G = batch(node), copy.deepcopy(node.model), generator_of(config, node).eval()
    E, D = model.extractor, model.head
    z = torch.randn(4, config.generator.noise, generator=node.random_generator("z", 1, 0))
    z_hat = torch.randn(4, config.generator.noise, generator=node.random_generator("z", 1, "resampled", 0))
    y_hat = torch.multinomial(COUNTS, 4, replacement=True, generator=node.random_generator("y", 1, 0))
    f, f_hat = E(x), G(append_one_hot(z, y, CLASSES)).detach()
    plain = F.cross_entropy(D(f), y, label_smoothing=0.1)  # Eq. 1, smoothed on real data only
    transfer = config.lambda2 * ((f - f_hat) ** 2).mean()  # Eq. 2, per value
    if config.aggregation != "ave*":
        transfer = transfer + config.lambda3 * slow_divergence(config, D(f), D(f_hat).detach())  # Eq. 2
    imagined = D(G(append_one_hot(z_hat, y_hat, CLASSES)).detach())
    transfer = transfer + config.lambda1 * F.cross_entropy(imagined, y_hat)  # Eq. 3
    # Round 1 is the last of 2, halfway in 3, at a quarter in 5: 1, 1/2^3, 1/4^2.
    share = {(3, 3.0): 1 / 8, (5, 2.0): 1 / 16}.get((config.rounds, config.ramp), 1.0)
    plain = plain + share * transfer
    plain.backward()
    G_sent = received(config, node)
    loss = stepped(node, ("model",), partial(config.model_step, G_sent))
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    assert_close_gradients(node.model, model)


def plain_step(node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = node.loss(node.model(x), y)
    node.step("model", loss)
    return loss


def test_stage_a_is_plain_training_in_the_first_round() -> None:
    one, other = prepared(MDCG), prepared(MDCG)
    G = received(MDCG, one, 0)
    for _ in range(3):
        stepped(one, ("model",), partial(MDCG.model_step, G))
        stepped(other, ("model",), plain_step)
    assert torch.equal(to_vector(one.model), to_vector(other.model))


def test_fedcg_model_minimizes_cross_entropy_plus_gamma_times_distance() -> None:
    config = replace(CG, gamma=0.6 / gamma_share(1, CG.rounds))
    node = prepared(config)
    (x, y), model, G = batch(node), copy.deepcopy(node.model), generator_of(config, node).eval()
    z = torch.randn(4, config.generator.noise, generator=node.random_generator("z", 1, 0))
    f = model.extractor(x)
    plain = F.cross_entropy(model.head(f), y, label_smoothing=0.1)
    plain = plain + 0.6 * F.mse_loss(f, G(append_one_hot(z, y, CLASSES)).detach())
    plain.backward()
    G_sent = received(config, node)
    loss = stepped(node, ("model",), partial(config.model_step, G_sent))
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    assert_close_gradients(node.model, model)


@pytest.mark.parametrize(("beta", "decay"), [(0.0, 1.0), (0.7, 0.9)])
def test_fedgen_model_minimizes_its_three_losses(beta: float, decay: float) -> None:
    """Losses on its data, on features for labels of all nodes, and towards G's output for its own labels."""
    config = replace(GEN, alpha=0.3, beta=beta, decay=decay)
    node = prepared(config)
    (x, y), model, G = batch(node), copy.deepcopy(node.model), generator_of(config, node).eval()
    y_hat = torch.multinomial(COUNTS, 4, replacement=True, generator=node.random_generator("y", 2, 0))
    z, z_same = (
        torch.randn(4, config.generator.noise, generator=node.random_generator("z", 2, *of))
        for of in ((0,), ("same", 0))
    )
    imagined, same = (
        model.head(G(append_one_hot(*of, CLASSES)).detach()) for of in ((z, y_hat), (z_same, y))
    )
    plain = F.cross_entropy(model(x), y, label_smoothing=0.1)
    plain = plain + decay**2 * 0.3 * F.cross_entropy(imagined, y_hat)
    p = same.softmax(1).detach()
    plain = plain + decay**2 * beta * (p * (p.log() - model(x).log_softmax(1))).sum(1).mean()
    plain.backward()
    G_sent = received(config, node, 2)
    loss = stepped(node, ("model",), partial(config.train_step, G_sent))
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    assert_close_gradients(node.model, model)


# --- a step of a node's generator ----------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [*({"diversity": form} for form in ("none", "div0", "div1", "div2")), PRINTED]
)
def test_stage_b_of_fedmd_cg_minimizes_eq_9(changes: dict[str, Any]) -> None:
    config = replace(MDCG, **changes)
    form = config.diversity
    node = prepared(config)
    (x, y), G, before = batch(node), generator_of(config, node).train(), to_vector(node.model)
    model = copy.deepcopy(node.model)
    z = sample_noise(NodeView(NodeGroup([node]), SETTING), 4, config.generator.noise, "generator", 1, 0)
    f, f_hat = model.extractor(x).detach(), G(append_one_hot(z, y, CLASSES))
    D = model.head
    plain = slow_divergence(replace(config, temperature=1.0), D(f_hat), D(f).detach())  # Eq. 5
    plain = plain + config.lambda4 * ((f_hat - f) ** 2).mean()  # Eq. 5, per value
    plain = plain + config.lambda5 * F.cross_entropy(D(f_hat), y)  # Eq. 6
    plain = plain + config.lambda6 * diversity_loss(form, f_hat, z, F.one_hot(y, CLASSES).float())  # Eq. 7, 8
    plain.backward()
    loss = stepped(node, ("generator",), partial(config.generator_step, 1))
    assert loss == pytest.approx(plain.item(), rel=1e-4)
    assert_close_gradients(node.modules["generator"], G, atol=1e-5)
    assert torch.equal(to_vector(node.model), before)


def test_fedcg_trains_critic_and_generator_with_fixed_model() -> None:
    node = prepared(CG)
    (x, y), G, before = batch(node), generator_of(CG, node).train(), to_vector(node.model)
    critic = copy.deepcopy(node.modules["critic"])
    z = sample_noise(NodeView(NodeGroup([node]), SETTING), 4, CG.generator.noise, "generator", 1, 0)
    f, f_hat = copy.deepcopy(node.model).extractor(x).detach(), G(append_one_hot(z, y, CLASSES))
    real, fake = (torch.cat([each, F.one_hot(y, CLASSES).float()], 1) for each in (f, f_hat))
    bce = F.binary_cross_entropy_with_logits
    L_D = bce(critic(real), torch.ones(4, 1)) + bce(critic(fake.detach()), torch.zeros(4, 1))
    adam = torch.optim.Adam(critic.parameters(), CG.generator_lr, betas=(0.5, 0.999))
    L_D.backward()
    adam.step()
    L_G = bce(critic(fake), torch.ones(4, 1))  # generated features are classified as real
    L_G.backward()
    loss = stepped(node, ("generator", "critic"), partial(CG.generator_step, 1))
    assert loss == pytest.approx((L_D + L_G).item(), rel=1e-4)
    torch.testing.assert_close(to_vector(node.modules["critic"]), to_vector(critic), rtol=1e-4, atol=1e-6)
    assert_close_gradients(node.modules["generator"], G)
    assert torch.equal(to_vector(node.model), before)


def test_rejects_local_batch_of_one() -> None:
    with pytest.raises(ArgumentError, match=r"nodes\.local\.batch = 1"):
        served(MDCG, local=replace(LOCAL, batch=1))


# --- releases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [MDCG, CG, GEN, replace(GEN, shares="model")], ids=lambda one: one.title)
def test_messages_never_contain_extractor(method: Any) -> None:
    here = small_world.run(served(method))
    model = here.nodes[0].model
    head, generator = to_vector(model.head).numel(), to_vector(here.server.state.G).numel()
    kinds = {"generator parameters": generator, "head parameters": head}
    if isinstance(method, FedGEN):
        kinds = {"head parameters": head}
        if method.shares == "model":
            kinds = {"parameters": to_vector(model).numel()}
    up = here.audit.traffic_totals()["by_kind"]
    expected = {kind: 4 * size * 2 * method.rounds for kind, size in kinds.items()}  # bytes, nodes, rounds
    assert {kind: size["up"] for kind, size in up.items() if size["up"]} == {
        **expected,
        "label counts": 4 * 2 * (CLASSES + 1),
    }


def test_nodes_receive_head_and_keep_extractor_and_generator() -> None:
    config, nodes = replace(MDCG, aggregation="ave", generator_lr=0.0), nodes_of()
    here = served(config, nodes, replace(LOCAL, lr=0.0, lr_end=0.0))  # only received weights change
    server, student = here.server, here.server.student
    before = [to_vector(node.modules["generator"]) for node in nodes]
    server.step()
    for node, old in zip(nodes, before, strict=True):
        # All nodes have the student's initial weights; averaging equal heads changed nothing.
        torch.testing.assert_close(to_vector(node.model), to_vector(student))
        assert not torch.equal(to_vector(node.modules["generator"]), old)
    with torch.no_grad():
        for w in (*student.parameters(), *server.state.G.parameters()):
            w.add_(1.0)
    marked, extractors = to_vector(student.head), [to_vector(node.model.extractor) for node in nodes]
    server.step()
    for node, extractor in zip(nodes, extractors, strict=True):
        assert torch.equal(to_vector(node.model.head), marked)
        assert torch.equal(to_vector(node.model.extractor), extractor)
        assert not node.modules["generator"].get_parameter("1.bias").any()  # the global one has 1


def test_fedgen_averages_whole_models() -> None:
    nodes = nodes_of()
    here = served(replace(GEN, shares="model"), nodes)
    here.server.step()
    sizes = torch.tensor([float(len(node.data)) for node in nodes])
    extractors = torch.stack([to_vector(node.model.extractor) for node in nodes])
    mean = (sizes / sizes.sum()) @ extractors
    torch.testing.assert_close(to_vector(here.server.student.extractor), mean)


# --- at the server, compared with plain loops ----------------------------------------------------


def networks(nodes: int) -> tuple[FeatureGenerator, nn.Linear, UploadedGenerators]:
    """Return different generators and heads, each with its own running statistics."""
    torch.manual_seed(0)
    G, D = FeatureGenerator(4, CLASSES, 5, 6), nn.Linear(5, CLASSES)
    generators, heads = [], []
    for _ in range(nodes):
        mine, head = FeatureGenerator(4, CLASSES, 5, 6), nn.Linear(5, CLASSES)
        with torch.no_grad():
            head.weight.mul_(3)
            for _ in range(5):
                mine(torch.randn(16, 4 + CLASSES))  # changes the running statistics
        generators.append(to_vector(mine))
        heads.append(to_vector(head))
    return G.eval(), D, UploadedGenerators(G, D, torch.stack(generators), torch.stack(heads))


def noise_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (6,), generator=generator)
    return append_one_hot(torch.randn(6, 4, generator=generator), y, CLASSES), y


@pytest.mark.parametrize("config", [MDCG, replace(MDCG, **PRINTED)], ids=["published", "printed"])
def test_eq_10_to_12_against_a_loop_over_nodes_and_examples(config: FedMDCG) -> None:
    G, D, uploads = networks(3)
    c, y = noise_and_labels()
    counts = [[5.0, 0.0, 2.0], [1.0, 4.0, 0.0], [2.0, 4.0, 8.0]]
    expected = [0.0, 0.0, 0.0]
    with torch.no_grad():
        for b in range(len(y)):
            label, one = int(y[b]), c[b : b + 1]
            for i in range(3):
                G_i, D_i = uploads.generators.modules[i], uploads.heads.modules[i]
                tau = counts[i][label] / sum(node[label] for node in counts)
                students = (D(G(one)), D(G_i(one)), D_i(G(one)))  # rho_g, rho_ig, rho_gi
                for which, student in enumerate(students):
                    far = slow_divergence(config, student, D_i(G_i(one)))
                    expected[which] += tau * far.item() / len(y)
    tau_all = torch.tensor(counts) / torch.tensor(counts).sum(0)
    losses = crossed_distillation_loss(uploads, G, D, c, tau_all[:, y], config.divergence)
    assert losses.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_fedcg_distillation_against_a_loop() -> None:
    G, D, uploads = networks(3)
    c, _ = noise_and_labels()
    pi, teacher = [0.2, 0.3, 0.5], torch.zeros(6, CLASSES)
    with torch.no_grad():
        for i in range(3):
            teacher += pi[i] * uploads.heads.modules[i](uploads.generators.modules[i](c))
        expected = slow_kl(teacher.softmax(1), D(G(c)).softmax(1)).item()
    assert ensemble_distillation_loss(uploads, G, D, c, torch.tensor(pi)).item() == pytest.approx(
        expected, rel=1e-4
    )


def test_each_loss_trains_its_global_networks_only() -> None:
    G, D, uploads = networks(2)
    c, y = noise_and_labels()

    def learned(which: int) -> tuple[bool, ...]:
        G.zero_grad()
        D.zero_grad()
        crossed_distillation_loss(uploads, G, D, c, torch.full((2, len(y)), 0.5), kl)[which].backward()
        return tuple(
            any(w.grad is not None and bool(w.grad.abs().sum() > 1e-6) for w in net.parameters())
            for net in (G, D)
        )

    assert [learned(which) for which in range(3)] == [(True, True), (False, True), (True, False)]
    for bench in (uploads.generators, uploads.heads):
        assert all(w.grad is None and not w.requires_grad for m in bench.modules for w in m.parameters())


@pytest.mark.parametrize("aggregation", ["kdc", "kd"])
def test_one_node_has_nothing_to_distill(aggregation: Any) -> None:
    # One step at the server: its loss is that of the averages, before they change.
    config = replace(MDCG, server=replace(MDCG.server, steps=1), aggregation=aggregation)
    here = served(config, nodes_of(1))
    for _ in range(2):
        losses = here.server.step()
        assert len(losses) > 1
        assert all(abs(value) < 1e-6 for name, value in losses.items() if name != "consistency")


def test_averages_are_weighted_by_data_and_include_buffers() -> None:
    here = served(replace(MDCG, aggregation="ave"), nodes_of(3))
    here.server.step()
    generators = [node.modules["generator"] for node in here.nodes]
    sizes = torch.tensor([6.0, 11.0, 16.0])
    for name, tensor in here.server.state.G.state_dict().items():
        own = torch.stack([G.state_dict()[name].float() for G in generators])
        expected = torch.tensordot(sizes / sizes.sum(), own, 1)
        assert torch.allclose(tensor.float(), expected, atol=0.51 if "tracked" in name else 1e-6), name
    assert generators[0].state_dict()["1.running_mean"].abs().sum() > 0


def test_consistency_is_cross_entropy_of_local_heads_on_local_generators() -> None:
    here = served(replace(MDCG, aggregation="ave"), nodes_of(3))
    consistency = here.server.step()["consistency"]
    counts = torch.stack([TASK.counts(node.data) for node in here.nodes])
    z, y = sample_noise_and_labels(Compute(), counts, 512, 4, SEED, "consistency")
    expected = 0.0
    for node, own in zip(here.nodes, counts, strict=True):
        with torch.no_grad():
            logits = node.model.head(node.modules["generator"](append_one_hot(z, y, CLASSES)))
        each = F.cross_entropy(logits, y, reduction="none")
        expected += float((own[y] / counts.sum(0)[y] * each).mean())
    assert consistency == pytest.approx(expected, rel=1e-4)


def test_labels_are_uniform_without_counts() -> None:
    """Noise can turn all counts into 0."""
    _, y = sample_noise_and_labels(Compute(), torch.zeros(2, CLASSES), 300, 4, SEED, "none")
    assert y.bincount(minlength=CLASSES).min() > 70


@pytest.mark.parametrize("shares", ["head", "model"])
def test_fedgen_generator_loss_against_a_loop(shares: Any) -> None:
    nodes, config = nodes_of(), replace(GEN, shares=shares)
    server = served(config, nodes).server
    server.step()
    G, shared = server.state.G, [node.model.get_submodule(config.shared_part) for node in nodes]
    uploads = stack_uploads(shared[0], torch.stack([to_vector(each) for each in shared]))
    counts = torch.tensor([[5.0, 0.0, 2.0], [1.0, 4.0, 0.0]])
    z, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    expected = 0.0
    with torch.no_grad():
        f = G(append_one_hot(z, y, CLASSES))  # in eval mode, as sent
        for b in range(6):
            share = counts[:, y[b]] / counts[:, y[b]].sum()
            logits = share[0] * nodes[0].model.head(f[b]) + share[1] * nodes[1].model.head(f[b])
            expected -= float(logits.softmax(0)[y[b]].log()) / 6
        losses = config.generator_loss(TASK, G, uploads, z, y, counts)
    assert losses[0].item() == pytest.approx(expected, rel=1e-4)
    assert losses[1].item() == pytest.approx(diversity_loss("div0", f, z, y).item(), rel=1e-5)


def test_fedgen_server_trains_only_the_generator() -> None:
    nodes = nodes_of()
    server = served(GEN, nodes).server
    first = server.step()
    heads = torch.stack([to_vector(node.model.head) for node in nodes])
    uploads, student = stack_uploads(nodes[0].model.head, heads), to_vector(server.student)
    losses = [
        GEN.train_generator(server, server.state, uploads, torch.ones(2, 3), t)["generator"] for t in range(5)
    ]
    assert losses[-1] < 0.5 * first["generator"]
    assert torch.equal(student, to_vector(server.student))
    assert all(torch.equal(*each) for each in zip(heads, map(to_vector, uploads.modules), strict=True))
    assert not server.state.G.training  # used with its running statistics, as sent


# --- diversity, by hand on a batch of three ------------------------------------------------------

# Three outputs, their noise and labels 0, 0, 1. Distances: of f 0.5, 1.0 and 0.5; of z 1, 4 and 5.
OUTPUTS = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]) / 10
Z = torch.tensor([[0.0], [1.0], [-4.0]])
Y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
PAIRS = ((0.5, 1.0, 0), (1.0, 4.0, 1), (0.5, 5.0, 1))  # ||f_j - f_k||, ||z_j - z_k||, labels differ
WEIGHTS = {
    "div0": lambda z, other: z,
    "div1": lambda z, other: math.sqrt(z**2 + 2 * other),  # different one-hot labels have distance sqrt 2
    "div2": lambda z, other: z * (math.e**2 if other else 1.0),
}


@pytest.mark.parametrize("form", WEIGHTS)
def test_diversity_is_eq_7_l_div_1_and_eq_8(form: Any) -> None:
    # Each pair in both orders, and three of distance 0; f has 2 values.
    exponent = sum(-2 * f * WEIGHTS[form](z, other) for f, z, other in PAIRS) / 9 / math.sqrt(2)
    value = diversity_loss(form, OUTPUTS, Z, Y).item()
    assert value == pytest.approx(math.exp(exponent), rel=1e-5)
    if form != "div1":  # distances per value do not grow with the number of values
        more = diversity_loss(form, OUTPUTS.repeat(1, 50), Z.repeat(1, 8), Y)
        assert more.item() == pytest.approx(value, rel=1e-4)


def test_no_diversity_is_zero_for_each_stacked_generator() -> None:
    stacked = (each.expand(2, *each.shape) for each in (OUTPUTS, Z, Y))
    assert diversity_loss("none", *stacked).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("form", WEIGHTS)
def test_diversity_gradients_are_finite_for_equal_outputs(form: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(4, 30, 6, generator=generator)
    f[1] = f[1, :1]  # a generator that has collapsed
    f.requires_grad_()
    z = torch.randn(4, 30, 2, generator=generator)
    y = F.one_hot(torch.randint(3, (4, 30), generator=generator), 3).float()
    values = diversity_loss(form, f, z, y)
    assert values[1].item() == pytest.approx(1.0, abs=1e-3)
    alone = torch.stack([diversity_loss(form, f[index], z[index], y[index]) for index in range(4)])
    torch.testing.assert_close(values, alone, rtol=1e-4, atol=0.0)
    values.sum().backward()
    assert f.grad is not None
    assert f.grad.isfinite().all()
    assert (f.grad[[0, 2, 3]] != 0).any()
