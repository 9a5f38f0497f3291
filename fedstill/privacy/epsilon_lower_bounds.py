"""What an attack proves: lower bounds of epsilon, to be held against the upper bounds of the accountant.

A mechanism that is (epsilon, delta)-differentially private lets nobody tell well whether a record was
there (Wasserman, Zhou, "A Statistical Framework for Differential Privacy", JASA 2010; Kairouz, Oh, Viswanath,
"The Composition Theorem for Differential Privacy", ICML 2015): of any test's false positives fp and false
negatives fn holds fp + e^epsilon fn >= 1 - delta, and the same with fp and fn changed over. So whoever does
tell better has shown that the mechanism is not that private, however the test came about.

Two ways to count: :func:`evidence_from_runs` runs a mechanism many times with the record and many times without;
:func:`one_run_lower_bound` runs it once, with many records that are in or out by chance.

A lower bound that stays below the claim proves nothing: the attack may be weak. One above it proves a fault,
up to the confidence that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedstill.core.errors import ArgumentError
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.events import Event

CONFIDENCE = 0.95
DELTAS = (0.1, 0.3, 0.5, 1e-2, 1e-3, 1e-5)  # at which a claim is held against a test
THRESHOLD_SHARE = 1 / 3  # of the trials: to choose the thresholds
NOISE_FACTOR_RANGE = (0.05, 50.0)  # of a claim's noise


def clopper_pearson_upper(k: int, n: int, error: float) -> float:
    """The largest probability of an event that came k times in n: Clopper and Pearson, Biometrika 1934.

    Args:
        k: 0 .. n.
        n: trials, 0 or more; none tell nothing.
        error: how often, at most, the bound is wrong, within (0, 1).

    >>> round(clopper_pearson_upper(0, 100, 0.05), 4), round(clopper_pearson_upper(3, 10, 0.025), 4)  # the first is 1 - 0.05 ** (1 / 100)
    (0.0295, 0.6525)
    """
    if k == n:
        return 1.0
    from scipy.special import betaincinv

    return float(betaincinv(k + 1, n - k, 1 - error))


@dataclass(frozen=True)
class ErrorRates:
    """How often a test fails at most: it says that the record was there if a score is above a threshold.

    Args:
        false_positives: of runs without the record, above the threshold.
        false_negatives: of runs with it, at the threshold or below.
    """

    false_positives: float
    false_negatives: float

    def epsilon(self, delta: float) -> float:
        """The largest epsilon that these rates rule out at delta, 0 or more: no smaller one allows them.

        ErrorRates that are upper bounds give a lower bound, and one for all deltas at once.

        >>> round(ErrorRates(0.05, 0.01).epsilon(0.0), 3)  # log(0.95 / 0.01) and log(0.99 / 0.05)
        4.554
        """
        fp, fn = self.false_positives, self.false_negatives
        likelihood_ratios = [
            (1 - delta - rate) / other_rate for rate, other_rate in ((fp, fn), (fn, fp)) if other_rate > 0
        ]
        return math.log(max([1.0, *likelihood_ratios]))


@dataclass(frozen=True)
class Evidence:
    """Tests of one mechanism, whose rates hold all together at the confidence that was asked for."""

    tests: Sequence[ErrorRates]

    def epsilon(self, delta: float) -> float:
        """The lower bound at delta: what no mechanism of a smaller epsilon would have shown."""
        return max(rates.epsilon(delta) for rates in self.tests)

    def refutes(self, spent: Mapping[Event, int]) -> bool:
        """Whether a mechanism that costs this much cannot have been what was tested.

        It claims an epsilon at every delta, and one of them that is too small is enough.
        """
        bounds = {delta: self.epsilon(delta) for delta in DELTAS}
        return any(bound > 0 and compute_epsilon(spent, delta) < bound for delta, bound in bounds.items())

    def as_claimed(self, spent: Mapping[Event, int], delta: float) -> float:
        """The lower bound at delta if the noise is of the kind that is claimed, only less or more of it.

        The least epsilon of a price whose noise, all of it multiplied by one number, would not be refuted.
        Where the tests are in the middle of a distribution, that says much more about its tail than they do
        themselves: for one Gaussian draw it is the lower bound of Nasr et al., "Tight Auditing of
        Differentially Private Machine Learning", USENIX Security 2023. Above the claim it refutes the claim,
        whatever the mechanism is; it bounds an epsilon of the mechanism only if the noise is of that kind.
        """
        low, high = (math.log(factor) for factor in NOISE_FACTOR_RANGE)  # low would pass, high is refuted
        if not self.refutes(_scale_noise(spent, NOISE_FACTOR_RANGE[1])):
            return 0.0
        while high - low > 0.02:
            middle = (low + high) / 2
            if self.refutes(_scale_noise(spent, math.exp(middle))):
                high = middle
            else:
                low = middle
        return compute_epsilon(_scale_noise(spent, math.exp(high)), delta)


def evidence_from_runs(
    without: torch.Tensor, with_: torch.Tensor, delta: float, confidence: float = CONFIDENCE
) -> Evidence:
    """Tests of a mechanism by the scores of many runs, of which each has randomness of its own.

    As Jagielski, Ullman, Oprea, "Auditing Differentially Private Machine Learning", NeurIPS 2020, with delta.
    Two thresholds are chosen by the first third of the runs, one for the best bound at delta and one for the
    best advantage; the others, which had no part in that, are counted.

    Args:
        without: scores ``(n,)`` of runs without the record, in the order in which they were run.
        with_: scores ``(n',)`` of runs with it; higher is meant to be likelier with it.
        confidence: at which all that is said of the tests holds together.

    Raises:
        ArgumentError: fewer than 6 scores of either, or a confidence outside (0, 1).
    """
    _check_confidence(confidence)
    if min(len(without), len(with_)) < 6:
        raise ArgumentError("runs of an audit", min(len(without), len(with_)), "6 or more of either kind")
    thresholds = _choose_thresholds(_threshold_part(without), _threshold_part(with_), delta)
    error = (1 - confidence) / (2 * len(thresholds))
    held_out = without[len(_threshold_part(without)) :], with_[len(_threshold_part(with_)) :]
    return Evidence(tuple(_error_rates(*held_out, threshold, error) for threshold in thresholds))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ArgumentError("confidence", confidence, "above 0 and below 1")


def fisher_discriminant(without: torch.Tensor, with_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One score a run ``(n,)``, ``(n',)`` from many numbers ``(n, d)``, ``(n', d)`` seen of it.

    Fisher's linear discriminant, learned from the first third of the runs without the record and with it.
    Noise that comes twice is thereby found, and subtracted.
    """
    a, b = _threshold_part(without.double()), _threshold_part(with_.double())
    scatter = torch.cat([a - a.mean(0), b - b.mean(0)])
    difference, deviation = b.mean(0) - a.mean(0), scatter.std(0)
    scale = deviation.clamp(min=1e-6 * float(deviation.max()) + 1e-30)  # no noise at all is no trouble
    scatter = scatter / scale
    covariance = scatter.T @ scatter / len(scatter) + 1e-3 * torch.eye(len(scale), dtype=torch.float64)
    direction = torch.linalg.solve(covariance, difference / scale) / scale
    return without.double() @ direction, with_.double() @ direction


def one_run_lower_bound(
    m: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The lower bound of epsilon at delta, 0 or more, that guesses about one run prove.

    Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, Theorem 5.2: each of
    m records was in or out by a fair coin of its own; of some, ``guesses``, it was guessed which, by whatever
    rule, and ``correct`` of these were right.

    Raises:
        ArgumentError: a confidence outside (0, 1).

    >>> round(one_run_lower_bound(1000, 100, 100, 0.0), 2)  # log(q / (1 - q)) where q ** 100 is 0.05
    3.49
    """
    _check_confidence(confidence)
    low, high = 0.0, 1.0
    if guesses == 0 or _guess_probability(m, guesses, correct, 0.0, delta) > 1 - confidence:
        return 0.0
    while _guess_probability(m, guesses, correct, high, delta) <= 1 - confidence:
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        if _guess_probability(m, guesses, correct, middle, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def _guess_probability(m: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The largest probability of so many right guesses under (epsilon, delta): Theorem 5.2."""
    from scipy.stats import binom

    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, q))
    # Of i = 1 .. correct: the binomial probability of correct - i up to correct - 1, over i.
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, q)) / np.arange(1, correct + 1)
    alpha = float(below.max()) if correct else 0.0
    return min(1.0, tail + 2 * m * delta * alpha)


