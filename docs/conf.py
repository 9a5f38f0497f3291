"""Sphinx configuration of the site, which ``make docs`` builds."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]  # this fedstill, and the site's own directives
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the gallery's results are those of one thread
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = str(HERE.parent)  # for scripts that call the command

from fedstill.core.version import __version__  # noqa: E402

project = "fedstill"
author = "the authors of fedstill"
copyright = "the authors of fedstill, Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "repository",
    "llms",
    "links",
]
exclude_patterns = ["_build", "_ext"]

# Pages stay Markdown that any Git host shows: links by file name, anchors as hosts make them from headings.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# Tutorials and gallery: scripts that use public names only.
sphinx_gallery_conf = {
    "examples_dirs": ["../examples/tutorials", "../examples/gallery"],
    "gallery_dirs": ["notebooks", "gallery"],
    "first_notebook_cell": '%pip install --quiet "fedstill[dp,offline,onnx]"',
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "plot_gallery": "True",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "min_reported_time": 0,
    "thumbnail_size": (640, 360),  # pixels; a card is half as wide
}

html_theme = "pydata_sphinx_theme"
html_title = "fedstill"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("sort.js", {"defer": "defer"})]
html_show_sourcelink = False
html_favicon = "_static/logo.svg"
html_theme_options = {
    "logo": {
        "text": f"fedstill {version}",
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
    },
    "navbar_align": "left",
    "navbar_center": ["navbar-nav"],
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def keep_together(app: Sphinx, page: str, source: list[str]) -> None:
    """Put non-breaking spaces between a mean and its deviation, and in tables between number and unit."""
    text = re.sub(r"(?<=\d) ± (?=\d)", "\u00a0±\u00a0", source[0])
    unit = re.compile(r"(?<=\d) (?=[kMG]?B\b)")
    source[0] = re.sub(r"^\|.*$", lambda row: unit.sub("\u00a0", row[0]), text, flags=re.MULTILINE)


def setup(app: Sphinx) -> None:
    app.connect("source-read", keep_together)
