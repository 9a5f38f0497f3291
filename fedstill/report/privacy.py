"""What a run's privacy came to, node by node: what left, what it cost, how it was protected, and on what that
rests. Runs without any mechanism have one sentence.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.core.words import listed, percent
from fedstill.privacy.statement import NO_GUARANTEE, epsilon_text
from fedstill.report.files import Audited, Traffic
from fedstill.report.names import labels
from fedstill.report.result import Result
from fedstill.report.result_parts import NodePrivacy

MOST_EVENTS = 8  # prices shown of all that a node has paid
PARTS = {
    "training": "training of the model",
    "critic": "training of the critic",
    "pate": "votes",
    "gradients": "gradients",
    "outputs": "outputs",
}


@dataclass(frozen=True)
class Spent:
    """What one node's releases cost.

    Args:
        name: of the node.
        mechanism: that protected them.
        epsilon: at ``delta``, inf where it is beyond all bounds; None: no guarantee.
        delta: of that epsilon.
    """

    name: str
    mechanism: str
    epsilon: float | None
    delta: float | None

    @property
    def price(self) -> str:
        """In words: "epsilon 3.21 at delta 1e-05" or "no guarantee"."""
        if self.epsilon is None or self.delta is None:
            return NO_GUARANTEE
        return f"epsilon {epsilon_text(self.epsilon)} at delta {self.delta:g}"


def spent(result: Result) -> list[Spent]:
    """What each node's releases cost."""
    return [
        Spent(node.name, node.mechanism, _epsilon(node) if node.guarantee else None, node.delta)
        for node in _nodes(result)
    ]


def _epsilon(node: NodePrivacy) -> float:
    return math.inf if node.epsilon is None else node.epsilon


def guaranteed(result: Result) -> tuple[float, float] | None:
    """An epsilon and a delta that hold at every node of a run; None if there is a node without."""
    told = spent(result)
    if not told or any(node.price == NO_GUARANTEE for node in told):
        return None
    return max(node.epsilon or 0.0 for node in told), max(node.delta or 0.0 for node in told)


def in_words(result: Result) -> str | None:
    """A run's privacy in one line for the terminal; None where the result does not tell.

    >>> node = {"guarantee": True, "epsilon": 2.0001, "delta": 1e-05, "mechanism": "pate", "unit": "a record"}
    >>> in_words(Result.of({"privacy": {"nodes": [{**node, "name": "a"}, {"name": "b"}]}}))
    'epsilon 2.01 at delta 1e-05 at a (pate), for a record; no guarantee at b'
    """
    told = spent(result)
    bare = [node.name for node in told if node.price == NO_GUARANTEE]
    # By delta, mechanism and unit: an epsilon of one kind of guarantee says nothing of another.
    alike: dict[tuple[float | None, str, str], list[Spent]] = {}
    for node, row in zip(told, _nodes(result), strict=True):
        if node.price != NO_GUARANTEE:
            alike.setdefault((node.delta, node.mechanism, row.unit), []).append(node)
    if not alike:
        return result.privacy.text if result.privacy else None
    lines = []
    for (_, mechanism, unit), nodes in alike.items():
        worst = max(nodes, key=lambda node: node.epsilon or 0.0)
        where = "each node" if len(nodes) == len(told) else listed([node.name for node in nodes])
        most = f"at most {worst.price}" if len(nodes) > 1 else worst.price
        lines.append(f"{most} at {where} ({mechanism}){f', for {unit}' if unit else ''}")
    return "; ".join([*lines, *([f"{NO_GUARANTEE} at {listed(bare)}"] if bare else [])])


def sentence(result: Result) -> str:
    """What the head of a page says of it."""
    told = spent(result)
    bare = [node.name for node in told if node.price == NO_GUARANTEE]
    if told and not bare:
        return "What left each node has a formal guarantee of privacy: see below how strong it is."
    if len(bare) < len(told):
        return f"There is no formal guarantee of privacy for {listed(bare)}: see below what that means."
    return "There is no formal guarantee of privacy: see below what that means."


def counts_are_noisy(result: Result) -> bool:
    """Whether every node put noise on how many examples it told to hold."""
    nodes = _nodes(result)
    return bool(nodes) and all(any(map(_noisy, node.rules)) for node in nodes)


def section(result: Result, audit: Audited | None) -> dict[str, Any]:
    """Everything that the page's part on privacy names.

    Args:
        result: of the run.
        audit: sums of its audit log; None: it is not there.
    """
    told, nodes = spent(result), _nodes(result)
    rows = [
        _row(about, node, None if audit is None else audit.nodes.get(about.name, Traffic()))
        for about, node in zip(told, nodes, strict=True)
    ]
    names = labels(result)
    for row in rows:
        row["name"] = names.get(row["name"], row["name"])
    return {
        "sentence": sentence(result),
        "known": result.privacy is not None,
        "text": result.privacy.text if result.privacy else None,
        "pictures": of_pictures(result),
        "mechanisms": sorted(audit.mechanisms) if audit else [],
        # Without a mechanism at any node there is nothing to list.
        "rows": rows if any(about.mechanism != "none" for about in told) else [],
        "bare": [about.name for about in told if about.price == NO_GUARANTEE],
        "every": guaranteed(result) is not None,
        "protections": _protections(told, nodes, names),
        "differing": [row["name"] for row in rows if row["agrees"] is False],
    }


