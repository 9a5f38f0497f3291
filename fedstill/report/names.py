"""How a report writes nodes' names: with the site beside it where a node is one."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.report.result import Result


def labels(result: Result) -> dict[str, str]:
    r"""By name, how a node is written: with its site, if the run knows that all its examples are from one.

    >>> labels(Result.of({"nodes": [{"name": "node-0", "site": "Utrecht"}, {"name": "node-1"}]}))
    {'node-0': 'node-0 \xb7\xa0Utrecht', 'node-1': 'node-1'}
    """
    return {
        node.name: f"{node.name} \u00b7\u00a0{node.site}" if node.site else node.name for node in result.each
    }


def written(result: Result, names: Sequence[str]) -> list[str]:
    """Names of nodes or of other models, each as a report writes it."""
    known = labels(result)
    return [known.get(name, name) for name in names]
