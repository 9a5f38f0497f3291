"""Methods under secure aggregation: the same metrics as without it, up to rounding."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.public import PublicData
from fedstill.federation.secure_aggregation import check_secure_aggregation
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._input_generators import InputGenerator, LabelGenerator
from fedstill.methods._public_data import StudentTraining
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.co_dream import CoDream
from fedstill.methods.dsfl import DSFL
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedavgm import FedAvgM
from fedstill.methods.feddf import FedDF
from fedstill.methods.fedgen import FedGEN
from fedstill.methods.fediod import FedIOD
from fedstill.methods.fedkd import FedKD
from fedstill.methods.fedmd import FedMD
from fedstill.methods.fedper import FedPer
from fedstill.methods.fedprox import FedProx
from fedstill.methods.fedzge import FedZGE
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, Method
from fedstill.protocol.node_side import NodeSetting, placeholder_public
from fedstill.protocol.secure_aggregation import SUM
from fedstill.tasks.classification import Classification
from tests.support import small_world
from tests.support.privacy import free_directions
from tests.support.small_world import CLASSES, World, disagreeing, made, make_nodes, public_data, run

pytestmark = pytest.mark.usefixtures("steady_adam")

FEDIOD = FedIOD(
    steps=3,
    batch=5,
    generator=InputGenerator(noise=6, width=4),
    critic=Discriminators(width=4),
    student=ReplayTraining(steps=2),
    ensemble="logits",
    gan=0.0,
    conf=0.0,
    unique=0.0,
)
FEDKD = FedKD(levels=0, gamma=float("inf"), student=StudentTraining(epochs=3, batch=8))
SUMMED = {
    "FedIOD": FEDIOD,
    "FedIOD by size": replace(FEDIOD, importance="size"),
    "FedIOD without slopes": replace(FEDIOD, backpropagate=False),
    "FedIOD with fresh queries": replace(FEDIOD, student_inputs="fresh", student=ReplayTraining(steps=1)),
    "FedKD": FEDKD,
    "FedKD, all alike": replace(FEDKD, weights="equal"),
    "FedZGE": FedZGE(
        steps=2,
        batch=4,
        generator=LabelGenerator(noise=6, width=4),
        directions=2,
        epsilon=0.1,
        student=ReplayTraining(steps=2),
    ),
    "FedAvg": FedAvg(rounds=2),
    "FedProx": FedProx(rounds=2),
    "FedAvgM": FedAvgM(rounds=2),
    "FedPer": FedPer(rounds=2),
}


def world(method: Method, sums: bool) -> World:
    same = method.needs().same_architecture
    specs = ("mlp:8",) * 4 if same else ("small-cnn:4", "resnet8:4", "mlp:8", "mlp:8")
    split = method.needs().split_models
    models = [disagreeing(made(spec, index, parted=split)) for index, spec in enumerate(specs)]
    # Only one node has examples of the last class, and only few.
    nodes = make_nodes(models, classes=lambda index: 2 if index else CLASSES)
    setting: dict[str, Any] = {"public": public_data(12)} if method.needs().public else {}
    student = made("mlp:8", "student", parted=split)
    return small_world.world(
        method, nodes, student, local=LocalConfig(epochs=2, batch=5), sums=sums, **setting
    )


@pytest.mark.parametrize("method", SUMMED.values(), ids=SUMMED)
def test_secure_aggregation_gives_equal_results(method: Method) -> None:
    plain, summed = run(world(method, False)), run(world(method, True))

    for alone, together in zip(plain.states(), summed.states(), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-3, atol=2e-5)


def test_server_sees_one_response_without_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(FEDIOD, True)

    counts_response = here.server.query("count_labels")
    responses = here.server.query("predict_logits", x=torch.zeros(5, *small_world.SHAPE))

    assert counts_response.nodes == responses.nodes == (SUM,)
    counts = sum(node.data.targets.bincount(minlength=CLASSES) for node in here.nodes)
    assert counts_response["counts"].tolist() == [counts.tolist()]  # type: ignore[union-attr]
    assert {name: tuple(tensor.shape) for name, tensor in responses.tensors.items()} == {
        "logits": (1, 5, CLASSES),
    }


def test_summed_responses_have_float32_precision() -> None:
    """Numbers with few digits, added with known weights, could be separated."""
    models = [disagreeing(made("mlp:8", index)) for index in range(3)]
    local, compute = LocalConfig(), Compute(EngineConfig(precision="bfloat16"))
    student = made("mlp:8", "student")
    method = replace(FEDIOD, importance="size")
    here = small_world.world(method, make_nodes(models), student, local=local, sums=True, compute=compute)
    here.server.query("count_labels")
    x = torch.randn(5, *small_world.SHAPE, generator=torch.Generator().manual_seed(3))

    mean = here.server.query("predict_logits", x=x)["logits"][0]

    with torch.no_grad():
        own = sum(len(node.data) * node.model(x) for node in here.nodes)
    torch.testing.assert_close(mean, own / sum(len(node.data) for node in here.nodes), rtol=0, atol=1e-5)


def test_consensus_excludes_classes_without_records() -> None:
    here = world(FEDKD, True)
    for node in here.nodes:
        node.data = replace(node.data, targets=node.data.targets.clamp(max=CLASSES - 2))

    run(here)

    z_hat = here.server.state.z_hat
    assert torch.equal(z_hat[..., -1], z_hat[..., :-1].amin(-1))


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (replace(FEDIOD, ensemble="consensus"), "ensemble"),
        (replace(FEDIOD, importance="fakeness"), "method.importance"),
        (replace(FEDIOD, gan=1.0), "--method.gan 0"),
        (replace(FEDIOD, conf=0.1), "--method.conf 0"),
        (replace(FEDIOD, unique=-0.1), "--method.unique 0"),
        (CoDream(steps=2, adversary=0.0), "link.secure_aggregation"),
        (replace(FEDKD, levels=20, z_max=9.0), "method.levels"),
        (replace(FEDKD, ensemble="probs"), "method.ensemble"),
        (replace(FEDIOD, ensemble="log_probs"), "method.ensemble"),
        (FedMD(rounds=2), "link.secure_aggregation"),
        (DSFL(rounds=2), "link.secure_aggregation"),
        (FedAvg(rounds=2, participation=0.5), "method.participation"),
        (FedGEN(rounds=2), "link.secure_aggregation"),
        (FedDF(rounds=2), "link.secure_aggregation"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_rejects_options_that_cannot_be_summed_before_any_query(method: Method, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        world(method, True)


def test_two_nodes_are_too_few() -> None:
    models = [made("mlp:8", index) for index in range(2)]

    with pytest.raises(ArgumentError, match=r"invalid link\.secure_aggregation = True"):
        small_world.world(
            FedAvg(rounds=2), make_nodes(models), made("mlp:8", "student"), local=LocalConfig(), sums=True
        )


def summed_outputs(name: str) -> str:
    """Return the outputs that a method requests as sums, or the reason why it cannot."""
    method = METHODS[name]()
    own = {part.name for part in fields(method)}
    wanted = {"ensemble": "logits", "levels": 0, "adversary": 0.0, "gan": 0.0, "conf": 0.0, "unique": 0.0}
    chosen: dict[str, Any] = {key: value for key, value in wanted.items() if key in own}
    at = NodeSetting(
        small_world.TASK,
        LocalConfig(),
        Compute(),
        placeholder_public(small_world.TASK),
        secure_aggregation=True,
    )
    try:
        queries = replace(method, **chosen).node_side(at).queries
        check_secure_aggregation(small_world.make_nodes([made("mlp:8", at) for at in range(3)]), queries)
    except ArgumentError:
        return ""
    return "sums" if any(query.sums for query in queries.values()) else "nothing is released"


def test_secure_aggregation_support_equals_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "secure-aggregation.md"
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {line.split("`")[1]: line.split("|")[2].strip() for line in lines}

    says = {"": "no", "sums": "yes"}
    assert named == {name: says.get(summed_outputs(name), summed_outputs(name)) for name in METHODS.builtin}


# --- information about a node's response in the sums of a method ---------------------------------------

STEP = 0.02  # for central differences


class Responder(nn.Module):
    """A model whose response to any input x is z + J (the first values of x), with z and J as parameters."""

    def __init__(self, classes: int, values: int, generator: torch.Generator, scale: float) -> None:
        super().__init__()
        self.z = nn.Parameter(scale * torch.randn(classes, generator=generator))
        self.J = nn.Parameter(torch.randn(classes, values, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, ...) to (B, C)."""
        return self.z + x.flatten(1)[:, : self.J.shape[1]] @ self.J.T


