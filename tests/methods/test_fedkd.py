"""FedKD: one round of quantised, noisy answers about public data, and plain distillation from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, QuestionRefused
from fedstill.core.seeds import derive, torch_generator
from fedstill.core.state import load_state, save_state
from fedstill.data.augment import shifted
from fedstill.data.public import Public
from fedstill.federation import Answers, InProcess, partition
from fedstill.methods import fedkd
from fedstill.methods._perturbing import dequantise
from fedstill.methods.fedkd import FedKD
from fedstill.methods.server import Server, ServerSetting
from fedstill.models import build
from fedstill.node.audit import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.node.protect import protect
from fedstill.privacy.config import PrivacyConfig
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.protocol.questions import NodeSetting
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks.classification import Classification
from tests.audited import paid

pytestmark = pytest.mark.usefixtures("steady_adam")

SHAPE, CLASSES, SEED, N = (1, 8, 8), 3, 4, 23
TASK, LOCAL = Classification(CLASSES), LocalConfig()
SPECS = ("small-cnn:4", "resnet8:4", "mlp:8", "small-cnn:4")
ALIKE = ("small-cnn:4",) * 4
CONFIG = FedKD(epochs=4, batch=6, lr=1e-2, lr_end=1e-3)
CLEAR = replace(CONFIG, gamma=math.inf, levels=0)
NOISY = NoisyOutputs(outputs=OutputsConfig("laplace", noise=10.0, bound=2.0), counts_noise=2.0)


@dataclass
class World:
    nodes: list[Node]
    public: Public
    federation: InProcess
    server: Server
    audit: AuditLog


def public_data() -> Public:
    generator = torch.Generator().manual_seed(99)
    inputs = torch.randn(N, *SHAPE, generator=generator)
    return Public("made", inputs, torch.randint(CLASSES, (N,), generator=generator))


def world(
    config: FedKD,
    *,
    specs: Sequence[str] = SPECS,
    stacked: bool = True,
    policy: PolicyConfig | None = None,
    privacy: PrivacyConfig | None = None,
    secret: int = 0,
) -> World:
    audit, nodes, public, compute = AuditLog(), [], public_data(), Compute()
    for index, spec in enumerate(specs):
        generator = torch.Generator().manual_seed(index)
        size = 6 + 5 * index
        inputs = torch.randn(size, *SHAPE, generator=generator)
        targets = torch.randint(min(index + 1, CLASSES), (size,), generator=generator)  # few classes each
        gate = Gate(f"n{index}", policy or PolicyConfig(), audit)
        model = build(spec, SHAPE, CLASSES, 0, index).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)  # so that the nodes disagree
        nodes.append(Node(f"n{index}", TensorData(inputs, targets), model, gate, SEED))
    setting = NodeSetting(TASK, LOCAL, compute, public)
    side = config.node_side(setting)
    for node in nodes if privacy else ():
        about = (side, config, setting)
        protect(node, privacy, *about, secret=secret)  # type: ignore[arg-type]
    side.prepare(nodes)
    federation = InProcess(nodes, partition(nodes, stacked), side, compute)
    student = build("mlp:8", SHAPE, CLASSES, 0, "student")
    setting = ServerSetting(federation, student, TASK, SHAPE, (0.5,), (0.5,), compute, SEED, LOCAL, public)
    return World(nodes, public, federation, Server(config, setting), audit)


def run(made: World, turns: int | None = None) -> World:
    for _ in range(made.server.total if turns is None else turns):
        made.server.step()
    return made


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, msg=name, **tolerance)


def targets(made: World) -> torch.Tensor:
    return made.server.state.targets["z_hat"]


def by_hand(made: World, predictions: int = 1) -> torch.Tensor:
    """sum_k omega_k^c z^k with omega_k^c = N_k^c / sum_k N_k^c (Eq. 1), in loops: (P, N, C)."""
    out = torch.zeros(predictions, N, CLASSES)
    counts = [[int((node.data.targets == c).sum()) for c in range(CLASSES)] for node in made.nodes]
    for p in range(predictions):
        x = made.public.inputs
        if p:
            x = shifted(x, torch_generator(derive(SEED, "view", p), "view"), flip=False)
        for k, node in enumerate(made.nodes):
            with torch.no_grad():
                z = node.model.eval()(x)
            for c in range(CLASSES):
                total = sum(count[c] for count in counts)
                omega = counts[k][c] / total if total else 1 / len(counts)
                out[p, :, c] += omega * z[:, c]
    return out


# --- the ensemble, Eq. 1-4 -----------------------------------------------------------------------


def test_the_ensemble_is_eq_1_by_hand() -> None:
    made = run(world(CLEAR), 1)
    torch.testing.assert_close(targets(made), by_hand(made), rtol=1e-4, atol=1e-5)
    equal = run(world(replace(CLEAR, weights="equal")), 1)
    with torch.no_grad():
        mean = torch.stack([node.model(equal.public.inputs) for node in equal.nodes]).mean(0)
    torch.testing.assert_close(targets(equal)[0], mean, rtol=1e-4, atol=1e-5)
    assert "count_labels" not in equal.federation.questions


def test_quantised_answers_are_off_by_less_than_one_step_and_always_up() -> None:
    made = run(world(replace(CLEAR, levels=200)), 1)
    z_max = max(node.model(made.public.inputs).abs().max().item() for node in made.nodes)
    moved = targets(made) - by_hand(made)
    step = 2 * z_max / 200
    assert (moved > -1e-5).all()
    assert (moved < step + 1e-5).all()
    assert moved.mean() == pytest.approx(step / 2, rel=0.2)


def test_a_bound_fixed_beforehand_is_not_asked_for_and_clips() -> None:
    made = run(world(replace(CLEAR, levels=200, z_max=0.5, weights="equal")), 1)
    assert "tell_range" not in made.federation.questions
    assert "logit range" not in {kind for *_, kind in made.audit.sums.bytes}
    assert targets(made).abs().max() <= 0.5
    agreed = run(world(replace(CLEAR, levels=200)), 1)
    assert ("run", "n0", "up", "logit range") in agreed.audit.sums.bytes


def test_the_servers_noise_is_laplace_on_the_weighted_sum() -> None:
    clear, noisy = (targets(run(world(replace(CLEAR, gamma=gamma)), 1)) for gamma in (math.inf, 0.5))
    noise = noisy - clear
    assert noise.abs().mean() == pytest.approx(2.0, rel=0.3)  # E|Lap(1 / gamma)| = 1 / gamma
    assert torch.equal(targets(run(world(replace(CLEAR, gamma=0.5)), 1)), noisy)


def clamped(made: World) -> torch.Tensor:
    """z^k of all public examples, each value within the bound: (K, N, C)."""
    with torch.no_grad():
        return torch.stack([node.model(made.public.inputs) for node in made.nodes]).clamp(-2, 2)


def test_a_nodes_noise_is_its_own_and_the_same_when_asked_again() -> None:
    config = replace(CLEAR, weights="equal")
    made = world(config, privacy=NOISY)
    sent = {"rows": torch.tensor([0, N]), "view": torch.tensor(0)}
    first, again = (made.federation.ask("predict", number=0, **sent)["logits"] for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(world(config, privacy=NOISY).federation.ask("predict", **sent)["logits"], first)
    noise = first - clamped(made)
    assert noise.abs().mean() == pytest.approx(10, rel=0.2)
    assert not torch.allclose(noise[0], noise[1], atol=1.0)
    part = made.federation.ask("predict", rows=torch.tensor([5, 9]), view=torch.tensor(0))["logits"]
    assert not torch.allclose(part, first[:, 5:9], atol=1.0), "another question has another noise"
    # Whoever has another secret cannot take the noise away.
    other = world(config, privacy=NOISY, secret=1).federation.ask("predict", **sent)["logits"]
    assert not torch.allclose(other, first, atol=1.0)


def test_with_noise_at_the_nodes_each_row_and_the_counts_are_paid_for() -> None:
    made = run(world(replace(CLEAR, predictions=2), privacy=NOISY), 1)
    row = f"laplace({10 / (2 * 2 * CLASSES)!r})"
    for node in made.nodes:
        assert paid(made.audit, node.name) == ({row: 2 * N, "laplace(2.0)": 1}, 0)


def test_the_quantiser_comes_after_the_noise_and_costs_nothing_more() -> None:
    sent = {"rows": torch.tensor([0, N]), "view": torch.tensor(0)}
    clear = replace(CLEAR, weights="equal", z_max=30.0)
    noisy = world(clear, privacy=NOISY).federation.ask("predict", **sent)["logits"]
    made = world(replace(clear, levels=100), privacy=replace(NOISY))
    short = made.federation.ask("predict", **sent)["logits"]
    assert short.dtype == torch.int8
    # The bindings differ by the method's options, so their noise does too, and is equally large.
    wide = dequantise(short, 100, 30.0) - clamped(made)
    expected = (noisy.clamp(-30, 30) - clamped(made)).abs().mean().item()
    assert wide.abs().mean().item() == pytest.approx(expected, rel=0.2)
    assert short.unique().numel() > 50, "noise is not quantised away"
    assert made.audit.summary()["by_kind"]["logits"]["up"] == 4 * N * CLASSES


def test_a_range_that_is_told_as_it_is_has_no_guarantee() -> None:
    made = run(world(replace(CONFIG, weights="equal"), privacy=NOISY), 1)
    assert all(paid(made.audit, node.name)[1] == 1 for node in made.nodes), "tell_range"
    with pytest.raises(QuestionRefused, match=r"guarantee for logit range; .*, in question tell_range"):
        world(CONFIG, privacy=replace(NOISY, epsilon=1000.0))
    world(replace(CONFIG, z_max=4.0), privacy=replace(NOISY, epsilon=1000.0))


# --- what leaves a node --------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "size"), [(200, 1), (254, 1), (255, 2), (65535, 4), (0, 4)])
def test_bytes_of_logits_are_examples_times_classes_times_nodes(levels: int, size: int) -> None:
    made = run(world(replace(CONFIG, levels=levels, predictions=3)))
    up = made.audit.summary()["by_kind"]["logits"]
    assert up == {"up": N * CLASSES * len(SPECS) * 3 * size, "down": 0}


def test_every_example_is_asked_in_chunks_once_and_never_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(world(CONFIG), 1)
    monkeypatch.setattr(fedkd, "CHUNK", 10)
    made = run(world(CONFIG))
    asked = made.audit.summary()
    assert asked["questions_by_name"] == {"count_labels": 1, "predict": 3, "tell_range": 1}
    assert asked["by_kind"]["logits"]["up"] == N * CLASSES * len(SPECS)
    assert set(asked["by_kind"]) == {"indices", "label counts", "logit range", "logits", "schedule"}
    assert made.federation.questions["predict"].times == 3
    torch.testing.assert_close(targets(made), targets(whole))


def test_a_policy_with_a_limit_refuses_before_anything_is_asked() -> None:
    with pytest.raises(QuestionRefused, match="most_questions: 2, and the run asks 3"):
        world(CONFIG, policy=PolicyConfig(most_questions=2))
    world(CONFIG, policy=PolicyConfig(outputs_only=True))


# --- the distillation, Eq. 5-7 -------------------------------------------------------------------


@pytest.mark.parametrize("tau", [math.inf, 3.0])
def test_one_node_without_noise_and_fine_levels_is_plain_distillation(tau: float) -> None:
    config = replace(CONFIG, levels=2**31, gamma=math.inf, tau=tau)
    made = world(config, specs=("mlp:8",))
    student, teacher, x = copy.deepcopy(made.server.student), made.nodes[0].model, made.public.inputs
    run(made)

    optimiser = torch.optim.Adam(student.parameters())
    with torch.no_grad():
        z_hat = teacher(x)
    for e in range(config.epochs):
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 + (1e-2 - 1e-3) * 0.5 * (1 + math.cos(math.pi * e / (config.epochs - 1)))
        order = torch.randperm(N, generator=torch_generator(SEED, "public", e))
        for rows in torch.tensor_split(order, 4):  # 23 examples, at most 6 at once
            z = student(x[rows])
            if math.isinf(tau):  # Eq. 7, softmax not seeing a logit vector's mean
                loss = 0.5 * F.mse_loss(z - z.mean(1, True), z_hat[rows] - z_hat[rows].mean(1, True))
            else:  # Eq. 5-6, p the ensemble's and q the student's
                p, q = (z_hat[rows] / tau).softmax(1), (z / tau).softmax(1)
                loss = tau**2 * (p * (p / q).log()).sum(1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    same(made.server.student, student, rtol=1e-3, atol=1e-4)


def test_the_direction_of_the_divergence() -> None:
    """KL(ensemble || student): a student that leaves out what the ensemble sees pays, not the reverse."""
    wide, narrow = torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([[8.0, -8.0, -8.0]])
    leaves_out, covers = TASK.distance(narrow, wide, 1.0), TASK.distance(wide, narrow, 1.0)
    p, q = wide.softmax(1), narrow.softmax(1)
    assert leaves_out.item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)
    assert covers.item() == pytest.approx(math.log(3), rel=1e-4)
    made = world(replace(CLEAR, tau=1.0, batch=N), specs=("mlp:8",))
    # One step from a known state: the loss that is told is the divergence in that direction.
    teacher, student, x = made.nodes[0].model, made.server.student, made.public.inputs
    with torch.no_grad():
        p, q = teacher(x).softmax(1), student(x).softmax(1)
    assert made.server.step()["student"] == pytest.approx((p * (p / q).log()).sum(1).mean().item(), rel=1e-3)


def test_several_predictions_are_of_the_images_that_the_student_sees() -> None:
    config = replace(CLEAR, predictions=3, epochs=6)
    made = run(world(config), 1)
    expected = by_hand(made, 3)
    torch.testing.assert_close(targets(made), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected[0], expected[1], atol=1e-2)
    seen = [next(iter(config.batches(made.server, targets(made), e))) for e in range(6)]
    for e, (x, z_hat) in enumerate(seen):
        rows = torch.tensor_split(torch.randperm(N, generator=torch_generator(SEED, "public", e)), 4)[0]
        assert torch.equal(z_hat, targets(made)[e % 3, rows])
        views = config.view(made.public, derive(SEED, "view", e % 3) if e % 3 else 0)
        assert torch.equal(x, views[rows])


def test_labelled_public_data_join_every_node_and_count() -> None:
    plain, joined = world(CONFIG), world(replace(CONFIG, labelled=True))
    labels = joined.public.labels
    assert labels is not None
    for before, after in zip(plain.nodes, joined.nodes, strict=True):
        assert len(after.data) == len(before.data) + N
        assert torch.equal(after.data.inputs[: len(before.data)], before.data.inputs)
        assert torch.equal(after.data.targets[len(before.data) :], labels)
    counts = joined.federation.ask("count_labels")["counts"] - plain.federation.ask("count_labels")["counts"]
    assert torch.equal(counts, torch.bincount(labels, minlength=CLASSES).float().expand(4, -1))
    assert replace(CONFIG, labelled=True).needs().public_labels
    assert not CONFIG.needs().public_labels


# --- on every engine, over stops -----------------------------------------------------------------


@pytest.mark.parametrize("privacy", [None, NOISY], ids=["plain", "noise at the nodes"])
@pytest.mark.parametrize("specs", [ALIKE, SPECS], ids=["alike", "mixed"])
def test_stacked_and_one_by_one_give_equal_figures(
    specs: tuple[str, ...], privacy: PrivacyConfig | None
) -> None:
    config = replace(CONFIG, predictions=2)
    given: dict[str, Any] = {"specs": specs, "privacy": privacy}
    stacked, alone = (run(world(config, stacked=stacked, **given)) for stacked in (True, False))
    step = 2 * targets(alone).abs().max().item() / 100
    assert (targets(stacked) - targets(alone)).abs().max() < step  # rounding may cross one grid point
    assert stacked.audit.summary() == alone.audit.summary()
    clear = replace(config, levels=0)
    stacked, alone = (run(world(clear, stacked=stacked, **given)) for stacked in (True, False))
    same(stacked.server.student, alone.server.student, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_run_goes_on_to_the_same_student_and_asks_nothing_again(tmp_path: Path, optimiser: Any) -> None:
    config = replace(CONFIG, optimiser=optimiser, student_augment="shift", predictions=2)
    straight = run(world(config))
    half = run(world(config), 2)
    save_state(tmp_path / "state.st", half.server.kept())
    rest = world(config)
    rest.server.take_up(load_state(tmp_path / "state.st"))
    run(rest, 2)
    assert rest.server.done == rest.server.total
    same(rest.server.student, straight.server.student)
    assert rest.audit.summary()["questions"] == 0


def test_the_ensemble_for_evaluation_is_without_noise() -> None:
    made = world(replace(CONFIG, gamma=0.1))
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = torch.stack([node.model(x) for node in made.nodes])
    answers = Answers(-1, ("n0", "n1", "n2", "n3"), {"logits": logits})
    assert made.server.ensemble(answers) is None
    run(made, 1)
    omega = TASK.importance(torch.stack([TASK.counts(node.data) for node in made.nodes]))
    expected = TASK.ensemble(logits, omega, "logits")
    assert torch.equal(made.server.ensemble(answers), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("levels", -1),
        ("gamma", 0.0),
        ("z_max", -1.0),
        ("tau", 0.0),
        ("predictions", 0),
        ("epochs", 0),
        ("batch", 0),
        ("lr", -1.0),
        ("weights", "size"),
        ("views", "none"),
    ],
)
def test_an_option_that_is_not_allowed_is_named(option: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"method.{option} is "):
        FedKD(**{option: value})
