"""Privacy loss distributions of events and of what they compose to, by dp-accounting.

Pessimistic ("connect the dots", Doroshenko et al., PoPETs 2022): whatever the grid, the figure is an upper
bound; a finer grid makes it tighter, a coarser one faster.

Rényi differential privacy of one event, at a fixed set of orders, and what it means as an epsilon.

Curves of events that follow one another add up, whatever was asked in between (Mironov, "Rényi
Differential Privacy", CSF 2017, Proposition 1), which makes them cheap: computed once per event, then sums.

What events cost together, as epsilon at a delta: by dp-accounting, with bounds for what it cannot take.

Two accountants. "pld" composes privacy loss distributions and is tight; its theorem is for events that were
chosen beforehand. "rdp" adds up Rényi curves and is looser; it holds too where events are chosen by earlier
answers. Both figures are upper bounds, for neighbors by adding or removing one record (or group).
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
"""Those of dp-accounting, and two near 1 for epsilons in the hundreds and above."""
MAX_COMPOSED_EPSILON = (
    500.0  # epsilon up to which losses are composed; e to the power of more is near what floats hold
)
MAX_COMPOSED_EVENTS = 10_000_000  # events whose losses are composed
MIN_COMPOSED_DELTA = 1e-12  # above it rounding in the transforms does not matter
MIN_NOISE = 1e-100  # below it epsilon is said to be inf: squares leave what floats hold
MAX_CLOSED_FORM_EPSILON = 1e9  # epsilon up to which its root is found
MAX_DISTINCT_EVENTS = 32  # of different events that are composed one by one
POINTS_PER_LOSS = (
    24  # grid points per typical loss of one event: within 0.1 % of the limit in all that was tried
)
MAX_POINTS_PER_EVENT = 2**20  # of the grid of one event
MAX_POINTS_PER_EPSILON = (
    2**18
)  # grid points per epsilon: what the fast Fourier transforms of a composition may take
MAX_SELF_COMPOSITIONS = 8192  # self-compositions in one transform
MAX_INTEGRATION_POINTS = 100_000  # points of an integral over a mixture
NOISE_FACTOR_RANGE = (1e-3, 1e6)
NOISE_FACTOR_STEP, NOISE_FACTOR_SLACK = (
    1e-3,
    5,
)  # of a noise factor: the grid it is sought on, and points that it may be too high


def compute_epsilon(spent: Mapping[Event, int], delta: float, accountant: Accountant = "pld") -> float:
    """The least epsilon at delta that is known to hold for all events together; 0 for none.

    "pld": Gaussian noise on all records has a closed form (Balle and Wang, "Improving the Gaussian Mechanism
    for Differential Privacy", ICML 2018, Theorem 8), everything else is composed numerically. Where the
    Rényi bound is above 500, there are over 10 million events or delta is below 1e-12, that bound is the
    answer (some percent more, where it is above 500).

    "rdp": groups in a sample are integrated numerically, see :func:`fedstill.privacy.accounting.rdp_curve`.

    More than 32 different events, but for Gaussian noise on all records: noise is rounded down and rates up,
    by as little as makes them 32, so that the figure stays a bound and comes fast.

    Args:
        spent: events and how often each.
        delta: at 0 the sum of the pure epsilons, inf with any Gaussian event.
        accountant: which.

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
    events = _reduce_events(spent)
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
    timing.check()  # composing takes seconds where a server declares a million steps
    return min(bound, pld_epsilon(events, delta, discretization_interval(events, bound)))


def is_within_epsilon(
    spent: Mapping[Event, int], limit: float, delta: float, accountant: Accountant = "pld"
) -> bool:
    """Whether ``epsilon(spent, delta, accountant) <= limit``, without composing where a cheap bound says
    so."""
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
    """How many times more a price can be paid until all would cost more than ``limit`` at delta: 0 .. up_to.

    >>> max_repetitions({}, {Event("laplace", 10.0): 1}, limit=1.0, delta=1e-9, up_to=100)
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
    """The most steps, 0 .. up_to, of a schedule within ``limit`` at delta: all events of so many; more
    cost no less.

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
    """The least noise factor under which a schedule stays within ``limit``, to half a percent.

    Args:
        schedule: all events that a noise factor leads to, 0.001 .. 1,000,000; more noise costs less.
        limit: epsilon, above 0 and finite.

    Raises:
        ArgumentError: no noise in that range is enough (other events may cost too much by themselves), or an
            argument outside its range.

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
        raise ArgumentError("epsilon", limit, f"more: noise times {largest:,.0f} is not enough for it")
    return float(largest / ratio**index)


def _pure_epsilon(spent: Mapping[Event, int]) -> float:
    """Epsilon at delta 0: that of Laplace noise and of pure events adds up, and no less holds."""
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


def _reduce_events(spent: Mapping[Event, int]) -> PrivacyCost:
    """The same cost, or a little more, in few events.

    Gaussian noise on all records composes exactly to one such event: precisions add up.
    """
    events = PrivacyCost({event: times for event, times in spent.items() if times > 0})
    unsampled = [event for event in events if event.kind == "gaussian" and event.rate == 1]
    precision = math.fsum(events.pop(event) / event.noise**2 for event in unsampled)
    unrounded, step = events, 2.0**-9
    while len(events) > MAX_DISTINCT_EVENTS and step <= 1:
        events = PrivacyCost()
        for event, times in unrounded.items():
            events[_costlier_event(event, step)] += times
        step *= 2  # each next grid is a part of the one before, so that more events never cost less
    if precision > 0:
        events[Event("gaussian", 1 / math.sqrt(precision))] += 1
    return events


def _costlier_event(event: Event, step: float) -> Event:
    """An event with no more noise and no lower rate, from a grid of that logarithmic step."""
    noise = math.exp(math.floor(math.log(event.noise) / step) * step)
    if event.rate == 1:
        return Event(event.kind, noise)
    rate = min(math.exp(math.ceil(math.log(event.rate) / step) * step), 1 - 1e-12)
    return Event(event.kind, noise, rate, event.group)


# --- Renyi divergences -----------------------------------------------------------------------------


def rdp_to_epsilon(curve: RdpCurve, delta: float) -> float:
    """The least epsilon that a curve over :data:`ORDERS` proves at delta (Canonne, Kamath and Steinke, "The
    Discrete Gaussian for Differential Privacy", NeurIPS 2020, Proposition 12)."""
    from dp_accounting.rdp import rdp_privacy_accountant

    return float(rdp_privacy_accountant.compute_epsilon(ORDERS, curve, delta)[0])


def compose_rdp(spent: Mapping[Event, int]) -> RdpCurve:
    """The curve of all events together, (orders,)."""
    total = np.zeros_like(ORDERS)
    for event, times in spent.items():
        total += times * rdp_curve(event)
    return total


@lru_cache(maxsize=1024)
def rdp_curve(event: Event) -> RdpCurve:
    """An upper bound on the Rényi divergence, in both directions, at each of :data:`ORDERS`.

    Laplace noise: by dp-accounting's RdpAccountant. Pure events: of randomized response, than which none is
    worse (Kairouz, Oh, Viswanath, ICML 2015, Theorem 2.5). Samples: exactly, see :func:`_sampled_gaussian_rdp`;
    dp-accounting has no groups, and between whole orders a looser bound. Where an order is out of reach
    (little noise), the bound is that of the next one up, since divergences do not fall as the order rises, or
    that of the statistic over all records, which sampling can only improve on (the divergence is
    quasi-convex).
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
    """A group of k records, each drawn into the sum at the rate q, each moving it by up to 1.

    Whoever is drawn moves the sum by Binomial(k, q) at most, and so the worst pair is
    ``sum_i Binomial(i; k, q) N(i, noise^2)`` against ``N(0, noise^2)`` (Ganesh, "Tight Group-Level DP
    Guarantees for DP-SGD with Sampling via Mixture of Gaussians Mechanisms", 2024). Its divergences are
    integrals of smooth functions that vanish at both ends, for which the trapezoidal rule is exact up to
    rounding once its step is well below both the noise and the distance of the ratio's complex zeros from
    the real line, pi noise^2 / k.

    Returns:
        (orders,); inf where the integral would take too many points.
    """
    from scipy.stats import binom

    k, noise = event.group, event.noise
    step = min(noise / 8, noise**2 / (2 * k))
    divergences = np.full_like(ORDERS, math.inf)
    upper_ends = k * ORDERS + 24 * noise  # of what counts, from -12 noise on
    usable = upper_ends <= MAX_INTEGRATION_POINTS * step
    if not usable.any():
        return divergences
    x = np.arange(-12 * noise, upper_ends[usable].max() - 12 * noise, step)
    ratio = np.full_like(x, -math.inf)
    for i in range(k + 1):
        timing.check()
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
    """What the events, one or more, compose to at delta, on a grid of that step."""
    total: Any = None
    for event, times in spent.items():
        timing.check()
        losses = _self_compose(_event_pld(event, step), times)
        total = losses if total is None else total.compose(losses)
    return float(total.get_epsilon_for_delta(delta))


def discretization_interval(spent: Mapping[Event, int], epsilon_bound: float) -> float:
    """How far apart the points of a grid lie, in units of epsilon: a power of 2, so that it changes rarely.

    The typical loss of one event is the root of its divergence of order 2, and events count by what they
    add to the total.

    Args:
        spent: not empty.
        epsilon: an upper bound on what it costs.
    """
    (order_2,) = np.flatnonzero(ORDERS == 2)
    typical = {event: math.sqrt(rdp_curve(event)[order_2]) for event in spent}
    squares = sum(times * typical[event] ** 2 for event, times in spent.items())
    losses = sum(times * typical[event] for event, times in spent.items())
    preferred = squares / losses / POINTS_PER_LOSS if losses > 0 else 0.0
    # Of little noise one event alone could have more points than fit into memory.
    smallest = max(
        epsilon_bound / MAX_POINTS_PER_EPSILON, max(map(_loss_range, spent)) / MAX_POINTS_PER_EVENT, 1e-12
    )
    return float(2.0 ** math.floor(math.log2(max(preferred, smallest))))


def _loss_range(event: Event) -> float:
    """About how far apart the losses of an event lie that count: of Gaussian noise, 12 standard deviations
    to either side."""
    if event.kind != "gaussian":
        return 2 / event.noise
    return (event.group**2 / event.noise + 24 * event.group) / event.noise


def _self_compose(losses: Any, times: int) -> Any:
    """Composed with itself, in stages: each cuts off tails that the next would otherwise carry along."""
    timing.check()
    if times <= MAX_SELF_COMPOSITIONS:
        return losses if times == 1 else losses.self_compose(times)
    stages, remainder = divmod(times, MAX_SELF_COMPOSITIONS)
    composed = _self_compose(losses.self_compose(MAX_SELF_COMPOSITIONS), stages)
    return composed.compose(_self_compose(losses, remainder)) if remainder else composed


@lru_cache(maxsize=64)
def _event_pld(event: Event, step: float) -> Any:
    """The losses of one event, for adding and for removing a record (or a group)."""
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

    sampled = np.arange(event.group + 1)  # records of the group: see renyi._mixture
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
    """The last k of 0 .. high whose events cost at most ``limit``, -1 for none; the cost rises with k. It
    may be ``slack`` too low.

    First by the Rényi bound, which is cheap. What that allows is allowed. Then losses are composed there,
    which shows how much tighter they are, and so about where they reach the limit; from that guess on in
    growing strides.
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
    """A k with ``cost(k) <= limit`` where k + slack has it no more, given one such (or -1) and one above
    it, each with its cost, NaN where it is not known."""
    bisect = False
    while (width := high[0] - low[0]) > slack:
        probe = low[0] + width // 2
        if not bisect and low[1] < high[1] < math.inf:  # both known
            guess = low[0] + round((limit - low[1]) / (high[1] - low[1]) * width)
            probe = min(max(guess, low[0] + 1), high[0] - 1)
        measured = probe, cost(probe)
        if measured[1] <= limit:
            low = measured
        else:
            high = measured
        bisect = high[0] - low[0] > width // 2  # interpolation that did not pay is not tried at once again
    return low[0]
