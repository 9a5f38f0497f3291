"""The data-dependent curve of GNMax against the real distributions of its answers."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from fedstill.core.errors import ArgumentError
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.events import Event
from fedstill.privacy.pate import curves, epsilon_data_dependent, log_other

ORDERS = np.array([1.5, 2.0, 4.0, 8.0, 16.0])
NODES, WEIGHTS = np.polynomial.legendre.leggauss(400)


def answers(votes: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """Log of the chance of each class to win, (C,), by integrating over the winner's noisy count."""
    low, high = votes.min() - 12 * sigma, votes.max() + 12 * sigma
    x = (high + low) / 2 + (high - low) / 2 * NODES
    below = stats.norm.logcdf(x, votes[:, None], sigma)  # (C, nodes)
    parts = stats.norm.logpdf(x, votes[:, None], sigma) + below.sum(axis=0) - below
    return special.logsumexp(parts, axis=1, b=WEIGHTS * (high - low) / 2)


def divergence(p: NDArray[np.float64], q: NDArray[np.float64], order: float) -> float:
    return float(special.logsumexp(order * p + (1 - order) * q)) / (order - 1)


def test_the_chance_of_another_answer_by_hand() -> None:
    """Votes 8, 5 and 2 with sigma 2: erfc(3/4)/2 + erfc(6/4)/2."""
    expected = (math.erfc(0.75) + math.erfc(1.5)) / 2
    assert log_other(np.array([[5.0, 8.0, 2.0]]), 2.0) == pytest.approx([math.log(expected)])
    assert log_other(np.array([[4.0, 4.0, 4.0]]), 2.0) == pytest.approx([math.log(2 / 3)])  # 1 - 1/C


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=4), st.sampled_from([1.0, 2.0, 5.0, 8.0]))
def test_it_bounds_the_true_divergence_from_every_neighbour(counts: list[int], sigma: float) -> None:
    votes = np.array(counts, dtype=np.float64)
    p = answers(votes, sigma)
    assert special.logsumexp(p) == pytest.approx(0, abs=1e-6)
    others = special.logsumexp(np.delete(p, votes.argmax()))
    bound = log_other(votes[None], sigma)
    assert others <= bound[0] + 1e-6
    curve = curves(bound, sigma, ORDERS)[0]
    for loses, gains in permutations(range(len(counts)), 2):
        if votes[loses] < 1:
            continue
        neighbour = votes.copy()
        neighbour[loses] -= 1
        neighbour[gains] += 1
        q = answers(neighbour, sigma)
        for order, most in zip(ORDERS, curve, strict=True):
            assert divergence(p, q, order) <= most * (1 + 1e-6) + 1e-9


def test_the_theorem_by_hand() -> None:
    """Theorem 6 as printed, at log q = -20, sigma = 4, order 3."""
    q, sigma, order = math.exp(-20.0), 4.0, 3.0
    mu2 = sigma * math.sqrt(20.0)
    mu1 = mu2 + 1
    e1, e2 = mu1 / sigma**2, mu2 / sigma**2
    a = (1 - q) / (1 - (q * math.exp(e2)) ** ((mu2 - 1) / mu2))
    b = math.exp(e1) / q ** (1 / (mu1 - 1))
    expected = math.log((1 - q) * a ** (order - 1) + q * b ** (order - 1)) / (order - 1)
    found = curves(np.array([-20.0]), sigma, np.array([order]))[0, 0]
    assert found == pytest.approx(expected, rel=1e-6)
    assert found < order / sigma**2 / 100


def test_agreement_makes_it_cheap_and_ties_cost_the_worst_case() -> None:
    sigma, rows = 10.0, 50
    worst = epsilon({Event("gaussian", sigma / math.sqrt(2)): rows}, 1e-5, "rdp")
    agreed = torch.tensor([[100.0, 0.0, 0.0]]).expand(rows, 3)
    tied = torch.tensor([[34.0, 33.0, 33.0]]).expand(rows, 3)
    assert epsilon_data_dependent(tied, sigma, 1e-5) == pytest.approx(worst)
    assert epsilon_data_dependent(agreed, sigma, 1e-5) < worst / 10
    assert epsilon_data_dependent(agreed[:0], sigma, 1e-5) == 0


def test_a_threshold_has_its_own_price_and_saves_that_of_rows_it_stops() -> None:
    sigma, noise = 10.0, 20.0
    votes = torch.tensor([[50.0, 50.0]]).expand(40, 2)
    answered = torch.zeros(40, dtype=torch.bool)
    at_the_threshold = epsilon_data_dependent(votes, sigma, 1e-5, 50.0, noise, answered)
    asked = epsilon({Event("gaussian", noise): 40}, 1e-5, "rdp")
    assert at_the_threshold == pytest.approx(asked)  # a coin: the worst case; no votes told
    answered[:10] = True
    told = {Event("gaussian", noise): 40, Event("gaussian", sigma / math.sqrt(2)): 10}
    with_ten = epsilon_data_dependent(votes, sigma, 1e-5, 50.0, noise, answered)
    assert with_ten == pytest.approx(epsilon(told, 1e-5, "rdp"))
    with pytest.raises(ArgumentError, match="answered"):
        epsilon_data_dependent(votes, sigma, 1e-5, 50.0, noise)
    far = epsilon_data_dependent(votes, sigma, 1e-5, 400.0, noise, answered & False)
    assert far < asked / 10
