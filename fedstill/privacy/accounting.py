"""Epsilon of composed privacy events at a delta, computed with dp-accounting.

There are two accountants. "pld" composes privacy loss distributions and is tight, but its theorem assumes
that events are chosen in advance. "rdp" adds Rényi divergences and is looser, but it also holds for events
that are chosen adaptively, from earlier responses (Mironov, "Rényi Differential Privacy", CSF 2017,
Proposition 1). Both return upper bounds. Neighboring data sets differ by adding or removing one record (or
group).

The privacy loss distributions are pessimistic ("connect the dots", Doroshenko et al., PoPETs 2022): the
result is an upper bound on any grid; a finer grid makes it tighter, a coarser one faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core import timing
from fedstill.core.errors import ArgumentError
from fedstill.privacy.config import Accountant
from fedstill.privacy.events import Event, PrivacyCost

RdpCurve = NDArray[np.float64]
ORDERS: RdpCurve = np.array(
    [1.02, 1.05] + [1 + tenth / 10 for tenth in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
)
"""Rényi orders: those of dp-accounting, and two near 1 for epsilons in the hundreds and above."""
MAX_COMPOSED_EPSILON = 500.0  # losses are composed up to here; the exponential of more nearly overflows
MAX_COMPOSED_EVENTS = 10_000_000
MIN_COMPOSED_DELTA = 1e-12  # below it, rounding errors of the transforms matter
MIN_NOISE = 1e-100  # below it epsilon is inf, as squares underflow
MAX_CLOSED_FORM_EPSILON = 1e9
MAX_DISTINCT_EVENTS = 32  # more are rounded to so many
POINTS_PER_LOSS = 24  # grid points per typical loss of an event: within 0.1 % of the limit in all trials
MAX_POINTS_PER_EVENT = 2**20  # grid points
MAX_POINTS_PER_EPSILON = 2**18  # grid points that the Fourier transforms of a composition can handle
MAX_SELF_COMPOSITIONS = 8192  # in one transform
MAX_INTEGRATION_POINTS = 100_000
NOISE_FACTOR_RANGE = (1e-3, 1e6)
NOISE_FACTOR_STEP = 1e-3  # relative step of the search grid
NOISE_FACTOR_SLACK = 5  # grid points by which a calibrated factor may be too high


def compute_epsilon(spent: Mapping[Event, int], delta: float, accountant: Accountant = "pld") -> float:
    """Return the smallest epsilon at delta that is known to hold for all events together; 0 for no events.

    "pld": Gaussian noise on all records has a closed form (Balle and Wang, "Improving the Gaussian
    Mechanism for Differential Privacy", ICML 2018, Theorem 8); all other events are composed numerically.
    The Rényi bound is returned where it is above 500 (a few percent looser), for more than 10 million
    events, and for delta below 1e-12.

    "rdp": sampled groups are integrated numerically, see :func:`fedstill.privacy.accounting.rdp_curve`.

    With more than 32 different events, not counting Gaussian noise on all records, noise is rounded down
    and rates are rounded up just enough to leave 32. The result stays an upper bound.

    Args:
        spent: events and their counts.
        delta: 0 or more, below 1. At 0 the result is the sum of the pure epsilons; inf with any Gaussian
            event.
        accountant: "pld" or "rdp".

    Raises:
        ArgumentError: delta outside its range.

    >>> from fedstill.privacy.events import Event
    >>> round(compute_epsilon({Event("gaussian", 1.0, rate=0.01): 1000}, 1e-5), 2)
    1.83
    >>> round(compute_epsilon({Event("laplace", 50.0): 5000}, 1e-5, "rdp"), 2)
    7.05
    """
    if not 0 <= delta < 1:
        raise ArgumentError("delta", delta, "0 or more and below 1")
    if any(event.noise < MIN_NOISE for event in spent):
        return math.inf
    if delta == 0:
        return _pure_epsilon(spent)
    events = _merge_similar_events(spent)
    if not events:
        return 0.0
    bound = _rdp_or_pure_bound(events, delta)
    if accountant == "rdp":
        return bound
    if len(events) == 1 and bound <= MAX_CLOSED_FORM_EPSILON:
        (event,) = events
        if event.kind == "gaussian" and event.rate == 1:
            import dp_accounting

            return min(bound, float(dp_accounting.get_epsilon_gaussian(event.noise, delta)))
    if (
        bound > MAX_COMPOSED_EPSILON
        or delta < MIN_COMPOSED_DELTA
        or sum(events.values()) > MAX_COMPOSED_EVENTS
    ):
        return bound
    timing.check_limits()  # a composition takes seconds if a server declares a million steps
    return min(bound, pld_epsilon(events, delta, discretization_interval(events, bound)))


def is_within_epsilon(
    spent: Mapping[Event, int], limit: float, delta: float, accountant: Accountant = "pld"
) -> bool:
    """Return whether ``compute_epsilon(spent, delta, accountant) <= limit``, and avoid the composition
    where the cheaper Rényi bound suffices.
    """
    if compute_epsilon(spent, delta, "rdp") <= limit:
        return True
    return accountant == "pld" and compute_epsilon(spent, delta) <= limit


def max_repetitions(
    spent: Mapping[Event, int],
    cost: Mapping[Event, int],
    limit: float,
    delta: float,
    accountant: Accountant = "pld",
    max_times: int = 1_000_000,
) -> int:
    """Return how many more times a cost fits before the total exceeds ``limit`` at delta: 0 .. max_times.

    >>> max_repetitions({}, {Event("laplace", 10.0): 1}, limit=1.0, delta=1e-9, max_times=100)
    10
    """
    return max_steps(lambda times: _add_repetitions(spent, cost, times), limit, delta, accountant, max_times)


def max_steps(
    schedule: Callable[[int], Mapping[Event, int]],
    limit: float,
    delta: float,
    accountant: Accountant = "pld",
    max_times: int = 1_000_000,
) -> int:
    """Return the largest number of steps, 0 .. max_times, whose events stay within ``limit`` at delta.

    Args:
        schedule: all events of a number of steps; more steps must not cost less.

    >>> max_steps(lambda k: {Event("laplace", 5.0): k, Event("laplace", 2.0): 1}, limit=1.0, delta=0.0)
    2
    """
    return max(0, _last_within(schedule, limit, delta, accountant, max_times))


def calibrate_noise(
    schedule: Callable[[float], Mapping[Event, int]],
    limit: float,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """Return the smallest noise factor that keeps a schedule within ``limit``, to half a percent.

    Args:
        schedule: all events that follow from a noise factor of 0.001 .. 1,000,000; more noise must cost less.
        limit: epsilon, above 0 and finite.

    Raises:
        ArgumentError: no noise factor in that range is large enough (the other events may exceed the limit by
            themselves), or an argument is outside its range.

    >>> s = calibrate_noise(lambda s: {Event("gaussian", s, rate=0.01): 1000}, 1.83, 1e-5)
    >>> round(s, 2)
    1.0
    """
    if not 0 < limit < math.inf:
        raise ArgumentError("epsilon", limit, "above 0 and finite")
    smallest, largest = NOISE_FACTOR_RANGE
    ratio = 1 + NOISE_FACTOR_STEP
    steps = math.ceil(math.log(largest / smallest) / math.log(ratio))

    def less_noise(steps_down: int) -> Mapping[Event, int]:
        return schedule(largest / ratio**steps_down)

    index = _last_within(less_noise, limit, delta, accountant, steps, NOISE_FACTOR_SLACK)
    if index < 0:
        raise ArgumentError("epsilon", limit, f"a larger one, as noise times {largest:,.0f} is not enough")
    return float(largest / ratio**index)


def _pure_epsilon(spent: Mapping[Event, int]) -> float:
    """Epsilon at delta 0: Laplace and pure events add up, and Gaussian noise has none."""
    return sum(
        math.inf if event.kind == "gaussian" else times / event.noise for event, times in spent.items()
    )


def _rdp_or_pure_bound(events: Mapping[Event, int], delta: float) -> float:
    return min(_pure_epsilon(events), rdp_to_epsilon(compose_rdp(events), delta))


def _add_repetitions(spent: Mapping[Event, int], cost: Mapping[Event, int], times: int = 1) -> PrivacyCost:
    total = PrivacyCost(spent)
    for event, per_repetition in cost.items():
        total[event] += times * per_repetition
    return total


def _merge_similar_events(spent: Mapping[Event, int]) -> PrivacyCost:
    """Return at most about 32 events of the same or a slightly larger cost.

    Gaussian noise on all records composes exactly to one such event, as precisions add up.
    """
    events = PrivacyCost({event: times for event, times in spent.items() if times > 0})
    unsampled = [event for event in events if event.kind == "gaussian" and event.rate == 1]
    precision = math.fsum(events.pop(event) / event.noise**2 for event in unsampled)
    unrounded, step = events, 2.0**-9
    while len(events) > MAX_DISTINCT_EVENTS and step <= 1:
        events = PrivacyCost()
        for event, times in unrounded.items():
            events[_round_to_costlier_event(event, step)] += times
        step *= 2  # each grid is a subset of the previous one, so that more events never cost less
    if precision > 0:
        events[Event("gaussian", 1 / math.sqrt(precision))] += 1
    return events


def _round_to_costlier_event(event: Event, step: float) -> Event:
    """Round an event to no more noise and no lower rate, on a grid of a logarithmic step."""
    noise = math.exp(math.floor(math.log(event.noise) / step) * step)
    if event.rate == 1:
        return Event(event.kind, noise)
    rate = min(math.exp(math.ceil(math.log(event.rate) / step) * step), 1 - 1e-12)
    return Event(event.kind, noise, rate, event.group)


# --- Renyi divergences -----------------------------------------------------------------------------


def rdp_to_epsilon(curve: RdpCurve, delta: float) -> float:
    """Return the smallest epsilon that a curve over :data:`ORDERS` proves at delta (Canonne, Kamath and
    Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Proposition 12).
    """
    from dp_accounting.rdp import rdp_privacy_accountant

    return float(rdp_privacy_accountant.compute_epsilon(ORDERS, curve, delta)[0])


def compose_rdp(spent: Mapping[Event, int]) -> RdpCurve:
    """Return the Rényi curve of all events together, (orders,)."""
    total = np.zeros_like(ORDERS)
    for event, times in spent.items():
        total += times * rdp_curve(event)
    return total


@lru_cache(maxsize=1024)
def rdp_curve(event: Event) -> RdpCurve:
    """Return an upper bound on the Rényi divergence of an event, in both directions, at each of
    :data:`ORDERS`.

    Laplace noise is bounded by dp-accounting's RdpAccountant. Pure events are bounded by randomized
    response, the worst pure mechanism (Kairouz, Oh, Viswanath, ICML 2015, Theorem 2.5). Sampled events are
    exact, see :func:`_sampled_gaussian_rdp`; dp-accounting has no groups, and a looser bound between
    integer orders. An order that is out of reach (little noise) gets the bound of the next higher one, as
    divergences do not fall with the order, or the bound of the statistic over all records, as sampling can
    only improve it (the divergence is quasi-convex).
    """
    if event.kind == "gaussian":
        unsampled: RdpCurve = ORDERS * event.group**2 / (2 * event.noise**2)
        if event.rate == 1:
            return unsampled
        bound = np.minimum.accumulate(np.minimum(_sampled_gaussian_rdp(event), unsampled)[::-1])[::-1]
        return np.asarray(np.maximum(bound, 0.0))
    if event.kind == "pure":
        log_truth, order_less_1 = -math.log1p(math.exp(-1 / event.noise)), ORDERS - 1
        return np.asarray(
            (log_truth + np.logaddexp(order_less_1 / event.noise, -ORDERS / event.noise)) / order_less_1
        )
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(ORDERS)
    accountant.compose(dp_accounting.LaplaceDpEvent(event.noise))
    return np.asarray(accountant.rdp, dtype=np.float64)


def _sampled_gaussian_rdp(event: Event) -> RdpCurve:
    """Rényi curve of a sampled Gaussian event for a group of k records.

    Each record is sampled at rate q and moves the sum by up to 1, so that the group moves it by Binomial(k,
    q) at most. The worst pair is ``sum_i Binomial(i; k, q) N(i, noise^2)`` against ``N(0, noise^2)``
    (Ganesh, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians Mechanisms",
    2024). Its divergences are integrals of smooth functions that vanish at both ends. For these the
    trapezoidal rule is exact up to rounding once its step is well below both the noise and pi noise^2 / k,
    the distance of the ratio's complex zeros from the real line.

    Returns:
        (orders,); inf where the integral would need too many points.
    """
    from scipy.stats import binom

    k, noise = event.group, event.noise
    step = min(noise / 8, noise**2 / (2 * k))
    divergences = np.full_like(ORDERS, math.inf)
    upper_ends = k * ORDERS + 24 * noise  # the relevant range starts at -12 noise
    usable = upper_ends <= MAX_INTEGRATION_POINTS * step
    if not usable.any():
        return divergences
    x = np.arange(-12 * noise, upper_ends[usable].max() - 12 * noise, step)
    ratio = np.full_like(x, -math.inf)
    for i in range(k + 1):
        timing.check_limits()
        shifted = (2 * i * x - i**2) / (2 * noise**2) + binom.logpmf(i, k, event.rate)
        ratio = np.logaddexp(ratio, shifted)
    density = -((x / noise) ** 2) / 2 + math.log(step / (noise * math.sqrt(2 * math.pi)))
    for index in np.flatnonzero(usable):
        order, points = ORDERS[index], slice(math.ceil(upper_ends[index] / step) + 1)
        removed = _log_sum(density[points] + order * ratio[points])
        added = _log_sum(density[points] + (1 - order) * ratio[points])
        divergences[index] = max(removed, added) / (order - 1)
    return divergences


def _log_sum(logs: RdpCurve) -> float:
    """The logarithm of a sum of finite terms; scipy's takes infinite ones, too, and several times as long."""
    top: float = logs.max()
    return top + math.log(np.exp(logs - top).sum())


# --- privacy loss distributions --------------------------------------------------------------------


def pld_epsilon(spent: Mapping[Event, int], delta: float, step: float) -> float:
    """Compose one or more events on a grid of a given step, and return their epsilon at delta."""
    total: Any = None
    for event, times in spent.items():
        timing.check_limits()
        losses = _self_compose(_event_pld(event, step), times)
        total = losses if total is None else total.compose(losses)
    return float(total.get_epsilon_for_delta(delta))


def discretization_interval(spent: Mapping[Event, int], epsilon_bound: float) -> float:
    """Return the step of the loss grid in units of epsilon, a power of 2 so that it changes rarely.

    The typical loss of one event is the square root of its divergence of order 2. Events are weighted by
    their share of the total.

    Args:
        spent: not empty.
        epsilon_bound: upper bound on the epsilon of ``spent``.
    """
    (order_2,) = np.flatnonzero(ORDERS == 2)
    typical = {event: math.sqrt(rdp_curve(event)[order_2]) for event in spent}
    squares = sum(times * typical[event] ** 2 for event, times in spent.items())
    losses = sum(times * typical[event] for event, times in spent.items())
    preferred = squares / losses / POINTS_PER_LOSS if losses > 0 else 0.0
    # With little noise, a single event could need more points than fit into memory.
    smallest = max(
        epsilon_bound / MAX_POINTS_PER_EPSILON,
        max(map(_loss_range_width, spent)) / MAX_POINTS_PER_EVENT,
        1e-12,
    )
    return float(2.0 ** math.floor(math.log2(max(preferred, smallest))))


def _loss_range_width(event: Event) -> float:
    """Approximate width of an event's relevant losses; for Gaussian noise, 12 standard deviations to either
    side.
    """
    if event.kind != "gaussian":
        return 2 / event.noise
    return (event.group**2 / event.noise + 24 * event.group) / event.noise


def _self_compose(losses: Any, times: int) -> Any:
    """Compose a loss distribution with itself, in stages: each stage truncates tails that the next one
    would keep.
    """
    timing.check_limits()
    if times <= MAX_SELF_COMPOSITIONS:
        return losses if times == 1 else losses.self_compose(times)
    stages, remainder = divmod(times, MAX_SELF_COMPOSITIONS)
    composed = _self_compose(losses.self_compose(MAX_SELF_COMPOSITIONS), stages)
    return composed.compose(_self_compose(losses, remainder)) if remainder else composed


@lru_cache(maxsize=64)
def _event_pld(event: Event, step: float) -> Any:
    """Privacy loss distribution of one event, for adding and removing a record (or a group)."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    options: dict[str, float] = {"value_discretization_interval": step}
    if event.kind == "laplace":
        return pld.from_laplace_mechanism(event.noise, **options)
    if event.kind == "pure":
        from dp_accounting.pld import common

        return pld.from_privacy_parameters(
            common.DifferentialPrivacyParameters(1 / event.noise, 0.0), **options
        )
    if event.group == 1:
        return pld.from_gaussian_mechanism(event.noise, sampling_prob=event.rate, **options)
    from scipy.stats import binom

    sampled = np.arange(event.group + 1)  # records of the group, see _sampled_gaussian_rdp
    probabilities = binom.pmf(sampled, event.group, event.rate)
    possible = probabilities > 0
    return pld.from_mixture_gaussian_mechanism(
        event.noise, sampled[possible].astype(float).tolist(), probabilities[possible].tolist(), **options
    )


# --- searches --------------------------------------------------------------------------------------


def _last_within(
    events_at: Callable[[int], Mapping[Event, int]],
    limit: float,
    delta: float,
    accountant: Accountant,
    last: int,
    slack: int = 1,
) -> int:
    """Return the last k of 0 .. last whose events cost at most ``limit``, or -1; it may be ``slack`` too low.

    The cost must not fall with k. The cheap Rényi bound is searched first, and what it allows is allowed.
    The losses at that point are then composed, which shows how much tighter they are, and so about where
    they reach the limit. The search continues from that guess in growing strides.
    """

    def bound(k: int) -> float:
        return compute_epsilon(events_at(k), delta, "rdp")

    def cost(k: int) -> float:
        return compute_epsilon(events_at(k), delta)

    rdp_last = _search_between(bound, limit, (-1, math.nan), (last + 1, math.nan))
    if accountant == "rdp" or rdp_last == last:
        return rdp_last
    low, above = (rdp_last, math.nan), (last + 1, math.nan)
    guess = rdp_last
    if rdp_last >= 0:
        low = rdp_last, cost(rdp_last)
        if low[1] > 0:
            guess = _search_between(bound, limit * limit / low[1], (rdp_last, math.nan), above)
    step = max(slack, (guess - rdp_last) // 16)
    probe = max(guess, rdp_last + step)
    while low[0] < last and above[0] > last:
        measured = min(probe, last), cost(min(probe, last))
        if measured[1] <= limit:
            low, probe = measured, measured[0] + step
            step *= 2
        else:
            above = measured
    return _search_between(cost, limit, low, above, slack) if low[0] < last else last


def _search_between(
    cost: Callable[[int], float],
    limit: float,
    low: tuple[int, float],
    high: tuple[int, float],
    slack: int = 1,
) -> int:
    """Return a k with ``cost(k) <= limit`` whose k + slack exceeds it, by interpolation and bisection.

    Args:
        low: k within the limit (or -1), and its cost.
        high: k above the limit, and its cost. A cost is NaN where it is not known.
    """
    bisect = False
    while (width := high[0] - low[0]) > slack:
        probe = low[0] + width // 2
        if not bisect and low[1] < high[1] < math.inf:  # both costs are known
            guess = low[0] + round((limit - low[1]) / (high[1] - low[1]) * width)
            probe = min(max(guess, low[0] + 1), high[0] - 1)
        measured = probe, cost(probe)
        if measured[1] <= limit:
            low = measured
        else:
            high = measured
        bisect = high[0] - low[0] > width // 2  # after a poor interpolation, bisect once
    return low[0]
