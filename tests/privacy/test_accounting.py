"""Accountants against closed forms, published results and dp-accounting, and adaptive stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats
from scipy.signal import fftconvolve
from scipy.special import logsumexp

from fedstill.core import timing
from fedstill.privacy import accounting
from fedstill.privacy.accounting import calibrate_noise, compute_epsilon, is_within_epsilon, max_repetitions
from fedstill.privacy.config import Accountant
from fedstill.privacy.events import Event, cost_from_dict
from tests.support.errors import raises_invalid

DPSGD = {Event("gaussian", 1.0, rate=0.01): 1000}
LAPLACE = {Event("laplace", 50.0): 5000}


def gaussian(noise: float, rate: float = 1.0, group: int = 1) -> Event:
    return Event("gaussian", noise, rate, group)


def balle_wang(noise: float, delta: float) -> float:
    """Return epsilon by Theorem 8 of Balle and Wang (2018)."""

    def excess(e: float) -> float:
        a, b = 1 / (2 * noise), e * noise
        return stats.norm.cdf(a - b) - math.exp(e) * stats.norm.cdf(-a - b) - delta

    return float(optimize.brentq(excess, 0, 60))


# --- closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (3.0, 10), (0.5, 2), (40.0, 100)])
def test_gaussian_noise_matches_closed_form(noise: float, times: int) -> None:
    expected = balle_wang(noise / math.sqrt(times), 1e-5)
    assert compute_epsilon({gaussian(noise): times}, 1e-5) == pytest.approx(expected, rel=1e-6)


def test_gaussian_precisions_add_up() -> None:
    """1/3^2 + 1/4^2 = 1/2.4^2."""
    both = {gaussian(3.0): 1, gaussian(4.0): 1}
    assert compute_epsilon(both, 1e-5) == pytest.approx(balle_wang(2.4, 1e-5), rel=1e-6)


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_laplace_noise_matches_closed_form(scale: float) -> None:
    """delta = 1 - exp((epsilon - 1/scale) / 2)."""
    expected = 1 / scale + 2 * math.log1p(-1e-3)
    assert compute_epsilon({Event("laplace", scale): 1}, 1e-3) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_pure_epsilon_sums_laplace_and_is_infinite_for_gaussian(accountant: accounting.Accountant) -> None:
    several = {Event("laplace", 2.0): 3, Event("laplace", 10.0): 5}
    assert compute_epsilon(several, 0.0, accountant) == pytest.approx(2.0)
    assert compute_epsilon({gaussian(100.0): 1}, 0.0, accountant) == math.inf


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_no_events_cost_nothing(accountant: accounting.Accountant) -> None:
    assert compute_epsilon({}, 1e-5, accountant) == 0
    assert compute_epsilon({gaussian(1.0): 0}, 1e-5, accountant) == 0
    assert compute_epsilon({}, 0.0, accountant) == 0


# --- published results ---------------------------------------------------------------------------


def test_matches_published_epsilons() -> None:
    assert round(compute_epsilon(DPSGD, 1e-5), 2) == 1.83
    assert round(compute_epsilon(DPSGD, 1e-5, "rdp"), 2) == 2.10
    assert round(compute_epsilon(LAPLACE, 1e-5), 2) == 6.54
    assert round(compute_epsilon(LAPLACE, 1e-5, "rdp"), 2) == 7.05
    assert compute_epsilon(LAPLACE, 0.0) == pytest.approx(100)


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.01), (4.0, 0.2), (0.6, 0.05), (8.0, 0.5), (2.0, 1e-5)])
def test_sampled_rdp_curve_matches_dp_accounting(noise: float, rate: float) -> None:
    """Equal at integer orders; between them dp-accounting has a looser bound."""
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(accounting.ORDERS)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)))
    theirs, ours = np.array(accountant.rdp), accounting.rdp_curve(gaussian(noise, rate))
    whole = accounting.ORDERS % 1 == 0
    assert whole.sum() == 66
    assert ours[whole] == pytest.approx(theirs[whole], rel=1e-6)
    assert (ours <= theirs * (1 + 1e-6) + 1e-13).all()
    assert (np.diff(ours) >= -1e-12).all()  # monotonic, so values between integer orders cannot differ much


@pytest.mark.parametrize(
    ("noise", "rate", "group"),
    [(1.5, 0.2, 1), (2.0, 0.1, 2), (1.0, 0.3, 3), (6.0, 0.02, 5), (5.0, 0.02, 100), (0.05, 0.3, 3)],
)
def test_group_rdp_curve_matches_numerical_integral(noise: float, rate: float, group: int) -> None:
    counts = np.arange(group + 1)[:, None]
    for at in (5, 12, 21):  # orders 1.4, 2.1, 3.0
        order = accounting.ORDERS[at]
        x = np.linspace(-12 * noise, 12 * noise + order * group, 20_001)
        lower = stats.norm.logpdf(x, 0, noise)
        upper = logsumexp(stats.binom.logpmf(counts, group, rate) + stats.norm.logpdf(x, counts, noise), 0)
        both = []
        for p, q in ((upper, lower), (lower, upper)):
            log_integrand = order * p + (1 - order) * q
            top = log_integrand.max()
            area = integrate.simpson(np.exp(log_integrand - top), x=x)
            both.append((math.log(area) + top) / (order - 1))
        assert accounting.rdp_curve(gaussian(noise, rate, group))[at] == pytest.approx(max(both), rel=1e-6)


def test_small_divergences_are_never_negative() -> None:
    """Rounding makes sums slightly smaller than 1."""
    assert all(
        (accounting.rdp_curve(gaussian(noise, 1e-8)) >= 0).all() for noise in np.geomspace(1.1, 1e4, 12)
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_group_costs_more_than_one_record(
    accountant: accounting.Accountant,
) -> None:
    costs = [compute_epsilon({gaussian(4.0, 0.02, group): 200}, 1e-5, accountant) for group in (1, 2, 4)]
    always_together = compute_epsilon({gaussian(1.0, 1 - 0.98**4): 200}, 1e-5, accountant)
    assert 0 < costs[0] < costs[1] < costs[2] < always_together


# --- properties --------------------------------------------------------------------------------

events = st.one_of(
    st.builds(gaussian, st.floats(0.7, 30)),
    st.builds(gaussian, st.floats(0.8, 10), st.sampled_from([0.01, 0.1, 0.5])),
    st.builds(lambda b: Event("laplace", b), st.floats(0.5, 100)),
)
spendings = st.dictionaries(events, st.integers(1, 30), min_size=1, max_size=3)


@settings(max_examples=12, deadline=None)
@given(spendings, events, st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_epsilon_is_monotonic_in_events_delta_and_noise(
    spent: dict[Event, int], further: Event, delta: float
) -> None:
    for accountant in ("pld", "rdp"):
        cost = compute_epsilon(spent, delta, accountant)
        slack = 1e-3 * cost + 1e-9  # the grids differ
        assert (
            compute_epsilon({**spent, further: spent.get(further, 0) + 1}, delta, accountant) >= cost - slack
        )
        assert compute_epsilon(spent, delta / 10, accountant) >= cost - slack
        louder = {Event(e.kind, e.noise * 1.2, e.rate): n for e, n in spent.items()}
        assert compute_epsilon(louder, delta, accountant) <= cost + slack


@pytest.mark.parametrize(
    ("spent", "low", "high"),
    [
        ({Event("laplace", 1e-9): 10**9}, 0.99e18, 1e18),
        ({gaussian(1e-3): 1}, 5.0e5, 5.2e5),  # 1 / (2 noise^2) + 4.26 / noise = 504,265
        ({gaussian(0.01, 0.1): 1000}, 4e6, 1.1e7),
        ({gaussian(2.0, 1e-4): 10**9}, 3.0, 9.0),
        ({gaussian(1e-120): 1}, math.inf, math.inf),
    ],
)
def test_returns_extreme_epsilons(spent: dict[Event, int], low: float, high: float) -> None:
    assert low <= compute_epsilon(spent, 1e-5) <= high


def test_many_distinct_events_have_tight_bound() -> None:
    n = 3000
    different = {gaussian(2.0 + 0.02 * i / n, 0.01 + 1e-5 * i / n): 1 for i in range(n)}
    different |= {Event("laplace", 400.0 + 2 * i / n): 1 for i in range(n)}
    least = compute_epsilon({gaussian(2.02, 0.01): n, Event("laplace", 402.0): n}, 1e-5)
    greatest = compute_epsilon({gaussian(2.0, 0.01001): n, Event("laplace", 400.0): n}, 1e-5)
    assert least * 0.999 < compute_epsilon(different, 1e-5) < greatest * 1.02


def test_few_distinct_events_are_not_rounded() -> None:
    spent = {gaussian(2.0 + i, 0.01): 7 for i in range(accounting.MAX_DISTINCT_EVENTS)}
    assert compute_epsilon(spent, 1e-5, "rdp") == accounting.rdp_to_epsilon(
        accounting.compose_rdp(spent), 1e-5
    )
    spent[gaussian(1.5, 0.01)] = 7
    exact = accounting.rdp_to_epsilon(accounting.compose_rdp(spent), 1e-5)
    assert exact < compute_epsilon(spent, 1e-5, "rdp") < 1.1 * exact


# --- searches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("spent", "cost", "limit"),
    [
        ({}, {gaussian(1.0, 0.01): 1}, 2.0),
        ({gaussian(5.0): 1}, {Event("laplace", 50.0): 64}, 4.0),
        (DPSGD, {gaussian(20.0): 1, Event("laplace", 100.0): 2}, 3.0),
    ],
)
def test_max_repetitions_is_exact(
    spent: Mapping[Event, int], cost: Mapping[Event, int], limit: float, accountant: accounting.Accountant
) -> None:
    k = max_repetitions(spent, cost, limit, 1e-5, accountant)
    assert k > 0

    def total(times: int) -> dict[Event, int]:
        return {e: spent.get(e, 0) + times * cost.get(e, 0) for e in {*spent, *cost}}

    assert is_within_epsilon(total(k), limit, 1e-5, accountant)
    assert (
        compute_epsilon(total(k), 1e-5, accountant) <= limit < compute_epsilon(total(k + 1), 1e-5, accountant)
    )
    assert not is_within_epsilon(total(k + 1), limit, 1e-5, accountant)
    assert max_repetitions(spent, cost, limit, 1e-5, accountant, max_times=k // 2) == k // 2
    assert max_repetitions(total(k), cost, limit, 1e-5, accountant) == 0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("limit", [4.0])
def test_calibrated_noise_is_tight(limit: float, accountant: accounting.Accountant) -> None:
    def schedule(s: float) -> dict[Event, int]:
        return {gaussian(s, 0.02): 500, gaussian(20 * s): 10, Event("laplace", 10.0): 1}

    s = calibrate_noise(schedule, limit, 1e-5, accountant)
    assert (
        compute_epsilon(schedule(s), 1e-5, accountant)
        <= limit
        < compute_epsilon(schedule(s / 1.0051), 1e-5, accountant)
    )


@pytest.mark.parametrize(("limit", "rate"), [(0.5, 0.49), (3.0, 0.01), (20.0, 0.23)])
def test_calibration_composes_few_losses(limit: float, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compositions are slow; the Rényi bound gives a starting point."""
    composed: list[Mapping[Event, int]] = []
    compose = accounting.pld_epsilon

    def counted(spent: Mapping[Event, int], delta: float, step: float) -> float:
        composed.append(spent)
        return compose(spent, delta, step)

    monkeypatch.setattr(accounting, "pld_epsilon", counted)
    calibrate_noise(lambda s: {gaussian(s, rate): 300, gaussian(2 * s, 2 * rate): 50}, limit, 1e-5)
    assert 2 <= len(composed) <= 5


