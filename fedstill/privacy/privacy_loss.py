"""Privacy loss distributions of events and of what they compose to, by dp-accounting.

Pessimistic ("connect the dots", Doroshenko et al., PoPETs 2022): whatever the grid, the figure is an upper
bound; a finer grid makes it tighter, a coarser one faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fedstill.core import deadline
from fedstill.privacy import renyi
from fedstill.privacy.events import Event

FINENESS = 24  # grid points per typical loss of one event: within 0.1 % of the limit in all that was tried
STAGE = 8192  # self-compositions in one transform
MOST_POINTS = 2**20  # of the grid of one event
LONGEST = 2**18  # grid points per epsilon: what the fast Fourier transforms of a composition may take


def interval(spent: Mapping[Event, int], epsilon: float) -> float:
    """How far apart the points of a grid lie, in units of epsilon: a power of 2, so that it changes rarely.

    The typical loss of one event is the root of its divergence of order 2, and events count by what they
    add to the total.

    Args:
        spent: not empty.
        epsilon: an upper bound on what it costs.
    """
    (second,) = np.flatnonzero(renyi.ORDERS == 2)
    typical = {event: math.sqrt(renyi.curve(event)[second]) for event in spent}
    squares = sum(times * typical[event] ** 2 for event, times in spent.items())
    plain = sum(times * typical[event] for event, times in spent.items())
    wished = squares / plain / FINENESS if plain > 0 else 0.0
    # Of little noise one event alone could have more points than fit into memory.
    least = max(epsilon / LONGEST, max(map(_range, spent)) / MOST_POINTS, 1e-12)
    return float(2.0 ** math.floor(math.log2(max(wished, least))))


def _range(event: Event) -> float:
    """About how far apart the losses of an event lie that count: of Gaussian noise, 12 standard deviations
    to either side."""
    if event.kind != "gaussian":
        return 2 / event.noise
    return (event.group**2 / event.noise + 24 * event.group) / event.noise


def epsilon(spent: Mapping[Event, int], delta: float, step: float) -> float:
    """What the events, one or more, compose to at delta, on a grid of that step."""
    total: Any = None
    for event, times in spent.items():
        deadline.check()
        losses = _repeated(_one(event, step), times)
        total = losses if total is None else total.compose(losses)
    return float(total.get_epsilon_for_delta(delta))


def _repeated(losses: Any, times: int) -> Any:
    """Composed with itself, in stages: each cuts off tails that the next would otherwise carry along."""
    deadline.check()
    if times <= STAGE:
        return losses if times == 1 else losses.self_compose(times)
    stages, rest = divmod(times, STAGE)
    whole = _repeated(losses.self_compose(STAGE), stages)
    return whole.compose(_repeated(losses, rest)) if rest else whole


@lru_cache(maxsize=64)
def _one(event: Event, step: float) -> Any:
    """The losses of one event, for adding and for removing a record (or a group)."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    grid: dict[str, float] = {"value_discretization_interval": step}
    if event.kind == "laplace":
        return pld.from_laplace_mechanism(event.noise, **grid)
    if event.kind == "pure":
        from dp_accounting.pld import common

        return pld.from_privacy_parameters(common.DifferentialPrivacyParameters(1 / event.noise, 0.0), **grid)
    if event.group == 1:
        return pld.from_gaussian_mechanism(event.noise, sampling_prob=event.rate, **grid)
    from scipy.stats import binom

    drawn = np.arange(event.group + 1)  # records of the group: see renyi._mixture
    chances = binom.pmf(drawn, event.group, event.rate)
    likely = chances > 0
    return pld.from_mixture_gaussian_mechanism(
        event.noise, drawn[likely].astype(float).tolist(), chances[likely].tolist(), **grid
    )
