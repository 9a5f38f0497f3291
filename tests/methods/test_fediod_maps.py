"""FedIODMaps, which generates images from label maps: segmentation and reconstruction."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.federation.responses import Responses
from fedstill.methods._label_maps import owner_id
from fedstill.methods._label_shift import LabelShift
from fedstill.methods._replay_memory import Augment, Replay
from fedstill.methods.fediod import FedIOD
from fedstill.methods.fediod_maps import FedIODMaps
from fedstill.models.perceptual import perceptual_loss
from fedstill.protocol.needs import unmet_need
from fedstill.tasks.classification import Classification
from fedstill.tasks.segmentation import Segmentation
from tests.support.errors import raises_invalid
from tests.support.map_world import (
    FIOD,
    RECONSTRUCTION,
    SHAPE,
    TASK,
    everything,
    sent_order,
    up,
    vgg,
    weights,
    world,
)
from tests.support.small_world import SEED, change_responses, changed, resumed

pytestmark = pytest.mark.usefixtures("steady_adam")

FULL = changed(FIOD, generator={"perceptual": 0.5, "pixel": 2.0}, conf=0.7, unique=0.4, mimic=0.3, gan=0.1)


def real_of(node: Any, row: int, pose: int) -> torch.Tensor:
    image = node.data.inputs[sent_order(node)][row]
    return torch.rot90(image.flip(-1) if pose % 2 else image, pose // 2, (-2, -1))


@pytest.mark.parametrize("augment", ["none", "turn"])
def test_gradient_of_the_generator_equals_plain_autograd(augment: Any) -> None:
    features, config = vgg(), changed(FULL, generator={"augment": augment})
    one, plain = world(config, features=features), world(config, features=features)
    losses = one.server.step()

    for node in plain.nodes:  # stands for the queries before the first predict_logits
        node.model.requires_grad_(False)
    G, S = plain.server.state.generator.G, plain.server.student.eval()
    source = plain.server.state.generator.source
    source.load_state_dict(one.server.state.generator.source.state_dict(), torch.device("cpu"))
    batch = source.sample_batch(config.batch, "w", 0)
    x = G(TASK.encode_maps(batch.maps))
    sizes = [float(len(node.data)) for node in plain.nodes]
    pi = torch.tensor(sizes) / sum(sizes)
    number = 1 + len(plain.nodes)  # query 0 was for the counts, then each node was queried for its maps
    gan, unlike, z = torch.zeros(()), torch.zeros(()), []
    for k, node in enumerate(plain.nodes):
        D, sampled = node.modules["critic"].train(), node.sample_batch(config.batch, "critic", number)
        real = torch.cat([TASK.encode_maps(TASK.label_maps(sampled)), sampled.inputs], 1)
        fake = torch.cat([TASK.encode_maps(batch.maps), x], 1)
        D_loss = F.softplus(D(real)).mean() + F.softplus(-D(fake.detach())).mean()
        optimizer = torch.optim.Adam(D.parameters(), config.critic.lr, betas=(0.5, 0.999))
        D_loss.backward()
        optimizer.step()
        gan = gan + pi[k] * F.softplus(D(fake)).flatten(1).sum(1).mean()
        z.append(node.model(x))
        for row, (owner, index, pose) in enumerate(batch.source.tolist()):
            if owner == owner_id(node.name):
                target = real_of(node, index, pose)
                unlike = unlike + 2.0 * (x[row] - target).abs().mean() / config.batch
                far = perceptual_loss(features, x[row : row + 1], target.unsqueeze(0))
                unlike = unlike + 0.5 * far.sum() / config.batch
    q = torch.stack(z).softmax(2)  # (K, B, C, H, W)
    entropies = -(q * q.log()).sum(2).mean((1, 2, 3))
    conf = (pi * entropies).sum()
    mean = (pi.view(-1, 1, 1, 1, 1) * q).sum(0)
    unique = conf + (mean * mean.log()).sum(1).mean()
    counts = torch.stack([TASK.counts(node.data) for node in plain.nodes])
    share = (counts / counts.sum(0)).view(len(sizes), 1, 2, 1, 1)
    z_bar = (share * torch.stack(z).log_softmax(2)).sum(0)
    target = z_bar.log_softmax(1)
    mimic = (target.exp() * (target - S(x).log_softmax(1))).sum(1).mean()
    loss = 0.1 * gan + unlike + 0.7 * conf + 0.4 * unique - 0.3 * mimic
    loss.backward()

    expected = {"gan": gan, "difference": unlike, "conf": conf, "unique": unique, "mimic": mimic}
    for name, value in expected.items():
        assert losses[name] == pytest.approx(value.item(), rel=1e-3, abs=1e-5), name
    assert losses["balance"] == 0
    learned = one.server.state.generator.G.named_parameters()
    for (name, mine), other in zip(learned, G.parameters(), strict=True):
        assert (mine.grad - other.grad).norm() < 0.01 * other.grad.norm(), name
        assert mine.grad.abs().max() > 1e-6, name


def test_released_bytes() -> None:
    one = world(specs=("unet:2", "unet:2"))
    one.server.step()
    batch, pixels = FIOD.batch, 16 * 16
    assert up(one) == {
        "label maps": (5 + 8) * pixels,
        "label counts": 2 * (2 + 1) * 4,
        "logits": 2 * batch * 2 * pixels * 4,
        "critic": 2 * batch * 4 * 4 * 4,
        "difference": 2 * batch * 4,
        "gradients": 2 * batch * pixels * 4,
    }
    kinds = one.audit.traffic_totals()["by_kind"]
    assert kinds["label maps"]["down"] == 2 * batch * pixels, "maps of one node are sent to the others"


def test_nodes_get_no_gradients_of_logits_without_losses_on_them() -> None:
    down = []
    for weight in (0.0, 0.1):
        one = world(specs=("unet:2", "unet:2"), conf=0.0, unique=0.0, mimic=weight)
        one.server.step()
        down.append(one.audit.traffic_totals()["by_kind"]["gradients"]["down"])
    of_critic_and_difference = 2 * FIOD.batch * (4 * 4 + 1) * 4
    assert down == [of_critic_and_difference, of_critic_and_difference + 2 * FIOD.batch * 2 * 16 * 16 * 4]


def test_notes_that_perceptual_loss_is_off() -> None:
    assert world().side.notes == (
        "perceptual loss is off (nodes have no pretrained features: nodes.perceptual names a backbone, or a "
        "file of a VGG)",
    )
    assert world(features=vgg()).side.notes == ()
    assert world(generator={"perceptual": 0.0}).side.notes == ()
    assert world(generator={"conditions": "drawn"}).side.notes == ()


# --- pretraining ---------------------------------------------------------------------------------


def test_pretraining_trains_generator_and_critics_only() -> None:
    one = world(pretrain=2)
    assert one.server.total_steps == 2 + FIOD.steps
    student, before = weights(one.server.student), everything(one)
    for _ in range(2):
        losses = one.server.step()
        assert set(losses) == {"gan", "difference"}
    assert torch.equal(weights(one.server.student), student)
    after = everything(one)
    assert not torch.equal(after[len(student) :], before[len(student) :])
    assert "logits" not in up(one)
    one.server.step()
    assert not torch.equal(weights(one.server.student), student)
    assert one.audit.traffic_totals()["queries_by_name"] == {
        "count_labels": 1, "send_label_maps": 3, "score_with_critic": 2, "predict_logits": 1,
    }  # fmt: skip


def test_pretraining_weights_critics_as_training_does() -> None:
    losses = {}
    for how in ("size", "average"):
        one = world(pretrain=1, gan_weights=how)
        given: list[torch.Tensor] = []

        def respond(query: str, *_: Any, given: list[torch.Tensor] = given) -> Any:
            responses = _[-1]()
            if query == "score_with_critic":
                given.extend(
                    F.softplus(each["critic"]).flatten(1).sum(1).mean() for each in responses.values()
                )
            return responses

        change_responses(one, respond)
        losses[how] = one.server.step()["gan"]
        n = torch.tensor([len(node.data) for node in one.nodes]).float()
        pi = n / n.sum() if how == "size" else torch.full((3,), 1 / 3)
        assert losses[how] == pytest.approx(float(pi @ torch.stack(given).detach()), rel=1e-5)
    assert abs(losses["size"] - losses["average"]) > 1e-4, "nodes have different sizes"


def test_student_schedule_excludes_pretraining() -> None:
    """The generator's rate decreases over all steps, the student's over the steps in which it is trained."""
    one = world(pretrain=1, steps=2, student={"lr": 0.5, "lr_end": 0.1})
    rates = []
    for _ in range(3):
        one.server.step()
        rates.append(one.server.state.student.adam.param_groups[0]["lr"])
    assert rates == pytest.approx([0.5, 0.5, 0.1])


@pytest.mark.parametrize(
    "options", [{"pretrain": -1}, {"pretrain": 3, "gan": 0.0}, {"pretrain": 3, "backpropagate": False}]
)
def test_rejects_pretraining_without_critics(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"invalid method\.pretrain = "):
        FedIODMaps(**options)


def test_preview_samples_have_maps() -> None:
    one = world()
    assert one.server.preview_samples(5) is None is one.server.preview_maps(5), "no node has sent maps yet"
    one.server.step()
    x, maps = one.server.preview_samples(5), one.server.preview_maps(5)
    assert maps.shape == (5, 16, 16)
    assert maps.dtype == torch.uint8
    torch.testing.assert_close(x, one.server.state.generator.G(TASK.encode_maps(maps)))


# --- augmentation of replayed images -------------------------------------------------------------


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip", "turn"])
def test_replayed_maps_are_augmented_with_images(augment: Any) -> None:
    x = torch.rand(8, *SHAPE, generator=torch.Generator().manual_seed(0))
    memory = Replay(20, augment, TASK, SHAPE, SEED)
    memory.add(x, torch.cat([x, -2 * x], 1), (200 * x[:, 0]).to(torch.uint8))
    moved, responses, maps = memory.sample(100, 0)
    assert torch.equal(responses, torch.cat([moved, -2 * moved], 1))
    assert torch.equal(maps, (200 * moved[:, 0]).to(torch.uint8))
    assert torch.equal(moved, x) == (augment == "none")
    if augment == "turn":
        for before, after in zip(x, moved, strict=True):
            poses = [torch.rot90(image, k, (-2, -1)) for image in (before, before.flip(-1)) for k in range(4)]
            assert any(torch.equal(after, pose) for pose in poses)


def test_shift_flip_mirrors_half_of_the_images() -> None:
    x = torch.rand(8, *SHAPE, generator=torch.Generator().manual_seed(0))
    modes: tuple[Augment, ...] = ("shift", "shift-flip")
    samples = []
    for augment in modes:
        memory = Replay(200, augment, TASK, SHAPE, SEED)
        memory.add(x.repeat(20, 1, 1, 1), torch.zeros(160, 2, *SHAPE[1:]))
        samples.append(memory.sample(100, 0)[0])
    same, mirrored = samples[1] == samples[0], samples[1] == samples[0].flip(-1)
    assert (same.flatten(1).all(1) ^ mirrored.flatten(1).all(1)).all()
    assert 30 < mirrored.flatten(1).all(1).sum() < 70


def test_rejects_invalid_replay_augmentation() -> None:
    with raises_invalid("method.student.augment", "shift", "none"):
        Replay(9, "shift", RECONSTRUCTION, SHAPE, 0)
    with raises_invalid("method.student.augment", "turn", "shift-flip or less"):
        Replay(9, "turn", TASK, (1, 16, 24), 0)


# --- labels of the maps --------------------------------------------------------------------------


class Constant(nn.Module):
    """Network with the logits 0 and 5 log 3 at each pixel: probabilities 1/4 and 3/4 at temperature 5."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 5 * math.log(3)]).view(1, 2, 1, 1).expand(len(x), 2, *x.shape[2:])


