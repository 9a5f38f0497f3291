"""Scores of membership: by hand, against loops, and strong on a model that is known to leak."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from fedstill.attacks.membership_scores import (
    RecordLogits,
    attack_metrics,
    lira_attack,
    lira_offline_attack,
    logit_confidence,
    loss_attack,
    rmia_attack,
    shadow_halves,
    train_shadows,
)
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.data import Digits, load
from fedstill.models import build
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import Classification
from tests.attacks.runs import look

SEEDS = st.integers(0, 2**32)


def of_two(target: list[float], shadows: list[list[float]], inside: list[list[int]]) -> RecordLogits:
    """Of two classes, all records of the first: the logit is the confidence."""

    def logits(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, torch.zeros_like(values)], -1)

    return RecordLogits(
        logits(torch.tensor(target)),
        logits(torch.tensor(shadows)),
        torch.tensor(inside).bool(),
        torch.zeros(len(target), dtype=torch.int64),
    )


def drawn(seed: int, models: int = 6, records: int = 5, classes: int = 3) -> RecordLogits:
    generator = torch_generator(seed, "seen")
    return RecordLogits(
        3 * torch.randn(records, classes, generator=generator),
        3 * torch.randn(models, records, classes, generator=generator),
        shadow_halves(records, models, seed),
        torch.randint(classes, (records,), generator=generator),
    )


def outsiders(seed: int, models: int = 6, records: int = 8) -> RecordLogits:
    seen = drawn(seed, models, records)
    return RecordLogits(seen.target, seen.shadows, torch.zeros_like(seen.inside), seen.labels)


def fewer(seen: RecordLogits, models: int) -> RecordLogits:
    return RecordLogits(seen.target, seen.shadows[:models], seen.inside[:models], seen.labels)


# --- scores -----------------------------------------------------------------------------------------


@given(SEEDS)
def test_confidence_is_the_scaled_probability(seed: int) -> None:
    seen = drawn(seed)
    p = seen.shadows.double().softmax(-1).gather(-1, seen.labels.expand(6, 5).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logit_confidence(seen.shadows, seen.labels), (p / (1 - p)).log())
    shifted = logit_confidence(seen.target.double() + 7.0, seen.labels)
    torch.testing.assert_close(shifted, logit_confidence(seen.target, seen.labels))


def test_confidence_where_the_probability_is_1_to_all_digits() -> None:
    logits = torch.tensor([[100.0, 0.0, 0.0], [300.0, 0.0, 0.0]])
    labels = torch.tensor([0, 0])
    assert float(logits.double().softmax(1)[0, 0]) == 1.0
    assert logit_confidence(logits, labels).tolist() == pytest.approx([100 - math.log(2), 300 - math.log(2)])


def test_lira_by_hand() -> None:
    seen = of_two([3.0], [[2.0], [4.0], [0.0], [-2.0]], [[1], [1], [0], [0]])
    # inside mean 3, variance 2; outside mean -1, variance 2: 16 / (2 * 2)
    for own in (True, False):
        assert lira_attack(seen, own).item() == pytest.approx(4.0)
    assert lira_offline_attack(seen).item() == pytest.approx(4 / math.sqrt(2))


def test_shared_variance_is_around_each_records_own_mean() -> None:
    inside = [[1, 1], [1, 1], [0, 0], [0, 0]]
    seen = of_two([1.0, 11.0], [[0.0, 10.0], [2.0, 14.0], [0.0, 10.0], [2.0, 14.0]], inside)
    # Deviations 1, 1 and 2, 2 of 1 degree of freedom each: variance (2 + 8) / 2
    assert lira_offline_attack(seen, False).tolist() == pytest.approx([0.0, -1 / math.sqrt(5)])
    assert lira_offline_attack(seen, True).tolist() == pytest.approx([0.0, -1 / math.sqrt(8)])


@given(SEEDS)
def test_lira_is_that_of_loops(seed: int) -> None:
    seen = drawn(seed)
    phi = logit_confidence(seen.shadows, seen.labels).numpy()
    here, own = logit_confidence(seen.target, seen.labels).numpy(), lira_attack(seen, True)
    offline = lira_offline_attack(seen, True)
    for record in range(5):
        inside = seen.inside[:, record].numpy()
        one, other = phi[inside, record], phi[~inside, record]
        score = norm(one.mean(), one.std(ddof=1)).logpdf(here[record])
        score -= norm(other.mean(), other.std(ddof=1)).logpdf(here[record])
        assert own[record].item() == pytest.approx(score, rel=1e-6, abs=1e-9)
        below = norm(other.mean(), other.std(ddof=1)).cdf(here[record])
        assert norm.cdf(offline[record].item()) == pytest.approx(below)


def test_means_are_shrunk_by_hand() -> None:
    inside = [[1, 1], [1, 1], [0, 0], [0, 0]]
    seen = of_two([0.0, 0.0], [[0.0, 4.0], [2.0, 6.0], [-2.0, -2.0], [0.0, 0.0]], inside)
    # Variance 2 everywhere. Means 1 and -1, 5 and -1, apart by 2 and 6 with an error of 2 / 2 + 2 / 2, while
    # they vary by 4: so half of their deviation from 4 is kept, and means are 1.5, -1.5 and 4.5, -0.5.
    assert lira_attack(seen, True).tolist() == pytest.approx([0.0, (1 - 25) / 4])
    assert lira_attack(seen, False).tolist() == pytest.approx([0.0, (0.25 - 20.25) / 4])


def test_few_shadows_are_below_64() -> None:
    few, many = drawn(0, 62), drawn(0, 64)
    assert torch.equal(lira_attack(few), lira_attack(few, False))
    assert not torch.equal(lira_attack(few), lira_attack(few, True))
    assert torch.equal(lira_attack(many), lira_attack(many, True))


def test_rmia_by_hand() -> None:
    odds = math.log(3)  # probability 3/4; 0 is 1/2
    seen = of_two([odds], [[odds], [0.0]], [[1], [0]])
    others = of_two([0.0, odds, -odds], [[0.0, 0.0, 0.0]] * 2, [[0, 0, 0]] * 2)
    # r(x) = (3/4) / (5/8) = 6/5; with alpha 0.6, Pr(z) = (1.6 / 2 + 0.4) / 2 = 3/5: r(z) = 5/6, 5/4, 5/12
    told = partial(rmia_attack, seen, others, alpha=0.6, temperature=1.0)
    tie = (6 / 5) / (1 + 6 / 5)
    assert told(gamma=1.0).item() == pytest.approx((2 + tie) / 4)  # above 5/6 and 5/12
    assert told(gamma=2.0).item() == pytest.approx((1 + tie) / 4)  # 6/5 / (5/6) is 1.44


@given(SEEDS, st.sampled_from([0.5, 1.0, 2.0]))
def test_rmia_is_that_of_loops_but_for_ties(seed: int, gamma: float) -> None:
    seen, others, alpha, temperature = drawn(seed), outsiders(seed), 0.3, 2.0
    found = rmia_attack(seen, others, gamma=gamma, alpha=alpha, temperature=temperature)

    def probability(logits: torch.Tensor, label: torch.Tensor) -> float:
        return float((logits.double() / temperature).softmax(0)[label])

    def ratio(of: RecordLogits, record: int, online: bool) -> float:
        label, column = of.labels[record], of.inside[:, record]
        told = [probability(of.shadows[model, record], label) for model in range(6)]
        out = np.mean([p for p, there in zip(told, column, strict=True) if not there])
        at_large = ((1 + alpha) * out + 1 - alpha) / 2
        if online:
            at_large = (out + np.mean([p for p, there in zip(told, column, strict=True) if there])) / 2
        return probability(of.target[record], label) / at_large

    beaten = [
        sum(ratio(seen, x, True) / ratio(others, z, False) >= gamma for z in range(8)) for x in range(5)
    ]
    assert (found * 9).floor().tolist() == beaten
    order = [ratio(seen, x, True) for x in range(5)]
    assert found.argsort().tolist() == np.argsort(order).tolist(), "for one target, in the order of r(x)"


# --- errors -----------------------------------------------------------------------------------------


def test_logits_that_are_no_numbers_are_refused() -> None:
    seen = drawn(0)
    with pytest.raises(ArgumentError, match="target is 'NaN"):
        RecordLogits(seen.target / 0, seen.shadows, seen.inside, seen.labels)


def test_too_few_shadows_are_refused() -> None:
    seen, others = drawn(0), outsiders(0)
    with pytest.raises(ArgumentError, match="shadows inside is 0"):
        rmia_attack(others, others)
    with pytest.raises(ArgumentError, match="shadows inside is 0"):
        lira_attack(others)
    with pytest.raises(ArgumentError, match=r"shadows outside is 1: .* variance"):
        lira_offline_attack(fewer(seen, 2))
    with pytest.raises(ArgumentError, match=r"shadows invalid outside = 1 \(expected 2 or more"):
        lira_offline_attack(fewer(seen, 2), True)
    assert rmia_attack(fewer(seen, 2), fewer(others, 2)).shape == (5,), (
        "one inside and one outside are enough"
    )


# --- strength ---------------------------------------------------------------------------------------

Leak = list[
    tuple[RecordLogits, RecordLogits, torch.Tensor]
]  # of each target: the pool, a population, and who is inside
N, TARGETS, SHADOWS = 100, 3, 12


@pytest.fixture(scope="module")
def leak() -> tuple[Leak, Leak]:
    """Overfitted targets, each on 100 digits of 200, without smoothing; and one that saw none of the 200.

    The latter comes with the same lists of members, which for it are made up.
    """
    data = load(Digits())
    order = torch.randperm(len(data.train), generator=torch_generator(0, "pool"))
    pool, elsewhere = data.train.subset(order[: 2 * N]), data.train.subset(order[2 * N : 4 * N])
    others = data.train.subset(order[4 * N : 4 * N + 500])
    inside, theirs = shadow_halves(2 * N, TARGETS + 1, 1)[:TARGETS], shadow_halves(2 * N, SHADOWS, 2)
    pools: list[TensorData] = [pool] * TARGETS + [elsewhere] + [pool] * SHADOWS
    compute = Compute(EngineConfig(name="stacked"))
    models = train_shadows(
        lambda seed: build("mlp:64", (1, 8, 8), 10, seed),
        pools,
        torch.cat([inside, inside[:1], theirs]),
        Classification(10),
        LocalConfig(epochs=400, batch=N, lr=3e-3, smoothing=0.0),
        0,
        compute=compute,
    )
    shadows = models[TARGETS + 1 :]
    seen = [look(model, shadows, pool, theirs, compute) for model in models[: TARGETS + 1]]
    public = [look(model, shadows, others, compute=compute) for model in models[: TARGETS + 1]]
    blind = [(seen[-1], public[-1], inside[target]) for target in range(TARGETS)]
    return list(zip(seen[:-1], public[:-1], inside, strict=True)), blind


Attack = Callable[[RecordLogits, RecordLogits], torch.Tensor]


def by_loss(seen: RecordLogits, others: RecordLogits) -> torch.Tensor:
    return loss_attack(seen)


def by_lira(seen: RecordLogits, others: RecordLogits) -> torch.Tensor:
    return lira_attack(seen)


def by_lira_offline(seen: RecordLogits, others: RecordLogits) -> torch.Tensor:
    return lira_offline_attack(seen)


def with_strange_masks(seen: RecordLogits, others: RecordLogits) -> torch.Tensor:
    """Shadows that did learn from records, but not from those that are said."""
    return lira_attack(RecordLogits(seen.target, seen.shadows, shadow_halves(2 * N, SHADOWS, 3), seen.labels))


def with_few_shadows(seen: RecordLogits, others: RecordLogits) -> torch.Tensor:
    """Two inside and two outside, and each record's Gaussians from those."""
    return lira_attack(fewer(seen, 4), True)


