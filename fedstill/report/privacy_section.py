"""The privacy section of a run's report, node by node: what left, what it cost, how it was protected.

Runs without any mechanism have one sentence."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from fedstill.core.text_format import format_count, format_percent, join_names, shorten_numbers
from fedstill.privacy.budget import round_down
from fedstill.privacy.events import cost_from_dict
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound
from fedstill.report.result import Result
from fedstill.report.result_parts import NodePrivacy
from fedstill.report.run_files import AuditTotals, NodeTraffic
from fedstill.report.table_formats import Cell, Column, Row, Table
from fedstill.report.templates import size

MOST_EVENTS = 8  # prices shown of all that a node has paid
PARTS = {
    "training": "training of the model",
    "critic": "training of the critic",
    "pate": "votes",
    "gradients": "gradients",
    "outputs": "outputs",
}


def _bare(result: Result) -> list[str]:
    return [node.name for node in result.node_privacy if node.bound is None]


def run_guarantee(result: Result) -> tuple[float, float] | None:
    """An epsilon and a delta that hold at every node of a run; None if there is a node without."""
    return most([node.bound for node in result.node_privacy])


def most(bounds: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """The epsilon and delta within which all bounds are; None if there is none, or one has no guarantee."""
    kept = [bound for bound in bounds if bound is not None]
    if not kept or len(kept) < len(bounds):
        return None
    return max(epsilon for epsilon, _ in kept), max(delta for _, delta in kept)


def describe_privacy(result: Result) -> str | None:
    """A run's privacy in one line for the terminal; None where the result does not tell.

    >>> node = {"guarantee": True, "epsilon": 2.0001, "delta": 1e-05, "mechanism": "pate", "unit": "a record"}
    >>> describe_privacy(Result.from_record({"privacy": {"nodes": [{**node, "name": "a"}, {"name": "b"}]}}))
    'epsilon 2.01 at delta 1e-05 at a (pate), for a record; no guarantee at b'
    """
    told, bare = result.node_privacy, _bare(result)
    # By delta, mechanism and unit: an epsilon of one kind of guarantee says nothing of another.
    alike: dict[tuple[float | None, str, str], list[NodePrivacy]] = {}
    for node in told:
        if node.bound is not None:
            alike.setdefault((node.delta, node.mechanism, node.unit), []).append(node)
    if not alike:
        return result.privacy.text if result.privacy else None
    lines = []
    for (_, mechanism, unit), nodes in alike.items():
        worst = max(nodes, key=lambda node: node.bound or (0.0, 0.0))
        where = "each node" if len(nodes) == len(told) else join_names([node.name for node in nodes])
        most = f"at most {worst.price}" if len(nodes) > 1 else worst.price
        lines.append(f"{most} at {where} ({mechanism}){f', for {unit}' if unit else ''}")
    return "; ".join([*lines, *([f"{NO_GUARANTEE} at {join_names(bare)}"] if bare else [])])


def sentence(result: Result) -> str:
    """What the head of a page says of it."""
    bare = _bare(result)
    if result.node_privacy and not bare:
        return "What left each node has a formal guarantee of privacy: see below how strong it is."
    if len(bare) < len(result.node_privacy):
        return f"There is no formal guarantee of privacy for {join_names(bare)}: see below what that means."
    return "There is no formal guarantee of privacy: see below what that means."


def count_noise_text(result: Result) -> str:
    """Which nodes put noise on how many examples they told to hold: "with noise", where all did."""
    nodes = result.node_privacy
    noisy = [
        node.name
        for node in nodes
        if any("Laplace noise" in rule and "each count" in rule for rule in node.rules)
    ]
    return (
        "with noise" if len(noisy) == len(nodes) > 0 else f"{join_names(noisy)} with noise" if noisy else ""
    )


def nodes_revealing_sizes(result: Result) -> list[str]:
    """The nodes whose price has the rate at which records were drawn, and so how many there are."""
    return [
        node.name
        for node in result.node_privacy
        if any(event.rate < 1 for event in cost_from_dict(node.events))
    ]


def section(result: Result, audit: AuditTotals | None) -> dict[str, Any]:
    """Everything that the page's part on privacy names; ``audit`` is None where the log is not there."""
    nodes = result.node_privacy
    differing = [
        result.display_name(node.name)
        for node in nodes
        if audit is not None and not _agrees(node, audit.nodes.get(node.name, NodeTraffic()))
    ]
    return {
        "sentence": sentence(result),
        "known": result.privacy is not None,
        "text": result.privacy.text if result.privacy else None,
        "pictures": image_notes(result),
        "mechanisms": sorted(audit.mechanisms) if audit else [],
        # Without a mechanism at any node there is nothing to list.
        "table": _table(result, audit) if any(node.mechanism != "none" for node in nodes) else None,
        "bare": _bare(result),
        "protections": _protections(result),
        "differing": differing,
    }


