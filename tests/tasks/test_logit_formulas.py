"""Formulas of the papers against values by hand, slow loops and invariants."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fedstill.tasks.classification import Classification
from fedstill.tasks.logit_formulas import (
    CONSENSUS_STEPS,
    distillation_loss,
    entropy,
    entropy_from_probs,
    importance_weights,
    js_divergence,
    mean_entropy,
)

SURE = 1e4  # a logit large enough for a softmax of exactly 1 and 0
LOG2 = math.log(2)
ensemble = Classification(2).ensemble  # does not depend on the number of classes


def logits_of(*probs: float) -> torch.Tensor:
    return torch.tensor(probs).log()


def random(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_pi(nodes: int, seed: int = 0) -> torch.Tensor:
    return random(nodes, seed=seed).softmax(0)


# --- entropy -------------------------------------------------------------------------------------


def test_entropy_by_hand() -> None:
    logits = torch.stack([logits_of(0.5, 0.25, 0.25), logits_of(0.125, 0.125, 0.75)])
    by_hand = [1.5 * LOG2, 0.25 * math.log(8) + 0.75 * math.log(4 / 3)]
    torch.testing.assert_close(entropy(logits, 1), torch.tensor(by_hand))
    torch.testing.assert_close(entropy_from_probs(logits.softmax(1), 1), torch.tensor(by_hand))


def test_entropy_uses_the_given_axis() -> None:
    logits = torch.zeros(2, 3, 5)
    for axis, size in enumerate(logits.shape):
        expected = torch.full([n for i, n in enumerate(logits.shape) if i != axis], math.log(size))
        torch.testing.assert_close(entropy(logits, axis), expected)
        torch.testing.assert_close(entropy_from_probs(torch.full((2, 3, 5), 1 / size), axis), expected)


# --- Eq. 3 and 4 ---------------------------------------------------------------------------------


def test_eq3_by_hand() -> None:
    coin, sure = torch.zeros(2), torch.tensor([SURE, 0.0])
    quarter = logits_of(0.25, 0.75)
    responses = torch.stack([torch.stack([coin, sure]), torch.stack([quarter, quarter])])  # (2 nodes, 2, 2)
    h_quarter = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    expected = 0.75 * (LOG2 / 2) + 0.25 * h_quarter
    assert mean_entropy(responses, torch.tensor([0.75, 0.25])).item() == pytest.approx(expected)


def test_eq4_by_hand() -> None:
    # q_1 = (1, 0), q_2 = (1/2, 1/2), pi = (1/3, 2/3): the mean is (2/3, 1/3).
    responses = torch.tensor([[[SURE, 0.0]], [[0.0, 0.0]]])
    h_mean = 2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3)
    expected = h_mean - 2 / 3 * LOG2
    assert js_divergence(responses, torch.tensor([1 / 3, 2 / 3])).item() == pytest.approx(expected, rel=1e-5)


def test_eq4_averages_over_examples_after_mixing_nodes() -> None:
    # The nodes agree on each example. Mixing over examples first would yield a divergence.
    responses = torch.tensor([[[SURE, 0.0], [0.0, SURE]]]).expand(2, 2, 2)
    assert js_divergence(responses, torch.tensor([0.5, 0.5])).item() == pytest.approx(0, abs=1e-6)


@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 4), st.integers(2, 6))
def test_eq4_lies_between_zero_and_the_entropy_of_pi(seed: int, nodes: int, batch: int, classes: int) -> None:
    responses, pi = random(nodes, batch, classes, seed=seed, scale=20), random_pi(nodes, seed)
    assert -1e-9 <= js_divergence(responses, pi).item() <= entropy_from_probs(pi, 0).item() + 1e-9


@given(st.integers(0, 10_000))
def test_eq3_and_eq4_ignore_logit_offsets(seed: int) -> None:
    responses, pi = random(3, 2, 4, seed=seed), random_pi(3, seed)
    moved = responses + random(3, 2, 1, seed=seed + 1, scale=50)
    torch.testing.assert_close(mean_entropy(moved, pi), mean_entropy(responses, pi))
    torch.testing.assert_close(js_divergence(moved, pi), js_divergence(responses, pi))


# --- Eq. 8 ---------------------------------------------------------------------------------------


def test_eq8_with_the_critics_ratio_by_hand() -> None:
    counts = torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    ratio = torch.tensor([[1.0, 2.0], [1.0, 6.0]])  # (2 nodes, 2 inputs)
    weights = importance_weights(counts, ratio)
    # first input: 3:1; second: 3*2 : 1*6
    torch.testing.assert_close(weights[:, 0], torch.tensor([[0.75, 0.5], [0.25, 0.5]]))
    torch.testing.assert_close(weights[:, 1], torch.tensor([[0.5, 0.5], [0.5, 0.5]]))


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4))
def test_eq8_sums_to_one_and_is_equal_for_absent_classes(seed: int, nodes: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 3, (nodes, 4), generator=generator).double()
    counts[:, 2] = 0
    ratio = random(nodes, batch, seed=seed).exp()
    for weights in (importance_weights(counts), importance_weights(counts, ratio)):
        torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
        assert (weights >= 0).all()
        torch.testing.assert_close(weights[:, :, 2], torch.full_like(weights[:, :, 2], 1 / nodes))


# --- Eq. 9 ---------------------------------------------------------------------------------------

RESPONSES = torch.tensor([[[2.0, 0.0]], [[-4.0, 4.0]]])  # 2 nodes, 1 input, 2 classes
WEIGHTS = torch.tensor([[[0.75, 0.25]], [[0.25, 0.75]]])


def test_eq9_of_logits_by_hand() -> None:
    torch.testing.assert_close(ensemble(RESPONSES, WEIGHTS, "logits"), torch.tensor([[0.5, 3.0]]))


def test_eq9_of_log_probs_by_hand() -> None:
    first, second = math.log1p(math.exp(-2)), math.log1p(math.exp(-8))  # -log q of the more probable class
    expected = [-0.75 * first - 0.25 * (second + 8), -0.25 * (first + 2) - 0.75 * second]
    torch.testing.assert_close(ensemble(RESPONSES, WEIGHTS, "log_probs"), torch.tensor([expected]))


def test_eq9_of_probs_is_log_of_weighted_mean() -> None:
    expected = (WEIGHTS * RESPONSES.softmax(2)).sum(0).log()
    torch.testing.assert_close(ensemble(RESPONSES, WEIGHTS, "probs"), expected)


@given(st.integers(0, 10_000))
def test_only_logits_ensemble_depends_on_logit_offsets(seed: int) -> None:
    responses = random(3, 2, 4, seed=seed)
    weights = importance_weights(random(3, 4, seed=seed + 1).exp(), random(3, 2, seed=seed + 2).exp())
    moved = responses + torch.tensor([7.0, 0.0, 0.0]).view(3, 1, 1)
    for how in ("log_probs", "probs", "consensus"):
        torch.testing.assert_close(ensemble(moved, weights, how), ensemble(responses, weights, how))
    change = ensemble(moved, weights, "logits") - ensemble(responses, weights, "logits")
    torch.testing.assert_close(change, 7 * weights[0])


# --- consensus ---------------------------------------------------------------------------------


def slow_consensus(responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the consensus of each input with loops over inputs and nodes.

    Starts from the mean of the log-probabilities; then updates the shares of the nodes.
    """
    nodes, batch, classes = responses.shape
    out = torch.empty(batch, classes, dtype=responses.dtype)
    for b in range(batch):
        q = [responses[k, b].softmax(0) for k in range(nodes)]
        pi = [weights[k, b] for k in range(nodes)]
        p = sum(pi[k] * q[k].log() for k in range(nodes)).softmax(0)
        for _ in range(CONSENSUS_STEPS):
            knows = [(pi[k] * p).sum() for k in range(nodes)]
            p = sum(knows[k] / sum(knows) * q[k] for k in range(nodes))
        out[b] = p.log()
    return out


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3))
def test_consensus_equals_slow_loop_and_is_a_distribution(seed: int, nodes: int, batch: int) -> None:
    responses = random(nodes, batch, 4, seed=seed)
    weights = importance_weights(
        random(nodes, 4, seed=seed + 1).exp(), random(nodes, batch, seed=seed + 2).exp()
    )
    out = ensemble(responses, weights, "consensus")
    torch.testing.assert_close(out, slow_consensus(responses, weights))
    torch.testing.assert_close(out.exp().sum(1), torch.ones(batch).double())


