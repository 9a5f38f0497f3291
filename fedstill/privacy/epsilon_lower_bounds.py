"""Lower bounds of epsilon from attacks, to compare with the accountant's upper bounds.

No test can tell reliably whether a record was in the data of an (epsilon, delta)-differentially private
mechanism (Wasserman, Zhou, "A Statistical Framework for Differential Privacy", JASA 2010; Kairouz, Oh,
Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015). For any test with false positive
rate fp and false negative rate fn, fp + e^epsilon fn >= 1 - delta, and the same with fp and fn swapped. A
test with smaller rates thus proves that the mechanism is less private, however the test was found.

:func:`lower_bound_from_runs` runs a mechanism many times with a record and many times without it.
:func:`one_run_lower_bound` runs it once, with many records that are each in or out by chance. A lower bound
below the claimed epsilon proves nothing, as the attack may be weak. One above it proves a fault, at the
chosen confidence.
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
DELTAS = (0.1, 0.3, 0.5, 1e-2, 1e-3, 1e-5)  # at which a claimed epsilon is compared with a test
THRESHOLD_SHARE = 1 / 3  # of the runs choose the thresholds
NOISE_FACTOR_RANGE = (0.05, 50.0)  # of a claim's noise


def clopper_pearson_upper(k: int, n: int, error: float) -> float:
    """Return the largest probability of an event that occurred k times in n (Clopper and Pearson,
    Biometrika 1934).

    Args:
        k: 0 .. n.
        n: trials, 0 or more; 0 give the bound 1.
        error: largest probability that the bound is wrong, within (0, 1).

    >>> round(clopper_pearson_upper(0, 100, 0.05), 4)  # 1 - 0.05 ** (1 / 100)
    0.0295
    >>> round(clopper_pearson_upper(3, 10, 0.025), 4)
    0.6525
    """
    if k == n:
        return 1.0
    from scipy.special import betaincinv

    return float(betaincinv(k + 1, n - k, 1 - error))


@dataclass(frozen=True)
class ErrorRates:
    """Upper bounds on the error rates of a test that reports the record as present if a score exceeds a
    threshold.

    Args:
        false_positives: share of runs without the record above the threshold.
        false_negatives: share of runs with the record at or below the threshold.
    """

    false_positives: float
    false_negatives: float

    def epsilon(self, delta: float) -> float:
        """Return the largest epsilon that these rates rule out at delta, 0 or more.

        If the rates are upper bounds, the result is a lower bound, simultaneously for all deltas.

        >>> round(ErrorRates(0.05, 0.01).epsilon(0.0), 3)  # log(0.95 / 0.01) and log(0.99 / 0.05)
        4.554
        """
        fp, fn = self.false_positives, self.false_negatives
        likelihood_ratios = [
            (1 - delta - rate) / other_rate for rate, other_rate in ((fp, fn), (fn, fp)) if other_rate > 0
        ]
        return math.log(max([1.0, *likelihood_ratios]))


@dataclass(frozen=True)
class EpsilonLowerBound:
    """Tests of one mechanism, whose rates all hold together at the chosen confidence."""

    tests: Sequence[ErrorRates]

    def epsilon(self, delta: float) -> float:
        """Return the lower bound of epsilon at delta."""
        return max(rates.epsilon(delta) for rates in self.tests)

    def refutes(self, spent: Mapping[Event, int]) -> bool:
        """Return whether the tests contradict the claimed cost.

        The cost implies an epsilon at every delta, and one epsilon that is too small is enough.
        """
        bounds = {delta: self.epsilon(delta) for delta in DELTAS}
        return any(bound > 0 and compute_epsilon(spent, delta) < bound for delta, bound in bounds.items())

    def epsilon_assuming_noise_kind(self, spent: Mapping[Event, int], delta: float) -> float:
        """Return the lower bound at delta under the assumption that the noise has the claimed kind, at
        another scale.

        The result is the smallest epsilon of the claimed cost, with all noise multiplied by one factor,
        that is not refuted. Where the tests probe the middle of a distribution, this bound says much more
        about its tail than the tests do themselves: for one Gaussian release it is the lower bound of Nasr
        et al., "Tight Auditing of Differentially Private Machine Learning", USENIX Security 2023. A result
        above the claim refutes the claim, whatever the mechanism is; it bounds the mechanism's epsilon only
        if the noise is of that kind.
        """
        low, high = (math.log(factor) for factor in NOISE_FACTOR_RANGE)  # low is not refuted, high is
        if not self.refutes(_scale_noise(spent, NOISE_FACTOR_RANGE[1])):
            return 0.0
        while high - low > 0.02:
            middle = (low + high) / 2
            if self.refutes(_scale_noise(spent, math.exp(middle))):
                high = middle
            else:
                low = middle
        return compute_epsilon(_scale_noise(spent, math.exp(high)), delta)


def lower_bound_from_runs(
    without: torch.Tensor, with_: torch.Tensor, delta: float, confidence: float = CONFIDENCE
) -> EpsilonLowerBound:
    """Test a mechanism by the scores of many runs with independent randomness.

    The method is that of Jagielski, Ullman, Oprea, "Auditing Differentially Private Machine Learning",
    NeurIPS 2020, with delta. The first third of the runs chooses two thresholds: one for the best bound at
    delta, one for the best advantage. Only the other runs are counted.

    Args:
        without: scores ``(n,)`` of runs without the record, in the order of the runs.
        with_: scores ``(n',)`` of runs with it; higher should mean likelier with the record.
        delta: of the bound.
        confidence: probability with which all bounds hold together.

    Raises:
        ArgumentError: fewer than 6 scores of either kind, or a confidence outside (0, 1).
    """
    _check_confidence(confidence)
    if min(len(without), len(with_)) < 6:
        raise ArgumentError("runs of an audit", min(len(without), len(with_)), "6 or more of either kind")
    thresholds = _choose_thresholds(_scores_for_thresholds(without), _scores_for_thresholds(with_), delta)
    error = (1 - confidence) / (2 * len(thresholds))
    held_out = without[len(_scores_for_thresholds(without)) :], with_[len(_scores_for_thresholds(with_)) :]
    return EpsilonLowerBound(tuple(_error_rates(*held_out, threshold, error) for threshold in thresholds))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ArgumentError("confidence", confidence, "above 0 and below 1")


def fisher_discriminant(without: torch.Tensor, with_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce observations of runs ``(n, d)``, ``(n', d)`` to one score a run, ``(n,)`` and ``(n',)``.

    Fisher's linear discriminant is learned from the first third of the runs without and with the record. It
    detects noise that occurs twice, and subtracts it.
    """
    a, b = _scores_for_thresholds(without.double()), _scores_for_thresholds(with_.double())
    scatter = torch.cat([a - a.mean(0), b - b.mean(0)])
    difference, deviation = b.mean(0) - a.mean(0), scatter.std(0)
    scale = deviation.clamp(min=1e-6 * float(deviation.max()) + 1e-30)  # not 0 without noise
    scatter = scatter / scale
    covariance = scatter.T @ scatter / len(scatter) + 1e-3 * torch.eye(len(scale), dtype=torch.float64)
    direction = torch.linalg.solve(covariance, difference / scale) / scale
    return without.double() @ direction, with_.double() @ direction


def one_run_lower_bound(
    m: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the lower bound of epsilon at delta, 0 or more, that guesses about one run prove.

    Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, Theorem 5.2.

    Args:
        m: records, each of them in or out by an independent fair coin.
        guesses: number of records whose presence was guessed, by any rule.
        correct: number of correct guesses.
        delta: 0 or more.
        confidence: within (0, 1).

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
    """Largest probability of at least so many correct guesses under (epsilon, delta): Theorem 5.2."""
    from scipy.stats import binom

    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, q))
    # Of i = 1 .. correct: the binomial probability of correct - i up to correct - 1, over i.
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, q)) / np.arange(1, correct + 1)
    alpha = float(below.max()) if correct else 0.0
    return min(1.0, tail + 2 * m * delta * alpha)


