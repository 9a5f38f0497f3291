"""What events cost together, as epsilon at a delta: by dp-accounting, with bounds for what it cannot take.

Two accountants. "pld" composes privacy loss distributions and is tight; its theorem is for events that were
chosen beforehand. "rdp" adds up Rényi curves and is looser; it holds too where events are chosen by earlier
answers. Both figures are upper bounds, for neighbours by adding or removing one record (or group).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fedstill.core import deadline
from fedstill.core.errors import ArgumentError
from fedstill.privacy import privacy_loss, renyi
from fedstill.privacy.config import Accountant
from fedstill.privacy.events import Event, Price

LARGEST = 500.0  # epsilon up to which losses are composed; e to the power of more is near what floats hold
MOST_TIMES = 10_000_000  # events whose losses are composed
LEAST_DELTA = 1e-12  # above it rounding in the transforms does not matter
LEAST_NOISE = 1e-100  # below it epsilon is said to be inf: squares leave what floats hold
CLOSED_FORM = 1e9  # epsilon up to which its root is found
MOST_KINDS = 32  # of different events that are composed one by one
NOISE_FACTORS = (1e-3, 1e6)
PRECISION, ENOUGH = 1e-3, 5  # of a noise factor: the grid it is sought on, and points that it may be too high


def epsilon(spent: Mapping[Event, int], delta: float, accountant: Accountant = "pld") -> float:
    """The least epsilon at delta that is known to hold for all events together; 0 for none.

    "pld": Gaussian noise on all records has a closed form (Balle and Wang, "Improving the Gaussian Mechanism
    for Differential Privacy", ICML 2018, Theorem 8), everything else is composed numerically. Where the
    Rényi bound is above 500, there are over 10 million events or delta is below 1e-12, that bound is the
    answer (some percent more, where it is above 500).

    "rdp": groups in a sample are integrated numerically, see :func:`fedstill.privacy.renyi.curve`.

    More than 32 different events, but for Gaussian noise on all records: noise is rounded down and rates up,
    by as little as makes them 32, so that the figure stays a bound and comes fast.

    Args:
        spent: events and how often each.
        delta: at 0 the sum of the pure epsilons, inf with any Gaussian event.
        accountant: which.

    Raises:
        ArgumentError: delta outside its range.

    >>> from fedstill.privacy.events import Event
    >>> round(epsilon({Event("gaussian", 1.0, rate=0.01): 1000}, 1e-5), 2)
    1.83
    >>> round(epsilon({Event("laplace", 50.0): 5000}, 1e-5, "rdp"), 2)
    7.05
    """
    if not 0 <= delta < 1:
        raise ArgumentError("delta", delta, "0 or more and below 1")
    if any(event.noise < LEAST_NOISE for event in spent):
        return math.inf
    if delta == 0:
        return _pure(spent)
    events = _merged(spent)
    if not events:
        return 0.0
    bound = _bound(events, delta)
    if accountant == "rdp":
        return bound
    if len(events) == 1 and bound <= CLOSED_FORM:
        (event,) = events
        if event.kind == "gaussian" and event.rate == 1:
            import dp_accounting

            return min(bound, float(dp_accounting.get_epsilon_gaussian(event.noise, delta)))
    if bound > LARGEST or delta < LEAST_DELTA or sum(events.values()) > MOST_TIMES:
        return bound
    deadline.check()  # composing takes seconds where a server declares a million steps
    return min(bound, privacy_loss.epsilon(events, delta, privacy_loss.interval(events, bound)))


def within(spent: Mapping[Event, int], limit: float, delta: float, accountant: Accountant = "pld") -> bool:
    """Whether ``epsilon(spent, delta, accountant) <= limit``, without composing where a cheap bound says
    so."""
    if epsilon(spent, delta, "rdp") <= limit:
        return True
    return accountant == "pld" and epsilon(spent, delta) <= limit


def most(
    spent: Mapping[Event, int],
    price: Mapping[Event, int],
    limit: float,
    delta: float,
    accountant: Accountant = "pld",
    up_to: int = 1_000_000,
) -> int:
    """How many times more a price can be paid until all would cost more than ``limit`` at delta: 0 .. up_to.

    >>> most({}, {Event("laplace", 10.0): 1}, limit=1.0, delta=1e-9, up_to=100)
    10
    """
    return longest(lambda times: _added(spent, price, times), limit, delta, accountant, up_to)


def longest(
    schedule: Callable[[int], Mapping[Event, int]],
    limit: float,
    delta: float,
    accountant: Accountant = "pld",
    up_to: int = 1_000_000,
) -> int:
    """The most steps, 0 .. up_to, of a schedule within ``limit`` at delta: all events of so many; more
    cost no less.

    >>> longest(lambda k: {Event("laplace", 5.0): k, Event("laplace", 2.0): 1}, limit=1.0, delta=0.0)
    2
    """
    return max(0, _last(schedule, limit, delta, accountant, up_to))


def calibrate(
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

    >>> s = calibrate(lambda s: {Event("gaussian", s, rate=0.01): 1000}, 1.83, 1e-5)
    >>> round(s, 2)
    1.0
    """
    if not 0 < limit < math.inf:
        raise ArgumentError("epsilon", limit, "above 0 and finite")
    least, greatest = NOISE_FACTORS
    ratio = 1 + PRECISION
    steps = math.ceil(math.log(greatest / least) / math.log(ratio))

    def less_noise(k: int) -> Mapping[Event, int]:
        return schedule(greatest / ratio**k)

    found = _last(less_noise, limit, delta, accountant, steps, ENOUGH)
    if found < 0:
        raise ArgumentError("epsilon", limit, f"more: noise times {greatest:,.0f} is not enough for it")
    return float(greatest / ratio**found)


# --- how ------------------------------------------------------------------------------------------


def _pure(spent: Mapping[Event, int]) -> float:
    """Epsilon at delta 0: that of Laplace noise and of pure events adds up, and no less holds."""
    return sum(
        math.inf if event.kind == "gaussian" else times / event.noise for event, times in spent.items()
    )


def _bound(events: Mapping[Event, int], delta: float) -> float:
    return min(_pure(events), renyi.to_epsilon(renyi.compose(events), delta))


def _added(spent: Mapping[Event, int], price: Mapping[Event, int], times: int = 1) -> Price:
    total = Price(spent)
    for event, each in price.items():
        total[event] += times * each
    return total


def _merged(spent: Mapping[Event, int]) -> Price:
    """The same cost, or a little more, in few events.

    Gaussian noise on all records composes exactly to one such event: precisions add up.
    """
    events = Price({event: times for event, times in spent.items() if times > 0})
    everybody = [event for event in events if event.kind == "gaussian" and event.rate == 1]
    precision = math.fsum(events.pop(event) / event.noise**2 for event in everybody)
    exact, step = events, 2.0**-9
    while len(events) > MOST_KINDS and step <= 1:
        events = Price()
        for event, times in exact.items():
            events[_dearer(event, step)] += times
        step *= 2  # each next grid is a part of the one before, so that more events never cost less
    if precision > 0:
        events[Event("gaussian", 1 / math.sqrt(precision))] += 1
    return events


def _dearer(event: Event, step: float) -> Event:
    """An event with no more noise and no lower rate, from a grid of that logarithmic step."""
    noise = math.exp(math.floor(math.log(event.noise) / step) * step)
    if event.rate == 1:
        return Event(event.kind, noise)
    rate = min(math.exp(math.ceil(math.log(event.rate) / step) * step), 1 - 1e-12)
    return Event(event.kind, noise, rate, event.group)


def _last(
    after: Callable[[int], Mapping[Event, int]],
    limit: float,
    delta: float,
    accountant: Accountant,
    high: int,
    slack: int = 1,
) -> int:
    """The last k of 0 .. high whose events cost at most ``limit``, -1 for none; the cost rises with k. It
    may be ``slack`` too low.

    First by the Rényi bound, which is cheap. What that allows is allowed. Then losses are composed there,
    which shows how much tighter they are, and so about where they reach the limit; from that guess on in
    growing strides.
    """

    def bound(k: int) -> float:
        return epsilon(after(k), delta, "rdp")

    def cost(k: int) -> float:
        return epsilon(after(k), delta)

    cheap = _between(bound, limit, (-1, math.nan), (high + 1, math.nan))
    if accountant == "rdp" or cheap == high:
        return cheap
    low, above = (cheap, math.nan), (high + 1, math.nan)
    guess = cheap
    if cheap >= 0:
        low = cheap, cost(cheap)
        if low[1] > 0:
            guess = _between(bound, limit * limit / low[1], (cheap, math.nan), above)
    step = max(slack, (guess - cheap) // 16)
    at = max(guess, cheap + step)
    while low[0] < high and above[0] > high:
        here = min(at, high), cost(min(at, high))
        if here[1] <= limit:
            low, at = here, here[0] + step
            step *= 2
        else:
            above = here
    return _between(cost, limit, low, above, slack) if low[0] < high else high


def _between(
    cost: Callable[[int], float],
    limit: float,
    low: tuple[int, float],
    high: tuple[int, float],
    slack: int = 1,
) -> int:
    """A k with ``cost(k) <= limit`` where k + slack has it no more, given one such (or -1) and one above
    it, each with its cost, NaN where it is not known."""
    halve = False
    while (width := high[0] - low[0]) > slack:
        at = low[0] + width // 2
        if not halve and low[1] < high[1] < math.inf:  # both known
            guess = low[0] + round((limit - low[1]) / (high[1] - low[1]) * width)
            at = min(max(guess, low[0] + 1), high[0] - 1)
        here = at, cost(at)
        if here[1] <= limit:
            low = here
        else:
            high = here
        halve = high[0] - low[0] > width // 2  # interpolation that did not pay is not tried at once again
    return low[0]