def of_pictures(result: Result) -> list[str]:
    """What label maps, and comparisons with real images, tell of nodes' images: a sentence each."""

    def crossed(kind: str, way: str) -> bool:
        return bool(getattr((result.bytes.by_kind or {}).get(kind), way, 0))

    told = []
    if crossed("label maps", "up"):
        seen = ""
        if crossed("label maps", "down"):
            own = "label maps" in result.returned
            seen = " Each went back to its own node only." if own else " They went on to all other nodes."
        told.append(f"Label maps are the outlines of what is in private images, one map an image.{seen}")
    if crossed("difference", "up"):
        slopes = (
            " Its gradients left as well, from which a server can work out the node's image itself."
            if crossed("gradients", "up")
            else ""
        )
        told.append(
            "Comparisons with real images were on: for the server's images "
            f"nodes told the difference from their own images of the same label maps.{slopes}"
        )
    return told


def odds(epsilon: float, delta: float) -> float:
    """How often, at most, the best of guesses is right whether a record was among the data, a coin being 0.5.

    ``(e^epsilon + delta) / (e^epsilon + 1)``, where both are equally likely beforehand: errors of the two
    kinds add up to ``2 (1 - delta) / (e^epsilon + 1)`` at least (Kairouz, Oh, Viswanath, "The Composition
    Theorem for Differential Privacy", ICML 2015, Theorem 2.1).

    >>> [round(odds(epsilon, 0.0), 4) for epsilon in (0.0, 1.0, 3.0)]
    [0.5, 0.7311, 0.9526]
    """
    return 1 - (1 - delta) / (math.exp(min(epsilon, 700.0)) + 1)


# --- one node -----------------------------------------------------------------------------------------


def _nodes(result: Result) -> tuple[NodePrivacy, ...]:
    return result.privacy.nodes if result.privacy else ()


def _row(about: Spent, node: NodePrivacy, traffic: Traffic | None) -> dict[str, Any]:
    """A line of the table; the log tells what left, and whether the price is what was written there."""
    left, budget, bare = node.left, node.budget, node.releases_without_guarantee
    paid = Counter({event: times for event, times in node.events.items() if times})
    agrees = None if traffic is None else traffic.price == paid and traffic.bare == bare
    return {
        "name": about.name,
        "kinds": None if traffic is None else [(kind, count) for kind, count in traffic.up.items() if count],
        "mechanism": about.mechanism,
        "epsilon": None if about.epsilon is None else epsilon_text(about.epsilon),
        "delta": None if about.delta is None else f"{about.delta:g}",
        "odds": _odds_text(about),
        "bare": bare,
        "budget": None if budget is None else f"{budget:g}",
        "left": None if left is None else _down(left),
        "agrees": agrees,
    }


def _odds_text(about: Spent) -> str | None:
    if about.epsilon is None or about.delta is None:
        return None
    share = 100 * odds(about.epsilon, about.delta)
    return percent(math.ceil(10 * share - 1e-9) / 10) if share <= 99.9 else "over 99.9%"


def _down(value: float) -> str:
    """What is left, never more than there is.

    >>> _down(0.0179), _down(1.0), _down(0.0)
    ('0.017', '1', '0')
    """
    return f"{math.floor(1000 * value + 1e-9) / 1000:g}"


# --- how they are protected ---------------------------------------------------------------------------


def _protections(
    told: Sequence[Spent], nodes: Sequence[NodePrivacy], names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What is said of nodes' protection, once for all of whom the same is said."""
    by_words: dict[str, dict[str, Any]] = {}
    for about, node in zip(told, nodes, strict=True):
        if about.mechanism == "none":
            continue
        levels = [f"{PARTS.get(name, name)} {level:.4g}" for name, level in node.noise.items() if level]
        facts = [
            ("Mechanism", ": ".join(filter(None, (about.mechanism, node.says)))),
            ("Unit", node.unit),
            ("Noise", ", ".join(levels)),
            ("Accountant", node.accountant),
            ("Randomness", node.randomness),
        ]
        shown = {
            "facts": [(name, value) for name, value in facts if value],
            "rules": [_short(line) for line in node.rules],
            "assumes": node.assumes,
        }
        kept = by_words.setdefault(json.dumps(shown), {**shown, "names": [], "paid": []})
        name = names.get(about.name, about.name)
        kept["names"].append(name)
        kept["paid"].append((name, _paid(Counter(node.events))))
    return list(by_words.values())


def _paid(events: Counter[str]) -> str:
    """Events with how often each, the most frequent first."""
    listed = [f"{times:,} \u00d7 {_short(event)}" for event, times in events.most_common(MOST_EVENTS)]
    more = len(events) - len(listed)
    return (", ".join(listed) or "nothing") + (f" and {more} other prices" if more > 0 else "")


def _short(text: str) -> str:
    """A line with its long numbers to four digits.

    >>> _short("gaussian(2.0, rate=0.10921501706484642)")
    'gaussian(2.0, rate=0.1092)'
    """
    return re.sub(r"\d+\.\d{5,}(e-?\d+)?", lambda found: f"{float(found[0]):.4g}", text)


def _noisy(line: str) -> bool:
    return "Laplace noise" in line and "each count" in line
