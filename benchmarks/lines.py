"""Lines of each package, and its lines of code (without docstrings, comments and blank lines).

python benchmarks/lines.py [TREE]
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def counted(source: str) -> tuple[int, int]:
    """Count all lines of Python source, and its lines of code.

    >>> counted('def f():\n    "Says."\n\n    return 1  # one\n')
    (4, 2)
    """
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return source.count("\n"), len(code - documented)


def main() -> None:
    """Print a table of the package and the tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", nargs="?", default=".", type=Path)
    tree = parser.parse_args().tree
    for top in ("fedstill", "tests"):
        packages: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        longest = (0, "")
        for path in sorted((tree / top).rglob("*.py")):
            lines, code = counted(path.read_text(encoding="utf-8"))
            within = path.relative_to(tree / top)
            package = packages[within.parts[0] if len(within.parts) > 1 else "loose"]
            package[:] = [package[0] + lines, package[1] + code, package[2] + 1]
            longest = max(longest, (lines, str(within)))
        whole = [sum(column) for column in zip(*packages.values(), strict=True)]
        print(f"{top}: {whole[0]} lines, {whole[1]} of code, {whole[2]} files; longest {longest}")
        for name, (lines, code, files) in packages.items():
            print(f"  {name:12} {lines:6} {code:6} {files:4}")


if __name__ == "__main__":
    main()
