"""Write ``llms.txt``, which lists the pages for language models: title, source and first sentences.

The format is that of https://llmstxt.org: a heading, a quoted summary, and lists of links under headings.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ABOUT = "Federated distillation for PyTorch: one global model from private data that stays with its owners."
LONGEST = 300  # characters per page


def line(env: BuildEnvironment, page: str) -> str:
    """Return the entry of one page: its title, the address of its source, and its first paragraph."""
    paragraph = next((each for each in env.get_doctree(page).findall(nodes.paragraph)), None)
    text = " ".join(paragraph.astext().split()) if paragraph else ""
    text = text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " ..."
    source = f"_sources/{Path(env.doc2path(page, base=False))}.txt"
    return f"- [{env.titles[page].astext()}]({source}): {text}".rstrip(": ")


def below(env: BuildEnvironment, page: str) -> list[str]:
    """Return a page and all pages below it in its toctrees, in their order."""
    return [page, *(deep for each in env.toctree_includes.get(page, ()) for deep in below(env, each))]


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the file after the build."""
    if error is not None or app.builder.format != "html":
        return
    env = app.env
    parts = ["# fedstill", f"> {ABOUT}"]
    for section in env.toctree_includes[env.config.root_doc]:
        lines = [line(env, page) for page in below(env, section)]
        parts += [f"## {env.titles[section].astext()}", "\n".join(lines)]
    (Path(app.outdir) / "llms.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
