"""Rényi differential privacy of one event, at a fixed set of orders, and what it means as an epsilon.

Curves of events that follow one another add up, whatever was asked in between (Mironov, "Rényi
Differential Privacy", CSF 2017, Proposition 1), which makes them cheap: computed once per event, then sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedstill.core import deadline
from fedstill.privacy.events import Event

Curve = NDArray[np.float64]

ORDERS: Curve = np.array(
    [1.02, 1.05] + [1 + tenth / 10 for tenth in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
)
"""Those of dp-accounting, and two near 1 for epsilons in the hundreds and above."""

LONGEST_GRID = 100_000  # points of an integral over a mixture


def to_epsilon(curve: Curve, delta: float) -> float:
    """The least epsilon that a curve over :data:`ORDERS` proves at delta (Canonne, Kamath and Steinke, "The
    Discrete Gaussian for Differential Privacy", NeurIPS 2020, Proposition 12)."""
    from dp_accounting.rdp import rdp_privacy_accountant

    return float(rdp_privacy_accountant.compute_epsilon(ORDERS, curve, delta)[0])


def compose(spent: Mapping[Event, int]) -> Curve:
    """The curve of all events together, (orders,)."""
    total = np.zeros_like(ORDERS)
    for event, times in spent.items():
        total += times * curve(event)
    return total


@lru_cache(maxsize=1024)
def curve(event: Event) -> Curve:
    """An upper bound on the Rényi divergence, in both directions, at each of :data:`ORDERS`.

    Laplace noise: by dp-accounting's RdpAccountant. Pure events: of randomised response, than which none is
    worse (Kairouz, Oh, Viswanath, ICML 2015, Theorem 2.5). Samples: exactly, see :func:`_mixture`;
    dp-accounting has no groups, and between whole orders a looser bound. Where an order is out of reach
    (little noise), the bound is that of the next one up, since divergences do not fall as the order rises, or
    that of the statistic over all records, which sampling can only improve on (the divergence is
    quasi-convex).
    """
    if event.kind == "gaussian":
        everybody: Curve = ORDERS * event.group**2 / (2 * event.noise**2)
        if event.rate == 1:
            return everybody
        bound = np.minimum.accumulate(np.minimum(_mixture(event), everybody)[::-1])[::-1]
        return np.asarray(np.maximum(bound, 0.0))
    if event.kind == "pure":
        told, more = -math.log1p(math.exp(-1 / event.noise)), ORDERS - 1
        return np.asarray((told + np.logaddexp(more / event.noise, -ORDERS / event.noise)) / more)
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(ORDERS)
    accountant.compose(dp_accounting.LaplaceDpEvent(event.noise))
    return np.asarray(accountant.rdp, dtype=np.float64)


def _mixture(event: Event) -> Curve:
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
    done = np.full_like(ORDERS, math.inf)
    ends = k * ORDERS + 24 * noise  # of what counts, from -12 noise on
    usable = ends <= LONGEST_GRID * step
    if not usable.any():
        return done
    x = np.arange(-12 * noise, ends[usable].max() - 12 * noise, step)
    ratio = np.full_like(x, -math.inf)
    for i in range(k + 1):
        deadline.check()
        shifted = (2 * i * x - i**2) / (2 * noise**2) + binom.logpmf(i, k, event.rate)
        ratio = np.logaddexp(ratio, shifted)
    density = -((x / noise) ** 2) / 2 + math.log(step / (noise * math.sqrt(2 * math.pi)))
    for at in np.flatnonzero(usable):
        order, some = ORDERS[at], slice(math.ceil(ends[at] / step) + 1)
        removed = _log_sum(density[some] + order * ratio[some])
        added = _log_sum(density[some] + (1 - order) * ratio[some])
        done[at] = max(removed, added) / (order - 1)
    return done


def _log_sum(logs: Curve) -> float:
    """The logarithm of a sum of finite terms; scipy's takes infinite ones, too, and several times as long."""
    top: float = logs.max()
    return top + math.log(np.exp(logs - top).sum())
