"""Golden files: compared line by line, written on request, and all used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import golden
from tests.support.golden import Golden


def test_text_is_compared_with_file_and_written_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path / "golden")
    with pytest.raises(pytest.fail.Exception, match=r"page\.txt is missing"):
        Golden(update=False)("page", "one\ntwo")
    Golden(update=True)("page", "\none  \ntwo\n")
    Golden(update=False)("page", "one\ntwo")
    with pytest.raises(AssertionError, match=r"page\.txt differs"):
        Golden(update=False)("page", "one\nthree")


def test_every_golden_file_is_used() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.rglob("test_*.py"))
    unused = [file.stem for file in golden.FOLDER.iterdir() if f'"{file.stem}"' not in sources]
    assert not unused
