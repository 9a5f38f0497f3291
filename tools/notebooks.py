"""Write the tutorials' notebooks next to their scripts, as the site's downloads are written.

Usage: ``python tools/notebooks.py [--check]``, with the extra ``docs`` installed. With ``--check`` nothing is
written, and the exit status is 1 if a notebook is missing, differs from its script, or has no script.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from sphinx_gallery.gen_gallery import DEFAULT_GALLERY_CONF
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "examples" / "tutorials"


def notebook(script: Path, options: dict[str, Any]) -> str:
    """Return the notebook of a script, as JSON that is the same on every Python."""
    _, blocks = split_code_and_text_blocks(script)
    content = jupyter_notebook(blocks, DEFAULT_GALLERY_CONF | options, script.parent)
    del content["metadata"]["language_info"]["version"]
    return json.dumps(content, indent=1) + "\n"


def main() -> int:
    """Write or check all notebooks, and return the exit status."""
    options = runpy.run_path(str(ROOT / "docs" / "conf.py"))["sphinx_gallery_conf"]
    wanted = {path.with_suffix(".ipynb"): notebook(path, options) for path in TUTORIALS.glob("*.py")}
    present = {path: path.read_text(encoding="utf-8") for path in TUTORIALS.glob("*.ipynb")}
    stale = sorted(path for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))
    if sys.argv[1:] == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} differs from its script: run python tools/notebooks.py")
        return 1 if stale else 0
    for path in stale:
        if path in wanted:
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
