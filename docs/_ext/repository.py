"""Resolve links to folders and to pages outside ``docs``, which work on a Git host but not on a site.

A link to a folder with an ``index.md`` becomes a link to that page, and the README becomes the first page.
For other folders and the pages in them, only the link's text remains. myst-parser turns links to single files
into downloads. Links in the text of scripts name pages as seen from the notebooks in the repository.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

LINK = re.compile(r"\[([^][]+)\]\(([^()#:\s]+)(#[^()\s]*)?\)")
LINK_OF_SCRIPT = re.compile(r"`([^`<]+)<\.\./\.\./docs/([\w/-]+)\.md>`_")


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Rewrite the links of each page before it is parsed."""
    if Path(app.env.doc2path(page)).suffix == ".rst":  # written from a script
        source[0] = LINK_OF_SCRIPT.sub(r":doc:`\1</\2>`", source[0])
        return
    source[0] = LINK.sub(partial(linked, Path(app.srcdir), (Path(app.srcdir) / page).parent), source[0])


def linked(pages: Path, here: Path, link: re.Match[str]) -> str:
    """Return a link as the site needs it."""
    text, path, place = link.groups()
    target = (here / path).resolve()
    if target == pages.parent / "README.md":
        return f"[{text}](/index.md)"
    if target.suffix == ".md" and not target.is_relative_to(pages):  # a page outside docs
        return text
    if not target.is_dir():
        return link[0]
    return f"[{text}]({path}/index.md{place or ''})" if (target / "index.md").exists() else text


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", read)
    app.add_lexer("csv", TextLexer)  # unknown to Pygments
    return {"parallel_read_safe": True}
