"""Write the generated pages on the papers' tables and figures into docs.

    python tools/reproduction_pages.py

docs/reproduction.md has the summary between two markers; docs/reproduction/ has a page for each.
"""

from __future__ import annotations

from pathlib import Path

from fedstill.compare.reproduction import reproductions
from fedstill.report.reproduction_pages import page, with_summary

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Write all pages, and delete those of files that are gone."""
    entries, folder = reproductions(), DOCS / "reproduction"
    folder.mkdir(exist_ok=True)
    for old in set(folder.glob("*.md")) - {folder / f"{entry.name}.md" for entry in entries}:
        old.unlink()
    for entry in entries:
        (folder / f"{entry.name}.md").write_text(page(entry), encoding="utf-8")
    summary = DOCS / "reproduction.md"
    summary.write_text(with_summary(summary.read_text(encoding="utf-8"), entries), encoding="utf-8")


if __name__ == "__main__":
    main()
