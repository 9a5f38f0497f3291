"""What FedMD-CG, FedCG and FedGEN share: messages, crossed distillation, losses of diversity.

Engines, stops and refusals: test_all_methods.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.methods._generators import diversity, imagined
from fedstill.methods._local_generators import Uploads, crossed, ensembled
from fedstill.methods.fedcg import FedCG
from fedstill.methods.fedgen import FedGEN
from fedstill.methods.fedmd_cg import FedMDCG
from fedstill.models.features import FeatureGenerator, condition
from fedstill.models.split import Split
from fedstill.models.vector import to_vector
from fedstill.protocol.method import Method
from fedstill.protocol.schedule import LocalConfig
from tests.methods import small_world
from tests.methods.small_world import CLASSES, SEED, TASK, World, made, make_nodes

pytestmark = pytest.mark.usefixtures("steady_adam")

LOCAL = LocalConfig(epochs=2, batch=4)
SMALL: dict[str, Any] = {
    "rounds": 3,
    "noise": 4,
    "generator_width": 6,
    "server_steps": 3,
    "server_batch": 8,
    "server_lr": 0.001,
}
METHODS = [
    pytest.param(FedMDCG(**SMALL), id="fedmd-cg"),
    pytest.param(FedCG(**SMALL), id="fedcg"),
    pytest.param(FedGEN(**SMALL), id="fedgen"),
    pytest.param(FedGEN(**SMALL, shares="model"), id="fedgen, whole models"),
]


def world(method: Method, *, count: int = 3, local: LocalConfig = LOCAL) -> World:
    models = [made("small-cnn:4", index, parted=True) for index in range(count)]
    nodes = make_nodes(models, classes=lambda index: min(index + 1, CLASSES))
    return small_world.world(method, nodes, made("small-cnn:4", "student", parted=True), local=local)


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_extractor_is_in_no_message(method: Any) -> None:
    here = world(method)
    asked: list[tuple[str, dict[str, int]]] = []
    answer = here.server.federation.ask

    def listen(question: str, **given: Any) -> Any:
        answers = answer(question, **given)
        asked.append((question, {name: out[0].numel() for name, out in answers.tensors.items()}))
        return answers

    here.server.federation.ask = listen  # type: ignore[method-assign]
    for _ in range(method.rounds):
        here.server.step()
    model = here.nodes[0].model
    assert isinstance(model, Split)
    head, generator = to_vector(model.head).numel(), to_vector(here.server.state.G).numel()
    whole = to_vector(model).numel()
    if isinstance(method, FedGEN):
        each = {"parameters": whole if method.shares == "model" else head}
        kinds = {"parameters" if method.shares == "model" else "head parameters": each["parameters"]}
    else:
        each = {"generator": generator, "head": head}
        kinds = {"generator parameters": generator, "head parameters": head}
    assert asked == [("begin", {}), ("count_labels", {"counts": CLASSES, "sizes": 1})] + [("train", each)] * 3
    up = here.audit.summary()["by_kind"]
    expected = {kind: 4 * size * 3 * method.rounds for kind, size in kinds.items()}  # bytes, nodes, rounds
    assert {kind: told["up"] for kind, told in up.items() if told["up"]} == {
        **expected,
        "label counts": 4 * 3 * (CLASSES + 1),
    }


# --- at the server, against plain loops ------------------------------------------------------------


def networks(nodes: int) -> tuple[FeatureGenerator, nn.Linear, Uploads]:
    """Unlike generators and heads, with running statistics of their own."""
    torch.manual_seed(0)
    G, D = FeatureGenerator(4, CLASSES, 5, 6), nn.Linear(5, CLASSES)
    generators, heads = [], []
    for _ in range(nodes):
        mine, head = FeatureGenerator(4, CLASSES, 5, 6), nn.Linear(5, CLASSES)
        with torch.no_grad():
            head.weight.mul_(3)
            for _ in range(5):
                mine(torch.randn(16, 4 + CLASSES))  # moves the running statistics
        generators.append(to_vector(mine))
        heads.append(to_vector(head))
    return G.eval(), D, Uploads(G, D, torch.stack(generators), torch.stack(heads))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (6,), generator=generator)
    return condition(torch.randn(6, 4, generator=generator), y, CLASSES), y


def plain_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) of two distributions, as numbers."""
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p.tolist(), q.tolist(), strict=True))


