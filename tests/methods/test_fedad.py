"""FedAD: attention maps, its single query, and the training of the student."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ModelError
from fedstill.data.public import PublicData
from fedstill.methods import fedad
from fedstill.methods.fedad import ATTENTION, FedAD
from fedstill.models import build
from fedstill.models.attention_maps import find_attention_layer, outputs_and_attention
from fedstill.models.module_utils import to_vector
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.policy import PolicyConfig
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.noisy_outputs import NoisyOutputs
from fedstill.privacy.release_rules import Derived, Exact
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks import Task
from fedstill.tasks.classification import Classification
from fedstill.tasks.reconstruction import Reconstruction
from tests.support import small_world
from tests.support.small_world import SEED, SHAPE, World, make_nodes, resumed, run

pytestmark = pytest.mark.usefixtures("steady_adam")

N = 13
IMAGES, LABELS = Reconstruction(), Classification(3)
LOCAL = LocalConfig(epochs=1, batch=4)
CONFIG = FedAD(student=replace(FedAD().student, epochs=3, batch=5))
ALIKE, MIXED = ("unet:4",) * 3, ("unet:4", "unet:2", "unet:6")


def world(
    config: FedAD = CONFIG,
    *,
    specs: Sequence[str] = MIXED,
    student: str = "unet:4",
    task: Task = IMAGES,
    stacked: bool = True,
) -> World:
    public = PublicData("made", torch.rand(N, *SHAPE, generator=torch.Generator().manual_seed(9)) * 2 - 1)

    def data(index: int) -> TensorData:
        generator = torch.Generator().manual_seed(index)
        x = torch.rand(4 + 3 * index, *SHAPE, generator=generator) * 2 - 1
        return TensorData(x, x if task is IMAGES else torch.randint(3, (len(x),), generator=generator))

    models = [build(spec, SHAPE, task.classes, 0, index).eval() for index, spec in enumerate(specs)]
    nodes = make_nodes(models, policy=PolicyConfig(), data=data)
    learner, given = build(student, SHAPE, task.classes, 0, "student"), {"stacked": stacked, "public": public}
    return small_world.world(config, nodes, learner, local=LOCAL, task=task, **given)


def responses_of(made: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return z_k and A_k of all nodes for all public images, computed directly."""
    with torch.no_grad():
        pairs = [
            outputs_and_attention(
                node.model.eval(),
                find_attention_layer(node.model, SHAPE, "it"),
                made.public.inputs,
                fedad.SIDE,
            )
            for node in made.nodes
        ]
    return torch.stack([z for z, _ in pairs]), torch.stack([A for _, A in pairs])


# --- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("unet:4", "extractor"), ("small-cnn:4", "10"), ("lenet5", "5"), ("resnet8:4", "5")],
)
def test_uses_the_last_spatial_layer(spec: str, expected: str) -> None:
    model = build(spec, SHAPE, 3, 0).train()
    assert find_attention_layer(model, SHAPE, "model") == expected
    assert model.training
    assert not any(layer._forward_hooks for layer in model.modules())


def test_rejects_network_without_spatial_layer() -> None:
    with pytest.raises(ModelError, match=r"n0 .*attention"):
        world(specs=("mlp:4",) * 3, student="mlp:4", task=LABELS)
    with pytest.raises(ModelError, match=r"student .*attention"):
        world(specs=("small-cnn:4",) * 3, student="mlp:4", task=LABELS)
    run(world(replace(CONFIG, attention=0.0), specs=("mlp:4",) * 3, student="mlp:4", task=LABELS), 1)


def test_attention_map_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten(), nn.Linear(32, 3))
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1))
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 0, 0], x[0, 0, 3, 3] = 2.0, 1.0
    z, A = outputs_and_attention(model, "0", x, 2)
    assert torch.equal(z, model(x))
    # (x^2 + 4 x^2) / 2 is 10 and 2.5, each in one of four cells: a ratio of 4 to 1.
    torch.testing.assert_close(A, F.normalize(torch.tensor([[4.0, 0.0, 0.0, 1.0]])))
    assert outputs_and_attention(model, "0", torch.zeros(1, 1, 4, 4), 2)[1].tolist() == [[0.0] * 4]


def test_maps_of_coarser_activations_are_resized() -> None:
    model = build("small-cnn:4", (1, 16, 16), 3, 0)
    A = outputs_and_attention(model, "10", torch.randn(2, 1, 16, 16), 8)[1]  # the layer's maps are 4 x 4
    assert A.shape == (2, 64)
    torch.testing.assert_close(A.norm(dim=1), torch.ones(2))
    cells = A.view(2, 4, 2, 4, 2)
    torch.testing.assert_close(cells.amax((2, 4)), cells.amin((2, 4)))


