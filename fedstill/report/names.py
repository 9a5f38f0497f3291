"""How a report writes nodes' names: with the site beside it where a node is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.core.words import pick, words


def node_records(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a result says of each node."""
    nodes = pick(result, "nodes")
    return [node for node in nodes if isinstance(node, Mapping)] if isinstance(nodes, list) else []


def node_name(place: int, node: Mapping[str, Any]) -> str:
    """A node's own name, as messages and the ledger have it."""
    return words(node, "name") or f"node {place + 1}"


def labels(result: Mapping[str, Any]) -> dict[str, str]:
    r"""By name, how a node is written: with its site, if the run knows that all its examples are from one.

    >>> labels({"nodes": [{"name": "node-0", "site": "Utrecht"}, {"name": "node-1"}]})
    {'node-0': 'node-0 \xb7\xa0Utrecht', 'node-1': 'node-1'}
    """
    found = {}
    for place, node in enumerate(node_records(result)):
        name, site = node_name(place, node), words(node, "site")
        found[name] = name if site is None else f"{name} \u00b7\u00a0{site}"
    return found


def written(result: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Names of nodes or of other models, each as a report writes it."""
    known = labels(result)
    return [known.get(name, name) for name in names]