def test_eq_10_to_12_against_a_loop_over_nodes_and_examples() -> None:
    G, D, uploads = networks(3)
    c, y = batch()
    counts = [[5.0, 0.0, 2.0], [1.0, 4.0, 0.0], [2.0, 4.0, 8.0]]
    expected = [0.0, 0.0, 0.0]
    with torch.no_grad():
        for b in range(len(y)):
            label, one = int(y[b]), c[b : b + 1]
            total = sum(node[label] for node in counts)
            for i in range(3):
                G_i, D_i = uploads.generators.modules[i], uploads.heads.modules[i]
                tau = counts[i][label] / total
                rho_i = D_i(G_i(one))[0].softmax(0)
                students = (D(G(one)), D(G_i(one)), D_i(G(one)))  # rho_g, rho_ig, rho_gi
                for which, student in enumerate(students):
                    expected[which] += tau * plain_kl(student[0].softmax(0), rho_i) / len(y)
    tau_all = torch.tensor(counts) / torch.tensor(counts).sum(0)
    losses = crossed(uploads, G, D, c, tau_all[:, y])
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)


def test_fedcgs_distillation_against_a_loop() -> None:
    G, D, uploads = networks(3)
    c, y = batch()
    pi = [0.2, 0.3, 0.5]
    expected = 0.0
    with torch.no_grad():
        for b in range(len(y)):
            one = c[b : b + 1]
            teacher = torch.zeros(CLASSES)
            for i in range(3):
                teacher += pi[i] * uploads.heads.modules[i](uploads.generators.modules[i](one))[0].softmax(0)
            expected += plain_kl(teacher, D(G(one))[0].softmax(0)) / len(y)
    assert ensembled(uploads, G, D, c, torch.tensor(pi)).item() == pytest.approx(expected, rel=1e-4)


def test_only_the_global_networks_learn_and_each_where_the_paper_says() -> None:
    G, D, uploads = networks(2)
    c, y = batch()
    tau = torch.full((2, len(y)), 0.5)

    def learned(which: int) -> tuple[bool, bool]:
        G.zero_grad()
        D.zero_grad()
        crossed(uploads, G, D, c, tau)[which].backward()  # type: ignore[no-untyped-call]
        moved = [
            any(w.grad is not None and bool(w.grad.abs().sum() > 1e-6) for w in net.parameters())
            for net in (G, D)
        ]
        return moved[0], moved[1]

    assert [learned(which) for which in range(3)] == [(True, True), (False, True), (True, False)]
    for bench in (uploads.generators, uploads.heads):
        assert all(w.grad is None and not w.requires_grad for m in bench.modules for w in m.parameters())


@pytest.mark.parametrize("aggregation", ["kdc", "kd"])
def test_with_one_node_the_average_is_all_there_is_to_distil(aggregation: str) -> None:
    # One step at the server: its loss is that of the averages, before they are moved.
    config = FedMDCG(**{**SMALL, "server_steps": 1}, aggregation=aggregation)  # type: ignore[arg-type]
    here = world(config, count=1)
    for _ in range(2):
        losses = here.server.step()
        assert len(losses) > 1
        assert all(abs(value) < 1e-6 for name, value in losses.items() if name != "consistency")
    ave = world(replace(config, aggregation="ave"), count=1)
    ave.server.step()
    assert torch.equal(to_vector(ave.server.state.G), to_vector(ave.nodes[0].modules["generator"]))