def test_published_loss_of_the_student_by_hand() -> None:
    """The published code adds KL at temperature 5, without its square, and the negative log-likelihood of
    labels. Half of the pixels are body (code 1, class 0), half tumor (code 2, class 1); targets are equal.

    KL: log(2) / 2 + log(2 / 3) / 2. Likelihood: log(1 + 3^5) for class 0, the same minus 5 log 3 for class 1.
    """
    one = world(task=Segmentation(2, dice=0.0), tau=5.0, map_loss=25.0)
    student = one.server.state.student
    student.S = Constant()
    maps = torch.ones(3, 16, 16, dtype=torch.uint8)
    maps[:, :8] = 2
    kl = (math.log(2) + math.log(2 / 3)) / 2
    likelihood = math.log(1 + 3**5) - 5 * math.log(3) / 2
    loss = student.loss(torch.zeros(3, *SHAPE), torch.zeros(3, 2, 16, 16), maps)
    assert loss.item() == pytest.approx(25 * (kl + likelihood), rel=1e-5)


@pytest.mark.parametrize("student_inputs", ["replayed", "fresh"])
def test_student_alone_learns_the_labels_of_the_maps(student_inputs: Any) -> None:
    without, one = (world(student_inputs=student_inputs, map_loss=weight) for weight in (0.0, 2.0))
    student, seen = one.server.state.student, []
    step = student.step
    student.step = lambda x, z, maps: (seen.append((x, maps)), step(x, z, maps))[1]
    for created in (without, one):
        created.server.step()
    G, source = one.server.state.generator.G, one.server.state.generator.source
    assert torch.equal(weights(G), weights(without.server.state.generator.G))
    assert not torch.equal(weights(one.server.student), weights(without.server.student))
    assert len(seen) == FIOD.student.steps
    for x, maps in seen:
        if student_inputs == "fresh":
            torch.testing.assert_close(x, G(TASK.encode_maps(maps)))
        else:  # the memory has one query's inputs
            assert torch.equal(maps, source.sample_batch(FIOD.batch, "w", 0).maps)


