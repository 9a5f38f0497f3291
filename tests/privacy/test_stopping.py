"""A server that stops when the answers favor it: what was spent by then is no bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import fftconvolve

from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import Accountant
from fedstill.privacy.events import Event

DELTA, STEP = 1e-5, 0.002


def stopped(accountant: Accountant) -> float:
    """Delta at the epsilon that is spent, for the best of servers that may stop after any of some looks.

    After answers of Gaussian noise that cost mu^2 = t in all, the log likelihood ratio L is normal with mean
    t / 2 and variance t; who stops there at epsilon e gains max(0, 1 - exp(e - L)). By backward induction.
    """
    looks, spent = [], []
    t = 1e-4
    while (cost := compute_epsilon({Event("gaussian", 1 / math.sqrt(t)): 1}, DELTA, accountant)) <= 3:
        looks.append(t)
        spent.append(cost)
        t *= 1.15
    L = np.arange(-14, 14, STEP)

    def weights(variance: float) -> np.ndarray:  # type: ignore[type-arg]
        half = math.ceil(9 * math.sqrt(variance) / STEP)
        found = np.exp(-((np.arange(-half, half + 1) * STEP) ** 2) / (2 * variance))
        return found / found.sum()

    value = np.zeros_like(L)
    for k in range(len(looks) - 1, -1, -1):
        gain = np.maximum(0, -np.expm1(np.minimum(spent[k] - L, 0)))
        value = np.maximum(gain, value)
        more = looks[k] - (looks[k - 1] if k else 0.0)
        later = np.interp(L + more / 2, L, value, left=0, right=1)
        value = np.where(L > 12, later, np.clip(fftconvolve(later, weights(more), mode="same"), 0, 1))
    return float(np.interp(0.0, L, value))


@pytest.mark.parametrize(("accountant", "times"), [("pld", 16.7), ("rdp", 4.4)])
def test_what_is_spent_when_a_server_stops_is_no_bound(accountant: Accountant, times: float) -> None:
    assert stopped(accountant) / DELTA == pytest.approx(times, rel=0.05)