@pytest.mark.parametrize(("limit", "last"), [(1.0, 3), (999.0, 99)])
def test_search_composes_no_point_twice(limit: float, last: int) -> None:
    """Interpolation between costs 0 and 1000 of 0 and 100 times suggests 0.1 and 99.9 times."""
    probed = [0, 100]

    def cost(k: int) -> float:
        probed.append(k)
        return k**2 / 10

    assert accounting._search_between(cost, limit, (0, 0.0), (100, 1000.0)) == last
    assert len(set(probed)) == len(probed)


def test_calibration_matches_closed_form() -> None:
    s = calibrate_noise(lambda s: {gaussian(s): 1}, 4.377178, 1e-5)
    assert 1.0 <= s <= 1.0055
    assert calibrate_noise(lambda s: {Event("laplace", s): 7}, 3.5, 0.0) == pytest.approx(2.0, rel=5e-3)


def test_calibration_rejects_unreachable_epsilon() -> None:
    fixed = Event("laplace", 0.5)
    with raises_invalid("epsilon", 1.0, "1,000,000"):
        calibrate_noise(lambda s: {gaussian(s): 1, fixed: 1}, 1.0, 1e-5)
    with raises_invalid("epsilon", float("inf")):
        calibrate_noise(lambda s: {gaussian(s): 1}, math.inf, 1e-5)