def responding(method: Method, nodes: int, classes: int, values: int = 1, scale: float = 1.0) -> World:
    """Return a world of such models, which training does not change.

    Sizes and class counts are unequal, except with two nodes, whose data no sum distinguishes.
    """
    generator = torch.Generator().manual_seed(nodes * classes)
    models = [Responder(classes, values, generator, scale) for _ in range(nodes)]

    def data(index: int) -> TensorData:
        counts = torch.randint(1, 9, (classes,), generator=torch.Generator().manual_seed(max(index, 1)))
        targets = torch.arange(classes).repeat_interleave(counts)
        return TensorData(torch.zeros(len(targets), *small_world.SHAPE), targets)

    public = PublicData("made", torch.zeros(4, *small_world.SHAPE), torch.zeros(4, dtype=torch.int64))
    here = small_world.world(
        method,
        make_nodes(models, data=data),
        Responder(classes, values, generator, scale),
        local=LocalConfig(optimizer="sgd", lr=0.0, lr_end=0.0),
        sums=True,
        task=Classification(classes),
        **({"public": public} if method.needs().public else {}),
    )
    for name in {"count_labels", "count_samples"} & here.side.queries.keys():
        here.server.query(name)
    return here


def server_view(here: World, gradients: bool = False) -> torch.Tensor:
    """Return everything that the server reads for one input, with the gradients of each class."""
    outputs = []
    for name, query in here.side.queries.items():
        if not query.sums_outputs or "consensus" in query.sends:  # that query equals the other one
            continue
        x = torch.zeros(1, *small_world.SHAPE, requires_grad=gradients)
        view = next(VIEWS)  # with an empty cache; the input is zero in all views
        given = {"x": x, "rows": [0, 1] if "view" in query.sends else [0], "view": view, "round": 0}
        sent = {part: given[part] for part in query.sends}
        for each in range(here.server.task.classes if gradients else 1):
            logits = here.server.query(name, nodes=(SUM,), **sent)["logits"]
            outputs.append(logits.detach().flatten())
            if gradients:
                outputs.append(torch.autograd.grad(logits[0, 0, each], x)[0].flatten())
    return torch.cat(outputs).double()