def test_consensus_downweights_node_without_the_class() -> None:
    # The first node holds classes 0 and 1 and predicts 0 for all inputs. The other two hold class 2.
    weights = importance_weights(torch.tensor([[9.0, 9.0, 0.0], [1.0, 1.0, 9.0], [1.0, 1.0, 9.0]]))
    confident = logits_of(0.02, 0.02, 0.96)
    responses = torch.stack([logits_of(0.8, 0.19, 0.01), confident, confident])[:, None]
    by_class = [
        ensemble(responses, weights, how).softmax(1)[0, 2] for how in ("logits", "log_probs", "probs")
    ]
    assert ensemble(responses, weights, "consensus").exp()[0, 2] > max(by_class) + 0.1


def test_consensus_shares_have_no_gradient() -> None:
    responses = random(2, 3, 4).requires_grad_()
    even = importance_weights(torch.ones(2, 4).double())  # equal weights give equal shares for any responses
    (grad,) = torch.autograd.grad(ensemble(responses, even, "consensus").sum(), responses)
    (plain,) = torch.autograd.grad((0.5 * responses.softmax(2)).sum(0).log().sum(), responses)
    torch.testing.assert_close(grad, plain)
    weights = importance_weights(random(2, 4, seed=1).exp())
    out = ensemble(responses, weights, "consensus")
    with torch.no_grad():  # solve p = share q_1 + (1 - share) q_2 for the shares
        q = responses.softmax(2)
        share = ((out.exp() - q[1]) / (q[0] - q[1])).mean(1, keepdim=True)
    (grad,) = torch.autograd.grad(out.sum(), responses)
    fixed = (share * responses[0].softmax(1) + (1 - share) * responses[1].softmax(1)).log()
    torch.testing.assert_close(grad, torch.autograd.grad(fixed.sum(), responses)[0])


