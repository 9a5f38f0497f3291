"""Check the project's language: banned words, and docstrings that open with a question word.

Usage: ``python tools/check_words.py [PATH ...]`` (default: everything that ``make test`` checks).

Prints one line a finding, and exits 1 if there is any. Words are checked in code, comments, texts and names:
``_told`` and ``told_part`` count as "told". Quotations of papers go between ``<!-- quote -->`` and
``<!-- /quote -->`` in Markdown, or on a line that ends with ``# quote`` in Python.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("fedstill", "docs", "tests", "examples", "experiments", "benchmarks", "README.md", "CHANGELOG.md")
SUFFIXES = (".py", ".md", ".rst", ".toml", ".j2")
BANNED = (
    "whoever", "somebody", "nobody's", "told apart", "is told", "tells nothing", "of one's own",
    "of its own making", "goes on", "anew", "beside", "mark", "marks", "afresh", "dear", "heard", "told",
    "spoilt", "the house", "room", "allowed is", "allowed are",
)  # fmt: skip
# What a banned word is part of in other projects' names.
KEPT = re.compile(
    r"mark_non_differentiable|pytest\.mark\b|pytestmark\b|@mark\.|\bmark\.parametrize|</?mark\b"
)
WORDS = re.compile(
    "|".join(
        rf"(?<![a-z]){word.replace(' ', '[ _]+')}(?![a-z])" for word in sorted(BANNED, key=len, reverse=True)
    ),
    re.IGNORECASE,
)
OPENINGS = re.compile(r"(What|Whether|How|Of|Where|Which)\b")
LIMIT = 3.0  # percent of all docstrings


def banned_words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and word of each banned word of a file."""
    quoted = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        quoted = (quoted or "<!-- quote -->" in line) and "<!-- /quote -->" not in line
        if quoted or line.rstrip().endswith("# quote"):
            continue
        for match in WORDS.finditer(KEPT.sub("", line)):
            yield number, match.group()


def openings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line number and first line of each docstring of a Python file, and whether its opening is odd."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.splitlines()[0], OPENINGS.match(text) is not None


def files(paths: list[str]) -> list[Path]:
    """Tracked and new files below the paths that have words."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    candidates = (ROOT / name for name in dict.fromkeys(listed) if name.endswith(SUFFIXES))
    return [path for path in candidates if path.is_file()]


def main(paths: list[str]) -> int:
    """Print all findings; return the exit status."""
    findings, odd, total = 0, [], 0
    for path in files(paths or list(CHECKED)):
        name = path.relative_to(ROOT)
        for number, word in banned_words(path):
            print(f"{name}:{number}: banned word {word!r}")
            findings += 1
        if name.suffix == ".py":
            for number, first, is_odd in openings(path):
                total += 1
                if is_odd:
                    odd.append(f"{name}:{number}: docstring opens with {first.split()[0]!r}: {first}")
    share = 100 * len(odd) / total if total else 0.0
    if paths or share > LIMIT:
        print("\n".join(odd))
    docstrings = f"{len(odd)} of {total} docstrings ({share:.1f} %) open oddly (limit {LIMIT:g} %)"
    print(f"{findings} banned words; {docstrings}")
    return int(findings > 0 or share > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
