"""Links to folders and to pages outside ``docs``, which a Git host resolves and a site does not.

A folder that has an ``index.md`` is that page here, the README the first page; of any other folder, and of
pages in it, only the link's text is left. Links to single files become downloads, by myst-parser.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

LINK = re.compile(r"\[([^][]+)\]\(([^()#:\s]+)(#[^()\s]*)?\)")


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Each page, before it is parsed."""
    source[0] = LINK.sub(partial(linked, Path(app.srcdir), (Path(app.srcdir) / page).parent), source[0])


def linked(pages: Path, here: Path, link: re.Match[str]) -> str:
    """A link as the site has it."""
    text, path, place = link.groups()
    target = (here / path).resolve()
    if target == pages.parent / "README.md":
        return f"[{text}](/index.md)"
    if target.suffix == ".md" and not target.is_relative_to(pages):  # a page of another folder's
        return text
    if not target.is_dir():
        return link[0]
    return f"[{text}]({path}/index.md{place or ''})" if (target / "index.md").exists() else text


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", read)
    app.add_lexer("csv", TextLexer)  # which Pygments does not know
    return {"parallel_read_safe": True}