# --- label shift ---------------------------------------------------------------------------------


def test_label_shift_corrects_targets_to_class_shares_of_node() -> None:
    one = world(label_shift=True, importance="size", student={"steps": 1})
    student = one.server.state.student
    learned: list[torch.Tensor] = []
    step = student.step
    student.step = lambda x, z, maps: (learned.append(z), step(x, z, maps))[1]
    for _ in range(2):
        one.server.step()
    z = student.replay._z[: len(student.replay)]  # the ensemble's logits
    square = sum(node.data.targets.double().mean((1, 2)).sum() for node in one.nodes)
    held = square / sum(len(node.data) for node in one.nodes)
    share = z.argmax(1).double().mean()
    moved = (held / (1 - held)).log() - (share / (1 - share)).log()  # log-odds of the second class
    assert abs(moved) > 0.5, "the test needs a large shift"
    stored, target = student.replay.sample(FIOD.student.batch, 1, 0)[1], learned[1]
    difference = (target[:, 1] - target[:, 0]) - (stored[:, 1] - stored[:, 0])
    torch.testing.assert_close(difference, torch.full_like(difference, moved.item()), rtol=1e-3, atol=1e-3)


def test_label_shift_ignores_absent_classes() -> None:
    """Ignores classes that were never predicted, and counts that noise has made negative."""
    shift = LabelShift(3, torch.device("cpu"))
    shift.set_real_counts(torch.tensor([3.0, 1.0, -2.0]))
    shift.count_decisions(torch.eye(3)[[0, 0, 2]])
    torch.testing.assert_close(
        shift.correct_logits(torch.zeros(1, 3)), torch.tensor([[9 / 8, 1.0, 1.0]]).log()
    )
    shift.set_real_counts(torch.tensor([0.0, -1.0, -2.0]))
    assert torch.equal(shift.correct_logits(torch.zeros(1, 3)), torch.zeros(1, 3))