def _agrees(node: NodePrivacy, traffic: NodeTraffic) -> bool:
    return traffic.price == +Counter(node.events) and traffic.bare == node.releases_without_guarantee


def image_notes(result: Result) -> list[str]:
    """What label maps, and comparisons with real images, tell of nodes' images: a sentence each."""

    sums = (result.bytes.by_kind or {}).items()
    up, down = ({kind for kind, each in sums if getattr(each, way)} for way in ("up", "down"))
    told = []
    if "label maps" in up:
        seen = ""
        if "label maps" in down:
            own = "label maps" in result.returned
            seen = " Each went back to its own node only." if own else " They went on to all other nodes."
        told.append(f"Label maps are the outlines of what is in private images, one map an image.{seen}")
    if "difference" in up:
        image = " Its gradients left as well, from which a server can work out the node's image itself."
        slopes = image if "gradients" in up else ""
        told.append(
            "Comparisons with real images were on: for the server's images "
            f"nodes told the difference from their own images of the same label maps.{slopes}"
        )
    return told


def max_guess_accuracy(epsilon: float, delta: float) -> float:
    """How often, at most, the best of guesses is right whether a record was among the data, a coin being 0.5.

    ``(e^epsilon + delta) / (e^epsilon + 1)``, where both are equally likely beforehand: errors of the two
    kinds add up to ``2 (1 - delta) / (e^epsilon + 1)`` at least (Kairouz, Oh, Viswanath, "The Composition
    Theorem for Differential Privacy", ICML 2015, Theorem 2.1).

    >>> [round(max_guess_accuracy(epsilon, 0.0), 4) for epsilon in (0.0, 1.0, 3.0)]
    [0.5, 0.7311, 0.9526]
    """
    return 1 - (1 - delta) / (math.exp(min(epsilon, 700.0)) + 1)


# --- node by node -------------------------------------------------------------------------------------


def _table(result: Result, audit: AuditTotals | None) -> Table:
    rows = []
    for node in result.node_privacy:
        left = None if audit is None else _kinds(audit.nodes.get(node.name, NodeTraffic()).up)
        bound, bare = node.bound, node.releases_without_guarantee
        without = f"{format_count(bare, 'release')} without" if bare else ""
        strong = Markup("<strong>{}</strong>").format(NO_GUARANTEE)
        price = [Cell(strong, without, style="none-kept", span=3)]
        if bound is not None:
            epsilon, delta = format_epsilon_bound(bound[0]), f"{bound[1]:g}"
            price = [Cell(epsilon, style="sum"), Cell(delta), Cell(_odds_text(*bound))]
        budget = Cell("none set" if node.budget is None else f"{node.budget:g}")
        rest = Cell("", style="empty-cell") if node.left is None else Cell(round_down(node.left))
        rows.append(
            Row(result.display_name(node.name), [Cell(left), Cell(node.mechanism), *price, budget, rest])
        )
    metrics = ("Epsilon", "Delta", "Guessed right, at most", "Budget of the run", "Left of it")
    columns = [Column("What left", "kinds"), Column("Mechanism", ""), *map(Column, metrics)]
    about = "What left each node, what that cost in privacy, and what is left of its budget"
    return Table(about, "Node", columns, rows, style="price")


def _kinds(up: Counter[str]) -> Markup:
    piece = Markup('<span class="piece">{} {}</span>')
    told = [piece.format(kind, size(count)) for kind, count in up.items() if count]
    return Markup(", ").join(told) or Markup("nothing")


def _odds_text(epsilon: float, delta: float) -> str:
    share = 100 * max_guess_accuracy(epsilon, delta)
    return format_percent(math.ceil(10 * share - 1e-9) / 10) if share <= 99.9 else "over 99.9%"


# --- how they are protected ---------------------------------------------------------------------------


def _protections(result: Result) -> list[dict[str, Any]]:
    by_words: dict[str, dict[str, Any]] = {}
    for node in result.node_privacy:
        if node.mechanism == "none":
            continue
        levels = [f"{PARTS.get(name, name)} {level:.4g}" for name, level in node.noise.items() if level]
        facts = {
            "Mechanism": ": ".join(filter(None, (node.mechanism, node.says))),
            "Unit": node.unit,
            "Noise": ", ".join(levels),
            "Accountant": node.accountant,
            "Randomness": node.randomness,
        }
        shown = {
            "facts": {name: value for name, value in facts.items() if value},
            "rules": [shorten_numbers(line) for line in node.rules],
            "assumes": node.assumes,
        }
        kept = by_words.setdefault(json.dumps(shown), {**shown, "paid": {}})
        kept["paid"][result.display_name(node.name)] = _paid(Counter(node.events))
    return list(by_words.values())


def _paid(events: Counter[str]) -> str:
    listed = [
        f"{times:,} \u00d7 {shorten_numbers(event)}" for event, times in events.most_common(MOST_EVENTS)
    ]
    more = len(events) - len(listed)
    return (", ".join(listed) or "nothing") + (f" and {more} other prices" if more > 0 else "")