# --- queries and targets ---------------------------------------------------------------------------


def test_targets_are_weighted_mean_intersection_and_union_of_nodes() -> None:
    made = run(world(), 1)
    z, A = responses_of(made)
    shares = torch.tensor([4.0, 7.0, 10.0]) / 21  # shares of all images
    expected = (shares.view(-1, 1, 1, 1, 1) * z).sum(0)
    torch.testing.assert_close(made.server.state.targets["outputs"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.server.state.targets["least"], A.amin(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.server.state.targets["most"], A.amax(0), rtol=1e-4, atol=1e-5)


def test_equal_weights_need_no_counts() -> None:
    made = run(world(replace(CONFIG, weights="equal")), 1)
    torch.testing.assert_close(
        made.server.state.targets["outputs"], responses_of(made)[0].mean(0), rtol=1e-4, atol=1e-5
    )
    assert made.audit.traffic_totals()["queries_by_name"] == {"predict": 1}


def test_each_image_is_queried_once_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(world(), 1)
    monkeypatch.setattr(fedad, "CHUNK", 5)
    made = run(world())
    summary = made.audit.traffic_totals()
    assert summary["queries_by_name"] == {"count_labels": 1, "predict": 3}
    assert made.side.queries["predict"].times == 3
    assert summary["by_kind"]["logits"]["up"] == 3 * N * 64 * 4
    assert summary["by_kind"][ATTENTION] == {"up": 3 * N * 64 * 4, "down": 0}
    for name, value in whole.server.state.targets.items():
        torch.testing.assert_close(made.server.state.targets[name], value, rtol=1e-4, atol=1e-5)
    assert CONFIG.one_round
    planned_queries = CONFIG.planned_queries(made.public, SEED)
    assert [call.query for call in planned_queries] == ["count_labels"] + ["predict"] * 3
    assert [call.tensors["rows"].tolist() for call in planned_queries[1:]] == [[0, 5], [5, 10], [10, 13]]


def test_student_learns_outputs_and_attention() -> None:
    made = world(replace(CONFIG, student=replace(CONFIG.student, epochs=40, lr=5e-3)))
    first = made.server.step()
    last = [made.server.step() for _ in range(39)][-1]
    assert last["student"] < 0.7 * first["student"]
    assert last["attention"] < 0.7 * first["attention"]


# --- privacy ---------------------------------------------------------------------------------------


def test_attention_maps_are_covered_by_dp_sgd_but_not_by_noise_on_logits() -> None:
    side = world().side
    query = side.queries["predict"]
    assert Gate("n0", PolicyConfig(outputs_only=True), AuditLog()).refusal_reason(query) is None
    learned = PrivacyMechanism("n0", DPSGD(epsilon=5.0), side, LOCAL, 10, IMAGES)
    assert isinstance(learned.rule(query, "attention"), Derived)
    assert no_guarantee_reason(learned, query) is None
    side = world(specs=("small-cnn:4",) * 3, student="small-cnn:4", task=LABELS).side
    query = side.queries["predict"]
    noisy = PrivacyMechanism("n0", NoisyOutputs(), side, LOCAL, 10, LABELS)
    assert isinstance(noisy.rule(query, "attention"), Exact)
    priced = PrivacyMechanism("n0", NoisyOutputs(epsilon=5.0), side, LOCAL, 10, LABELS)
    refused = no_guarantee_reason(priced, query)
    assert refused is not None
    assert "no guarantee for attention maps" in refused


# --- engines, interrupted runs ---------------------------------------------------------------------


def test_stacked_and_single_nodes_give_equal_metrics() -> None:
    stacked, alone = (run(world(specs=ALIKE, stacked=stacked)) for stacked in (True, False))
    torch.testing.assert_close(
        to_vector(stacked.server.student), to_vector(alone.server.student), rtol=1e-3, atol=1e-4
    )
    assert stacked.audit.traffic_totals() == alone.audit.traffic_totals()


def test_resumed_run_reaches_equal_student_without_queries(tmp_path: Path) -> None:
    straight, rest = run(world()), run(resumed(world, 2, tmp_path), 1)
    assert torch.equal(to_vector(rest.server.student), to_vector(straight.server.student))
    assert rest.audit.traffic_totals()["queries_by_name"] == {}
