"""The table of docs/choosing.md matches the methods; ``python -m tests.test_choosing`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedstill.core.compute import Compute
from fedstill.core.text_format import format_count
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS
from fedstill.protocol.node_side import NodeSetting, placeholder_public
from fedstill.tasks.classification import Classification

PAGE = Path(__file__).parents[1] / "docs" / "choosing.md"
MAIN_MODELS = {
    "student": "student",
    "virtual": "none: nodes'",
    "ensemble": "all nodes",
    "nodes": "none: nodes'",
}


def rows() -> list[str]:
    """Return a table line for each built-in method, with its default options."""
    task = Classification(10)
    at = NodeSetting(task, LocalConfig(), Compute(), placeholder_public(task))
    lines = []
    for name in METHODS.builtin:
        method = METHODS[name]()
        needs, side = method.needs(), method.node_side(at)
        if needs.label_maps or needs.table_rows or needs.vectors:
            continue  # methods for other inputs
        public = "with labels" if needs.public_labels else "yes" if needs.public else ""
        has_gradients = any(query.differentiable for query in side.queries.values())
        cells = (
            f"`{name}`",
            public,
            "one" if needs.same_architecture else "any",
            "more"
            if not all(kind.is_output for kind in side.released_kinds())
            else "outputs"
            if side.released_kinds()
            else "nothing",
            "yes" if has_gradients else "",
            "once"
            if method.one_round
            else format_count(method.total_steps, method.unit)
            if side.released_kinds()
            else "",
            MAIN_MODELS[method.evaluated_model],
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def test_page_matches_declared_methods() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert lines == rows()


def claims() -> Iterator[tuple[str, str, str]]:
    """Yield each metric of the page, with the page and section of the next link."""
    text = PAGE.read_text(encoding="utf-8").partition("## What each declares")[0]
    for metric in re.finditer(r"\d+\.\d+", text):
        link = re.search(r"\]\(([\w/-]+\.md)#?([\w-]*)\)", text[metric.end() :])
        assert link, metric[0]
        yield metric[0], link[1], link[2]


@pytest.mark.parametrize(("metric", "page", "anchor"), list(claims()))
def test_linked_section_has_the_metric(metric: str, page: str, anchor: str) -> None:
    linked = (PAGE.parent / page).read_text(encoding="utf-8")
    sections = re.split(r"^(?=## )", linked, flags=re.MULTILINE)
    lines = [part for part in sections if not anchor or slug(part.partition("\n")[0]) == anchor]
    assert re.search(rf"(?<![\d.]){re.escape(metric)}(?!\.?\d)", "".join(lines))


def slug(head: str) -> str:
    """Return the anchor of a Markdown heading."""
    return re.sub(r"[^\w -]", "", head.lstrip("# ")).lower().replace(" ", "-")


if __name__ == "__main__":
    print("\n".join(rows()))