@pytest.mark.parametrize("delta", [-0.1, 1.0, math.nan])
def test_rejects_invalid_delta(delta: float) -> None:
    with raises_invalid("delta", delta, "below 1"):
        compute_epsilon(DPSGD, delta)


@pytest.mark.parametrize(("each", "times"), [(2.0, 1), (0.5, 10), (0.1, 300)])
def test_pure_events_are_bounded_by_randomized_response(each: float, times: int) -> None:
    """The reference composes binary randomized responses with log-odds ``each``."""
    right, counts = 1 / (1 + math.exp(-each)), np.arange(times + 1)
    with_it, without = stats.binom.pmf(counts, times, right), stats.binom.pmf(counts, times, 1 - right)

    def delta(most: float) -> float:
        return float(np.maximum(with_it - math.exp(most) * without, 0).sum())

    exact = optimize.brentq(lambda most: delta(most) - 1e-5, 0, times * each)
    for accountant in ("pld", "rdp"):
        cost = compute_epsilon({Event("pure", 1 / each): times}, 1e-5, accountant)  # type: ignore[arg-type]
        assert exact <= cost <= 1.08 * exact
        assert cost >= compute_epsilon({Event("laplace", 1 / each): times}, 1e-5, accountant)  # type: ignore[arg-type]
    assert compute_epsilon({Event("pure", 1 / each): times}, 0.0) == pytest.approx(times * each)


