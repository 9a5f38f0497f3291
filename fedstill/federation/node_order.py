"""Natural sort order of node names."""

from __future__ import annotations

import re


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders ``node-2`` before ``node-10``.

    >>> sorted(["node-10", "node-2", "ward-3-b", "ward-3-a", "clinic"], key=natural_sort_key)
    ['clinic', 'node-2', 'node-10', 'ward-3-a', 'ward-3-b']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