def _threshold_part(scores: torch.Tensor) -> torch.Tensor:
    return scores[: int(len(scores) * THRESHOLD_SHARE)]


def _error_rates(without: torch.Tensor, with_: torch.Tensor, threshold: float, error: float) -> ErrorRates:
    positives = int((without > threshold).sum())
    negatives = int((with_ <= threshold).sum())
    return ErrorRates(
        clopper_pearson_upper(positives, len(without), error),
        clopper_pearson_upper(negatives, len(with_), error),
    )


def _choose_thresholds(without: torch.Tensor, with_: torch.Tensor, delta: float) -> tuple[float, ...]:
    """The thresholds of the best bound at delta and of the best advantage, among 200 of the scores."""
    scores = torch.from_numpy(np.unique(torch.cat([without, with_]).double().numpy()))
    midpoints = torch.cat([scores[:1] - 1, (scores[1:] + scores[:-1]) / 2, scores[-1:] + 1])
    tried = midpoints[torch.linspace(0, len(midpoints) - 1, min(200, len(midpoints))).round().long()].tolist()
    rates = [(_error_rates(without, with_, threshold, 0.05), threshold) for threshold in tried]
    best_bound = max(rates, key=lambda pair: pair[0].epsilon(delta))[1]
    best_advantage = max(rates, key=lambda pair: -pair[0].false_positives - pair[0].false_negatives)[1]
    return (best_bound, best_advantage)


def _scale_noise(spent: Mapping[Event, int], factor: float) -> dict[Event, int]:
    return {replace(event, noise=factor * event.noise): times for event, times in spent.items()}
