"""A page that shows what is now, and renews itself: sections of tables, of small plots, of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from markupsafe import Markup

from fedstill.report.table_formats import Fact, Table
from fedstill.report.templates import environment

EVERY = 5  # seconds between two looks of a served page; a file's browser opens it anew each 30


@dataclass(frozen=True)
class Panel:
    """A small plot under its name, with its last value; None: there is but one."""

    name: str
    last: str
    plot: Markup | None


@dataclass(frozen=True)
class Section:
    """One part of a page; what is empty is left out.

    Args:
        about: what it shows.
        trouble: what is wrong, before all else.
        table: rows.
        panels: small plots.
        facts: by groups, each under a heading and with a command to copy.
        empty: what is said where there is nothing to show.
    """

    title: str
    about: str = ""
    trouble: str | None = None
    table: Table | None = None
    panels: Sequence[Panel] = ()
    facts: Sequence[tuple[str, Sequence[Fact], str]] = ()
    empty: str = ""


def html(
    title: str,
    eyebrow: str,
    lede: str,
    tiles: Sequence[Fact],
    sections: Sequence[Section],
    served: str,
    back: bool = False,
) -> str:
    """The page.

    Args:
        title, eyebrow, lede: its heading, what stands above and below it.
        tiles: on top.
        sections: below.
        served: the nonce of its script; empty: it is a file, and its browser opens it anew by itself.
        back: link to the first page.
    """
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    told = {"title": title, "eyebrow": eyebrow, "lede": lede, "tiles": tiles, "sections": sections}
    return (
        environment()
        .get_template("live.html.j2")
        .render(told, served=served, back=back, now=now, every=EVERY)
    )


def trouble(text: str, served: str) -> str:
    """A page that says what is wrong."""
    return html("This cannot be shown", "fedstill", text, [], [], served)