def derivatives(here: World, of: str, **how: bool) -> torch.Tensor:
    """Return derivatives of :func:`server_view` by the nodes' z or J, from central differences."""
    columns = []
    for node in here.nodes:
        parameter = node.model.get_parameter(of)
        for index in range(parameter.numel()):
            sides = []
            for step in (STEP, -2 * STEP, STEP):
                with torch.no_grad():
                    parameter.view(-1)[index] += step
                sides.append(server_view(here, **how))
            columns.append((sides[0] - sides[1]) / (2 * STEP))
    return torch.stack(columns, 1)


VIEWS = itertools.count()
ABOUT_OUTPUTS = {
    name: method
    for name, method in SUMMED.items()
    if not method.needs().same_architecture and name != "FedIOD without slopes"
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(("nodes", "classes"), [(3, 2), (3, 10), (4, 3), (5, 2)])
@pytest.mark.parametrize("method", ABOUT_OUTPUTS.values(), ids=ABOUT_OUTPUTS)
def test_sums_do_not_determine_single_responses(
    method: Method, nodes: int, classes: int, scale: float
) -> None:
    """One input gives C independent equations for K C unknowns, also if the nodes' predictions are certain.

    In that case log-probabilities are 0 in all nodes except those that predict another class.
    """
    J = derivatives(responding(method, nodes, classes, scale=scale), "z")

    assert 1 <= torch.linalg.matrix_rank(J, rtol=1e-2) <= classes
    assert all(free_directions(J, node, nodes, classes) == classes - 1 for node in range(nodes))


def test_gradients_of_a_sum_do_not_determine_single_nodes() -> None:
    """Also with known responses: a gradient gives one equation per input value, with K unknowns."""
    nodes, classes, values = 3, 2, 2
    here = responding(FEDIOD, nodes, classes, values)
    z, J = (
        derivatives(here, of, gradients=True).view(-1, nodes, classes, n)
        for of, n in (("z", 1), ("J", values))
    )

    together = torch.cat([z, J], 3).flatten(1)
    assert [free_directions(together, node, nodes, classes) for node in range(nodes)] == [1 + values] * nodes
    assert [free_directions(J.flatten(1), node, nodes, classes) for node in range(nodes)] == [values] * nodes


def test_gradients_of_two_statistics_determine_single_gradients() -> None:
    """Entropies in addition to log-probabilities would determine them, for three nodes and two classes."""
    nodes, classes, values = 3, 2, 2
    z = torch.randn(nodes, classes, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    J = torch.randn(nodes, classes, values, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([37.0, 58, 80], dtype=torch.float64)[:, None]

    def gradients(J: torch.Tensor, entropies: bool) -> torch.Tensor:
        def sums(x: torch.Tensor) -> torch.Tensor:
            log_p = (z[..., 0] + J @ x).log_softmax(1)
            added = [
                sizes * log_p,
                *([sizes * log_p * log_p.exp(), sizes * log_p.exp()] if entropies else []),
            ]
            return torch.cat([each.sum(0) for each in added])

        return torch.func.jacrev(sums)(torch.zeros(values, dtype=torch.float64)).flatten()

    for entropies, free in ((False, values), (True, 0)):
        jacobian = torch.func.jacrev(gradients)(J, entropies).flatten(1)
        assert [free_directions(jacobian, node, nodes, classes) for node in range(nodes)] == [free] * nodes