def test_label_shift_requires_classes() -> None:
    with raises_invalid("method.label_shift", True, "false"):
        world(task=RECONSTRUCTION, label_shift=True).server.step()


# --- engines, interrupted runs -------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance": "realness", "student_inputs": "fresh", "gan_weights": "expertise"},
        {"generator": {"conditions": "drawn"}, "pretrain": 1},
        {
            "student": {"augment": "turn"},
            "generator": {"augment": "mirror"},
            "ensemble": "consensus",
            "label_shift": True,
        },
    ],
)
def test_stacked_and_single_nodes_give_equal_metrics(options: dict[str, Any]) -> None:
    stacked, alone = world(**options), world(**options, stacked=False)
    for _ in range(2):
        one, other = stacked.server.step(), alone.server.step()
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    # At the edge of a ReLU, rounding decides whether there is a gradient.
    torch.testing.assert_close(
        stacked.server.preview_samples(3), alone.server.preview_samples(3), rtol=0.02, atol=0.01
    )
    assert stacked.audit.traffic_totals() == alone.audit.traffic_totals()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"pretrain": 1, "generator": {"augment": "turn"}},
        {"student_inputs": "fresh"},
        {"label_shift": True},
        {"map_loss": 2.0},
    ],
)
def test_resumed_training_equals_uninterrupted(options: dict[str, Any], tmp_path: Path) -> None:
    whole = world(**options, features=vgg())
    second = resumed(lambda: world(**options, features=vgg()), 2, tmp_path)
    expected = [whole.server.step() for _ in range(3)]
    assert second.server.step() == expected[2]
    assert torch.equal(everything(second), everything(whole))
    assert torch.equal(second.server.preview_samples(3), whole.server.preview_samples(3))