def test_averages_are_weighed_by_data_and_hold_the_running_statistics() -> None:
    here = world(FedMDCG(**SMALL, aggregation="ave"))
    here.server.step()
    generators = [node.modules["generator"] for node in here.nodes]
    sizes = torch.tensor([9.0, 14.0, 19.0])
    for name, tensor in here.server.state.G.state_dict().items():
        own = torch.stack([G.state_dict()[name].float() for G in generators])
        expected = torch.tensordot(sizes / sizes.sum(), own, 1)
        assert torch.allclose(tensor.float(), expected, atol=0.51 if "tracked" in name else 1e-6), name
    moved = generators[0].state_dict()["1.running_mean"]
    assert moved.abs().sum() > 0


def test_consistency_is_the_cross_entropy_of_local_heads_on_local_generators() -> None:
    here = world(FedMDCG(**SMALL, aggregation="ave"))
    found = here.server.step()["consistency"]
    counts = torch.stack([TASK.counts(node.data) for node in here.nodes])
    z, y = imagined(Compute(), counts, 512, 4, SEED, "consistency")
    expected = 0.0
    for node, own in zip(here.nodes, counts, strict=True):
        model = node.model
        assert isinstance(model, Split)
        with torch.no_grad():
            logits = model.head(node.modules["generator"](condition(z, y, CLASSES)))
        each = nn.functional.cross_entropy(logits, y, reduction="none")
        expected += float((own[y] / counts.sum(0)[y] * each).mean())
    assert found == pytest.approx(expected, rel=1e-4)


# --- diversity, by hand on a batch of three -------------------------------------------------------

# Three outputs, their noise and labels 0, 0, 1. Distances: of f 5, 10 and 5 tenths; of z 1, 4 and 5.
F = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]) / 10
Z = torch.tensor([[0.0], [1.0], [-4.0]])
Y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
PAIRS = ((0.5, 1.0, 0), (1.0, 4.0, 1), (0.5, 5.0, 1))  # ||f_j - f_k||, ||z_j - z_k||, labels differ
WEIGHTS = {
    "div0": lambda z, other: z,
    "div1": lambda z, other: math.sqrt(z**2 + 2 * other),  # one-hot labels that differ are sqrt 2 apart
    "div2": lambda z, other: z * (math.e**2 if other else 1.0),
}


@pytest.mark.parametrize("form", WEIGHTS)
def test_diversity_is_eq_7_l_div_1_and_eq_8(form: Any) -> None:
    # Each pair both ways, and three of no distance; f has 2 values.
    exponent = sum(-2 * f * WEIGHTS[form](z, other) for f, z, other in PAIRS) / 9 / math.sqrt(2)
    value = diversity(form, F, Z, Y).item()
    assert value == pytest.approx(math.exp(exponent), rel=1e-5)
    if form != "div1":  # distances per value do not grow with the number of values
        assert diversity(form, F.repeat(1, 50), Z.repeat(1, 8), Y).item() == pytest.approx(value, rel=1e-4)
    assert diversity("none", F, Z, Y) == 0


@pytest.mark.parametrize("form", WEIGHTS)
def test_groups_are_apart_and_equal_outputs_get_finite_gradients(form: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(4, 30, 6, generator=generator)
    f[1] = f[1, :1]  # a generator that has collapsed
    f.requires_grad_()
    z = torch.randn(4, 30, 2, generator=generator)
    y = nn.functional.one_hot(torch.randint(3, (4, 30), generator=generator), 3).float()
    values = diversity(form, f, z, y)
    assert values[1].item() == pytest.approx(1.0, abs=1e-3)
    for index in range(4):
        alone = diversity(form, f[index], z[index], y[index])
        assert values[index].item() == pytest.approx(alone.item(), rel=1e-4)
    values.sum().backward()
    assert f.grad is not None
    assert f.grad.isfinite().all()
    assert (f.grad[[0, 2, 3]] != 0).any()


def test_batches_of_one_cannot_be_normalised() -> None:
    with pytest.raises(ArgumentError, match=r"nodes\.local\.batch is 1"):
        world(FedMDCG(**SMALL), local=replace(LOCAL, batch=1))