@pytest.mark.slow
def test_little_noise_keeps_grid_small() -> None:
    """A node can report any cost; the grid of this one once took 17 GB on the server."""
    cost = {Event("gaussian", 0.3, rate=1e-9): 1}
    bound = compute_epsilon(cost, 1e-5, "rdp")
    step = accounting.discretization_interval(cost, bound)
    # The losses lie between plus and minus (1 / (2 noise^2) + 12 / noise), approximately.
    assert 2 * (1 / (2 * 0.3**2) + 12 / 0.3) / step < 2**21
    assert compute_epsilon(cost, 1e-5) <= bound


@pytest.mark.parametrize("event", [Event("laplace", 10.0), Event("gaussian", 2.0, rate=0.1)])
def test_composition_respects_time_limit(event: Event) -> None:
    with timing.time_limit(1e-9, lambda: TimeoutError("late")), pytest.raises(TimeoutError):
        accounting.pld_epsilon({event: 1}, 1e-5, 0.01)


def test_summed_cost_allows_larger_count() -> None:
    assert cost_from_dict({"gaussian(1.0)": 2**40}, 2**63).total() == 2**40


DELTA, STEP = 1e-5, 0.002


def delta_at_stopping(accountant: Accountant) -> float:
    """Return delta at the spent epsilon for an optimal server that may stop after any of several releases.

    Releases with Gaussian noise and total cost mu^2 = t have a log likelihood ratio L that is normal with
    mean t / 2 and variance t. Stopping at that point with epsilon e yields max(0, 1 - exp(e - L)). The value
    of the optimal stopping rule is computed by backward induction.
    """
    stops, spent = [], []
    t = 1e-4
    while (cost := compute_epsilon({Event("gaussian", 1 / math.sqrt(t)): 1}, DELTA, accountant)) <= 3:
        stops.append(t)
        spent.append(cost)
        t *= 1.15
    L = np.arange(-14, 14, STEP)

    def weights(variance: float) -> np.ndarray:  # type: ignore[type-arg]
        half = math.ceil(9 * math.sqrt(variance) / STEP)
        density = np.exp(-((np.arange(-half, half + 1) * STEP) ** 2) / (2 * variance))
        return density / density.sum()

    value = np.zeros_like(L)
    for k in range(len(stops) - 1, -1, -1):
        gain = np.maximum(0, -np.expm1(np.minimum(spent[k] - L, 0)))
        value = np.maximum(gain, value)
        more = stops[k] - (stops[k - 1] if k else 0.0)
        later = np.interp(L + more / 2, L, value, left=0, right=1)
        value = np.where(L > 12, later, np.clip(fftconvolve(later, weights(more), mode="same"), 0, 1))
    return float(np.interp(0.0, L, value))


@pytest.mark.parametrize(("accountant", "times"), [("pld", 16.7), ("rdp", 4.4)])
def test_epsilon_at_adaptive_stopping_is_no_bound(accountant: Accountant, times: float) -> None:
    assert delta_at_stopping(accountant) / DELTA == pytest.approx(times, rel=0.05)