def test_preview_responses_need_no_maps() -> None:
    one = world(importance="realness")
    one.server.step()
    x = one.nodes[0].data.inputs
    before = copy.deepcopy(everything(one))
    response = one.preview(x)
    with torch.no_grad():
        together = one.server.ensemble_responses(Responses(-1, one.federation.nodes, response))
    torch.testing.assert_close(response["logits"][1], one.nodes[1].model(x))
    assert together.shape == (len(x), 2, 16, 16)
    assert torch.equal(everything(one), before)


# --- reconstruction ------------------------------------------------------------------------------


def test_models_get_measured_images() -> None:
    one = world(task=RECONSTRUCTION, stacked=False, student={"steps": 1})
    batches: list[torch.Tensor] = []
    models = [node.model for node in one.nodes] + [one.server.student]
    for model in models:
        model.register_forward_pre_hook(lambda _, args: batches.append(args[0].detach()))
    losses = one.server.step()
    assert set(losses) >= {"gan", "difference", "mimic", "student"}
    assert len(batches) >= 4
    inputs = one.server.state.student.replay.sample(100, 0)[0]  # memory of this single query
    measured = RECONSTRUCTION.observe(inputs)
    assert (measured - inputs).abs().max() > 0.01, "the measurement differs from the image"
    for x in batches:
        torch.testing.assert_close(x, measured)


def test_fediod_maps_requires_maps_and_fediod_refuses_them() -> None:
    assert unmet_need(FedIODMaps().needs(), TASK) is unmet_need(FedIOD().needs(), Classification(2)) is None
    assert "has none" in str(unmet_need(FedIODMaps().needs(), Classification(2)))
    assert "generates them from label maps" in str(unmet_need(FedIOD().needs(), TASK))