# --- Eq. 6 and 10 --------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 3.0, 25.0])
def test_distillation_loss_equals_torch_kl_times_tau_squared(tau: float) -> None:
    student, target = random(4, 5), random(4, 5, seed=1)
    log_s, log_t = (student / tau).log_softmax(1), (target / tau).log_softmax(1)
    expected = tau**2 * F.kl_div(log_s, log_t, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(distillation_loss(student, target, tau), expected)


def test_distillation_loss_with_infinite_tau_by_hand() -> None:
    student, target = torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    # centered: (-2, -1, 3); half the mean square: (4 + 1 + 9) / 6
    assert distillation_loss(student, target, math.inf).item() == pytest.approx(14 / 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tau", "within"), [(1e3, 2e-2), (10001.0, 2e-3), (1e6, 2e-4)])
def test_distillation_loss_with_large_tau_approaches_limit(
    tau: float, within: float, dtype: torch.dtype
) -> None:
    student, target = random(8, 10, scale=3).to(dtype), random(8, 10, seed=1, scale=3).to(dtype)
    limit = distillation_loss(student, target, math.inf)
    torch.testing.assert_close(distillation_loss(student, target, tau), limit, rtol=within, atol=0)


# --- pixels, and extreme logits -------------------------------------------------------------------

K, B, C, H, W = 3, 2, 4, 2, 3


def flat_nodes(maps: torch.Tensor) -> torch.Tensor:
    """Flatten maps ``(K, B, C, H, W)`` to ``(K, B*H*W, C)``, so that each pixel is an example."""
    return maps.permute(0, 1, 3, 4, 2).reshape(len(maps), -1, maps.shape[2])


def flat(maps: torch.Tensor) -> torch.Tensor:
    return flat_nodes(maps[None])[0]


def test_pixels_count_as_examples_in_eq3_and_eq4() -> None:
    responses, pi = random(K, B, C, H, W), random_pi(K)
    torch.testing.assert_close(mean_entropy(responses, pi), mean_entropy(flat_nodes(responses), pi))
    torch.testing.assert_close(js_divergence(responses, pi), js_divergence(flat_nodes(responses), pi))


@pytest.mark.parametrize("how", ["logits", "log_probs", "probs", "consensus"])
def test_pixels_are_ensembled_independently(how: str) -> None:
    responses = random(K, B, C, H, W)
    weights = importance_weights(random(K, C, seed=1).exp(), random(K, B, seed=2).exp())
    each_pixel = weights.repeat_interleave(H * W, 1)
    expected = ensemble(flat_nodes(responses), each_pixel, how)
    torch.testing.assert_close(flat(ensemble(responses, weights, how)), expected)


@pytest.mark.parametrize("tau", [1.0, 5.0, 1e3, math.inf])
def test_distillation_loss_of_maps_is_mean_over_pixels(tau: float) -> None:
    student, target = random(B, C, H, W), random(B, C, H, W, seed=1)
    each = distillation_loss(flat(student), flat(target), tau).view(B, H * W).mean(1)
    torch.testing.assert_close(distillation_loss(student, target, tau), each)


@pytest.mark.parametrize("signs", list(itertools.product([SURE, -SURE], repeat=3)))
def test_gradients_are_finite_for_extreme_logits(signs: tuple[float, ...]) -> None:
    row = torch.tensor(signs)
    responses = torch.stack([row, row.flip(0)])[:, None].requires_grad_()  # (2, 1, 3)
    pi, weights = (
        torch.tensor([0.5, 0.5]),
        importance_weights(torch.tensor([[1.0, 0.0, 0.0], [1.0, 2.0, 0.0]])),
    )
    losses = [mean_entropy(responses, pi), js_divergence(responses, pi)]
    losses += [
        ensemble(responses, weights, how).sum() for how in ("logits", "log_probs", "probs", "consensus")
    ]
    losses += [distillation_loss(responses[0], responses[1], tau).sum() for tau in (1.0, 100.0, math.inf)]
    losses += [entropy_from_probs(responses[0].softmax(1).mean(0), 0)]
    for loss in losses:
        (grad,) = torch.autograd.grad(loss, responses, retain_graph=True)
        assert torch.isfinite(loss)
        assert torch.isfinite(grad).all()