def _scores_for_thresholds(scores: torch.Tensor) -> torch.Tensor:
    return scores[: int(len(scores) * THRESHOLD_SHARE)]


def _error_rates(without: torch.Tensor, with_: torch.Tensor, threshold: float, error: float) -> ErrorRates:
    positives = int((without > threshold).sum())
    negatives = int((with_ <= threshold).sum())
    return ErrorRates(
        clopper_pearson_upper(positives, len(without), error),
        clopper_pearson_upper(negatives, len(with_), error),
    )


def _choose_thresholds(without: torch.Tensor, with_: torch.Tensor, delta: float) -> tuple[float, ...]:
    """Return the thresholds of the best bound at delta and of the best advantage, among 200 of the scores."""
    scores = torch.from_numpy(np.unique(torch.cat([without, with_]).double().numpy()))
    midpoints = torch.cat([scores[:1] - 1, (scores[1:] + scores[:-1]) / 2, scores[-1:] + 1])
    tried = midpoints[torch.linspace(0, len(midpoints) - 1, min(200, len(midpoints))).round().long()].tolist()
    rates = [(_error_rates(without, with_, threshold, 0.05), threshold) for threshold in tried]
    best_bound = max(rates, key=lambda pair: pair[0].epsilon(delta))[1]
    best_advantage = max(rates, key=lambda pair: -pair[0].false_positives - pair[0].false_negatives)[1]
    return (best_bound, best_advantage)


def _scale_noise(spent: Mapping[Event, int], factor: float) -> dict[Event, int]:
    return {replace(event, noise=factor * event.noise): times for event, times in spent.items()}
