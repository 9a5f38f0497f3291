"""Check that every internal link of the site has an existing target; others become warnings.

External links are not checked.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.places = set[str](), {"", "#"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by ``feed``."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif name in ("href", "src") and value is not None:
                self.links.add(value)


def check(app: Sphinx, error: Exception | None) -> None:
    """Check all links after the build."""
    if error is not None or app.builder.format != "html":
        return
    root = Path(app.outdir)
    names = [*app.env.found_docs, "genindex", "search"]
    pages = {path: Page(path) for path in sorted(root / app.builder.get_target_uri(name) for name in names)}
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (
                target in pages and unquote(parts.fragment) not in pages[target].places
            ):
                logger.warning("%s: nothing is at %s", path.relative_to(root), link, type="links")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", check, priority=900)  # after all other writers
    return {"parallel_read_safe": True}