def against_one_population(seen: RecordLogits, others: RecordLogits) -> torch.Tensor:
    """RMIA as if every record were equally hard: what models at large say of another one."""
    return rmia_attack(
        RecordLogits(seen.target, seen.shadows.roll(1, 1), seen.inside.roll(1, 1), seen.labels), others
    )


def mean_auc(attack: Attack, leaks: Leak) -> float:
    found = [attack_metrics(attack(seen, others), inside)["auc"]["value"] for seen, others, inside in leaks]
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("attack", "least", "weakened", "most"),
    [
        (by_lira, 0.79, by_loss, 0.76),
        (rmia_attack, 0.77, by_loss, 0.76),
        (by_lira, 0.79, with_strange_masks, 0.70),
        (by_lira, 0.79, with_few_shadows, 0.75),
        (by_lira_offline, 0.75, by_loss, 0.74),
        (rmia_attack, 0.77, against_one_population, 0.70),
    ],
)
def test_strong_where_a_model_leaks_and_not_when_weakened(
    attack: Attack, least: float, weakened: Attack, most: float, leak: tuple[Leak, Leak]
) -> None:
    strong, weak = mean_auc(attack, leak[0]), mean_auc(weakened, leak[0])
    print(f"\n{attack.__name__} {strong:.3f}, {weakened.__name__} {weak:.3f}")
    assert strong > least
    assert weak < most < least


@pytest.mark.parametrize("attack", [by_loss, by_lira, by_lira_offline, rmia_attack])
def test_at_chance_on_a_model_that_saw_no_record_and_not_on_one_that_did(
    attack: Attack, leak: tuple[Leak, Leak]
) -> None:
    for leaks, chance in zip(leak, (False, True), strict=True):
        for seen, others, inside in leaks:
            found = attack_metrics(attack(seen, others), inside, 0.99)
            assert (found["auc"]["low"] <= 0.5 <= found["auc"]["high"]) == chance
            assert found["auc"]["high"] - found["auc"]["low"] < 0.25, "records enough to tell"
