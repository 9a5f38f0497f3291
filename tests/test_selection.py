"""The part of the tests that runs by default (``slow`` and ``sample``)."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
TESTS = """
import pytest

@pytest.mark.slow
def test_long(): ...

@pytest.mark.sample(2)
@pytest.mark.parametrize("case", range(5))
def test_many(case): ...

@pytest.mark.sample(2)
@pytest.mark.parametrize("case", range(2))
def test_few(case): ...

def test_short(): ...
"""
DEFAULT = ["test_many[0]", "test_many[2]", "test_few[0]", "test_few[1]", "test_short"]
EVERY = ["test_long", *(f"test_many[{case}]" for case in range(5)), *DEFAULT[2:]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), DEFAULT),
        (("--all",), EVERY),
        (("-k", "many"), EVERY[1:6]),
        (("test_file.py::test_long",), EVERY[:1]),
    ],
)
def test_selects(words: tuple[str, ...], expected: list[str], pytester: pytest.Pytester) -> None:
    root = CONFTEST.parent.parent
    pytester.makepyfile(test_file=TESTS)
    pytester.makefile(".ini", pytest="[pytest]\nmarkers =\n slow\n sample(n)\n waits\n")
    (pytester.path / "conftest.py").write_text(
        f"{(root / 'conftest.py').read_text()}\nfrom tests.conftest import pytest_collection_modifyitems\n"
    )
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", *words)
    found = [line.partition("::")[2] for line in result.outlines if "::" in line]
    assert found == expected
