"""FedKD: one round of quantized, noisy responses on public data, and plain distillation from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.seeds import derive, torch_generator
from fedstill.data.augmentation import random_shift
from fedstill.federation.responses import Responses
from fedstill.methods import fedkd
from fedstill.methods._logit_perturbation import dequantize
from fedstill.methods._public_data import StudentTraining
from fedstill.methods.fedkd import FedKD
from fedstill.node.policy import PolicyConfig
from fedstill.node.protection import protect
from fedstill.privacy.config import PrivacyConfig
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.protocol.local_config import LocalConfig
from tests.support import small_world
from tests.support.audit_logs import total_charged
from tests.support.errors import raises_refused
from tests.support.small_world import (
    CLASSES,
    SEED,
    SHAPE,
    TASK,
    World,
    disagreeing,
    few,
    made,
    make_nodes,
    public_data,
    run,
    same,
)

pytestmark = pytest.mark.usefixtures("steady_adam")

N = 23
SPECS = ("small-cnn:4", "resnet8:4", "mlp:8", "small-cnn:4")
CONFIG = FedKD(student=StudentTraining(epochs=4, batch=6, lr=1e-2, lr_end=1e-3))
CLEAR = replace(CONFIG, gamma=math.inf, levels=0)
NOISY = NoisyOutputs(outputs=OutputsConfig("laplace", noise=10.0, bound=2.0), counts_noise=2.0)


def world(
    config: FedKD,
    *,
    specs: Sequence[str] = SPECS,
    stacked: bool = True,
    policy: PolicyConfig | None = None,
    privacy: PrivacyConfig | None = None,
    secret: int = 0,
) -> World:
    models = [disagreeing(made(spec, index)) for index, spec in enumerate(specs)]
    nodes = make_nodes(models, classes=few, policy=policy or PolicyConfig())

    def protected(side: Any, at: Any) -> None:
        for node in nodes if privacy else ():
            about = (side, config, at)
            protect(node, privacy, *about, secret=secret)

    given: dict[str, Any] = {"local": LocalConfig(), "public": public_data(N), "protect": protected}
    return small_world.world(config, nodes, made("mlp:8", "student"), stacked=stacked, **given)


def targets(here: World) -> torch.Tensor:
    return here.server.state.z_hat


def by_hand(here: World, predictions: int = 1) -> torch.Tensor:
    """Return sum_k omega_k^c z^k with omega_k^c = N_k^c / sum_k N_k^c (Eq. 1), in loops: (P, N, C)."""
    out = torch.zeros(predictions, N, CLASSES)
    counts = [[int((node.data.targets == c).sum()) for c in range(CLASSES)] for node in here.nodes]
    for p in range(predictions):
        x = here.public.inputs
        if p:
            x = random_shift(x, torch_generator(derive(SEED, "view", p), "view"), flip=False)
        for k, node in enumerate(here.nodes):
            with torch.no_grad():
                z = node.model.eval()(x)
            for c in range(CLASSES):
                total = sum(count[c] for count in counts)
                omega = counts[k][c] / total if total else 1 / len(counts)
                out[p, :, c] += omega * z[:, c]
    return out


# --- the ensemble, Eq. 1-4 -----------------------------------------------------------------------


def test_ensemble_of_eq_1_by_hand() -> None:
    here = run(world(CLEAR), 1)
    torch.testing.assert_close(targets(here), by_hand(here), rtol=1e-4, atol=1e-5)
    equal = run(world(replace(CLEAR, weights="equal")), 1)
    with torch.no_grad():
        mean = torch.stack([node.model(equal.public.inputs) for node in equal.nodes]).mean(0)
    torch.testing.assert_close(targets(equal)[0], mean, rtol=1e-4, atol=1e-5)
    assert "count_labels" not in equal.federation.queries


def test_quantization_error_is_below_one_step_and_upward() -> None:
    here = run(world(replace(CLEAR, levels=200)), 1)
    z_max = max(node.model(here.public.inputs).abs().max().item() for node in here.nodes)
    moved = targets(here) - by_hand(here)
    step = 2 * z_max / 200
    assert (moved > -1e-5).all()
    assert (moved < step + 1e-5).all()
    assert moved.mean() == pytest.approx(step / 2, rel=0.2)


def test_fixed_bound_needs_no_query_and_clips() -> None:
    here = run(world(replace(CLEAR, levels=200, z_max=0.5, weights="equal")), 1)
    assert "max_logit" not in here.federation.queries
    assert "logit range" not in here.audit.traffic_totals()["by_kind"]
    assert targets(here).abs().max() <= 0.5
    agreed = run(world(replace(CLEAR, levels=200)), 1)
    assert ("run", "n0", "up", "logit range") in agreed.audit.totals.bytes


def test_server_noise_is_laplace_on_weighted_sum() -> None:
    clear, noisy = (targets(run(world(replace(CLEAR, gamma=gamma)), 1)) for gamma in (math.inf, 0.5))
    noise = noisy - clear
    assert noise.abs().mean() == pytest.approx(2.0, rel=0.3)  # E|Lap(1 / gamma)| = 1 / gamma
    assert torch.equal(targets(run(world(replace(CLEAR, gamma=0.5)), 1)), noisy)


def clamped(here: World) -> torch.Tensor:
    """Return z^k of all public examples, clipped to the bound: (K, N, C)."""
    with torch.no_grad():
        return torch.stack([node.model(here.public.inputs) for node in here.nodes]).clamp(-2, 2)


def test_node_noise_charges_rows_and_counts() -> None:
    here = run(world(replace(CLEAR, predictions=2), privacy=NOISY), 1)
    row = f"laplace({10 / (2 * 2 * CLASSES)!r})"
    for node in here.nodes:
        assert total_charged(here.audit, node.name) == ({row: 2 * N, "laplace(2.0)": 1}, 0)


def test_quantizer_is_applied_after_noise_at_no_cost() -> None:
    sent = {"rows": torch.tensor([0, N]), "view": torch.tensor(0)}
    clear = replace(CLEAR, weights="equal", z_max=30.0)
    noisy = world(clear, privacy=NOISY).federation.query("predict", **sent)["logits"]
    here = world(replace(clear, levels=100), privacy=replace(NOISY))
    short = here.federation.query("predict", **sent)["logits"]
    assert short.dtype == torch.int8
    # Different options mean different hashes and so different, equally large noise.
    wide = dequantize(short, 100, 30.0) - clamped(here)
    expected = (noisy.clamp(-30, 30) - clamped(here)).abs().mean().item()
    assert wide.abs().mean().item() == pytest.approx(expected, rel=0.2)
    assert short.unique().numel() > 50, "the noise is not removed by quantization"
    assert here.audit.traffic_totals()["by_kind"]["logits"]["up"] == 4 * N * CLASSES


def test_released_range_has_no_guarantee() -> None:
    here = run(world(replace(CONFIG, weights="equal"), privacy=NOISY), 1)
    assert all(total_charged(here.audit, node.name)[1] == 1 for node in here.nodes), "max_logit"
    with raises_refused("privacy", "logit range", "max_logit"):
        world(CONFIG, privacy=replace(NOISY, epsilon=1000.0))
    world(replace(CONFIG, z_max=4.0), privacy=replace(NOISY, epsilon=1000.0))


# --- releases ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "size"), [(200, 1), (254, 1), (255, 2), (65535, 4), (0, 4)])
def test_bytes_of_logits_are_examples_times_classes_times_nodes(levels: int, size: int) -> None:
    here = run(world(replace(CONFIG, levels=levels, predictions=3)))
    up = here.audit.traffic_totals()["by_kind"]["logits"]
    assert up == {"up": N * CLASSES * len(SPECS) * 3 * size, "down": 0}


def test_each_example_is_queried_once_by_row_number(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(world(CONFIG), 1)
    monkeypatch.setattr(fedkd, "CHUNK", 10)
    here = run(world(CONFIG))
    summary = here.audit.traffic_totals()
    assert summary["queries_by_name"] == {"count_labels": 1, "predict": 3, "max_logit": 1}
    assert summary["by_kind"]["logits"]["up"] == N * CLASSES * len(SPECS)
    assert set(summary["by_kind"]) == {"indices", "label counts", "logit range", "logits", "schedule"}
    assert here.federation.queries["predict"].times == 3
    torch.testing.assert_close(targets(here), targets(whole))


# --- the distillation, Eq. 5-7 -------------------------------------------------------------------


@pytest.mark.parametrize("tau", [math.inf, 3.0])
def test_one_node_without_noise_and_fine_levels_is_plain_distillation(tau: float) -> None:
    config = replace(CONFIG, levels=2**31, gamma=math.inf, tau=tau)
    here = world(config, specs=("mlp:8",))
    student, teacher, x = copy.deepcopy(here.server.student), here.nodes[0].model, here.public.inputs
    run(here)

    optimizer = torch.optim.Adam(student.parameters())
    with torch.no_grad():
        z_hat = teacher(x)
    for e in range(config.student.epochs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 + (1e-2 - 1e-3) * 0.5 * (
                1 + math.cos(math.pi * e / (config.student.epochs - 1))
            )
        order = torch.randperm(N, generator=torch_generator(SEED, "public", e))
        for rows in torch.tensor_split(order, 4):  # 23 examples, at most 6 at once
            z = student(x[rows])
            if math.isinf(tau):  # Eq. 7; softmax ignores the mean of a logit vector
                loss = 0.5 * F.mse_loss(z - z.mean(1, True), z_hat[rows] - z_hat[rows].mean(1, True))
            else:  # Eq. 5-6; p is the ensemble's, q the student's
                p, q = (z_hat[rows] / tau).softmax(1), (z / tau).softmax(1)
                loss = tau**2 * (p * (p / q).log()).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    same(here.server.student, student, rtol=1e-3, atol=1e-4)


def test_repeated_predictions_use_the_images_of_the_student() -> None:
    config = replace(CLEAR, predictions=3, student=replace(CLEAR.student, epochs=6))
    here = run(world(config), 1)
    expected = by_hand(here, 3)
    torch.testing.assert_close(targets(here), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected[0], expected[1], atol=1e-2)
    # The student's second epoch uses the images and responses of the second view.
    with torch.no_grad():
        x = random_shift(here.public.inputs, torch_generator(derive(SEED, "view", 1), "view"), flip=False)
        z = here.server.student(x)
    here.server.method = replace(config, student=replace(config.student, batch=N, lr=0.0, lr_end=0.0))
    expected_loss = TASK.distillation_loss(z, expected[1], math.inf).mean().item()
    assert here.server.step()["student"] == pytest.approx(expected_loss, rel=1e-3)


def test_labeled_public_data_are_added_to_every_node_and_counted() -> None:
    plain, joined = world(CONFIG), world(replace(CONFIG, labeled=True))
    labels = joined.public.labels
    assert labels is not None
    for before, after in zip(plain.nodes, joined.nodes, strict=True):
        assert len(after.data) == len(before.data) + N
        assert torch.equal(after.data.inputs[: len(before.data)], before.data.inputs)
        assert torch.equal(after.data.targets[len(before.data) :], labels)
    counts = (
        joined.federation.query("count_labels")["counts"] - plain.federation.query("count_labels")["counts"]
    )
    assert torch.equal(counts, torch.bincount(labels, minlength=CLASSES).float().expand(4, -1))
    assert replace(CONFIG, labeled=True).needs().public_labels
    assert not CONFIG.needs().public_labels


# --- engines, evaluation -----------------------------------------------------------------


def test_ensemble_for_evaluation_has_no_noise() -> None:
    here = world(replace(CONFIG, gamma=0.1))
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = torch.stack([node.model(x) for node in here.nodes])
    responses = Responses(-1, ("n0", "n1", "n2", "n3"), {"logits": logits})
    assert here.server.ensemble_responses(responses) is None
    run(here, 1)
    omega = TASK.importance_weights(torch.stack([TASK.counts(node.data) for node in here.nodes]))
    expected = TASK.ensemble(logits, omega, "logits")
    assert torch.equal(here.server.ensemble_responses(responses), expected)  # type: ignore[arg-type]
