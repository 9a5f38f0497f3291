"""Page of a current state that refreshes itself: sections with tables, small plots and lists of facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from markupsafe import Markup

from fedstill.report.table_formats import Fact, Table
from fedstill.report.templates import template_environment

REFRESH_SECONDS = 5  # of a served page; a page in a file reloads every 30 seconds


@dataclass(frozen=True)
class Panel:
    """Small plot with its name and its latest value; the plot is None if there is only one value."""

    name: str
    last: str
    plot: Markup | None


@dataclass(frozen=True)
class Section:
    """One section of a page; empty parts are not shown.

    Args:
        title: its heading.
        about: introduction.
        error: message in a box before the content.
        table: rows.
        panels: small plots.
        facts: groups of facts: heading, facts, and a command to copy.
        empty: text if the section has neither table, panels nor facts.
    """

    title: str
    about: str = ""
    error: str | None = None
    table: Table | None = None
    panels: Sequence[Panel] = ()
    facts: Sequence[tuple[str, Sequence[Fact], str]] = ()
    empty: str = ""


def render_live_page(
    title: str,
    eyebrow: str,
    lead: str,
    tiles: Sequence[Fact],
    sections: Sequence[Section],
    nonce: str,
    back: bool = False,
) -> str:
    """Return the HTML of a page.

    Args:
        title: its heading.
        eyebrow: line above the heading.
        lead: sentence below the heading.
        tiles: key facts at the top.
        sections: sections below.
        nonce: nonce of the refresh script of a served page; empty for a file, which the browser reloads.
        back: whether to link to the first page.
    """
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    content = {"title": title, "eyebrow": eyebrow, "lead": lead, "tiles": tiles, "sections": sections}
    return (
        template_environment()
        .get_template("live.html.j2")
        .render(content, nonce=nonce, back=back, now=now, refresh_seconds=REFRESH_SECONDS)
    )


def render_error_page(text: str, nonce: str) -> str:
    """Return a page with an error message."""
    return render_live_page("This page cannot be shown", "fedstill", text, [], [], nonce)
