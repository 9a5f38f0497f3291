"""Golden files: whole texts as users see them, stored in ``tests/golden`` and compared line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "golden"


class Golden:
    """Compare a text with ``tests/golden/NAME.txt``, or write this file.

    Golden files only check wording. Tests assert numbers, names and exit codes themselves, since
    ``--update-golden`` accepts any text.
    """

    def __init__(self, update: bool) -> None:
        self._update = update

    def __call__(self, name: str, text: str) -> None:
        path = FOLDER / f"{name}.txt"
        lines = [line.rstrip() for line in text.strip().splitlines()]
        if self._update:
            FOLDER.mkdir(exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if not path.exists():
            pytest.fail(f"{path.name} is missing: pytest --update-golden writes it")
        expected = path.read_text(encoding="utf-8").splitlines()
        assert lines == expected, f"{path.name} differs; if this is meant, run pytest --update-golden"
