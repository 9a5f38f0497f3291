"""No other package knows a method, its options or its tensors by name: methods declare all of these."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fedstill
from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, build_node_side
from fedstill.protocol.needs import unmet_need
from fedstill.protocol.node_side import NodeSetting, placeholder_public
from fedstill.tasks import TASKS

PACKAGE = Path(fedstill.__file__).parent
# Files that may name methods: the public API, the registry, and examples in the command's help.
LISTS = ("__init__.py", "protocol/method.py", "protocol/needs.py", "api.py", "cli/main.py")
# Metrics that have the same name as the method that they are computed by.
FIGURES = {"standalone", "centralized", "ensemble"}


@cache
def parsed(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def code(path: Path, names: bool) -> Iterator[tuple[int, str]]:
    """Yield the strings of a file's code, and optionally its names, with their lines; without docstrings."""
    cited = {
        id(node.value)
        for node in parsed(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in parsed(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in cited:
            yield node.lineno, node.value
        elif names and isinstance(node, ast.Name):
            yield node.lineno, node.id


def keys(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings that a file's code uses as keys, with their lines: ``a["x"]``, ``a.get("x")``."""
    for node in parsed(path):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            key = node.args[0] if node.args else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.lineno, key.value


def elsewhere() -> list[Path]:
    """Return the files of all packages except ``methods/``."""
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "methods" and str(path.relative_to(PACKAGE)) not in LISTS
    ]


def code_matches(pattern: str, *, whole: bool = False, names: bool = False) -> list[str]:
    """Return the strings and names of the code that match a pattern, in part or as a whole."""
    match = re.compile(pattern).fullmatch if whole else re.compile(pattern).search
    return [
        f"{path.relative_to(PACKAGE)}:{line}: {text[:60]}"
        for path in elsewhere()
        for line, text in code(path, names)
        if match(text)
    ]


def test_code_contains_no_method_names() -> None:
    classes = [path.rpartition(":")[2] for path in METHODS.builtin.values()]
    names = {*METHODS.builtin, *classes} - FIGURES - {"Centralized", "Standalone"}
    # A preset's name contains that of a method.
    assert code_matches(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(names)))})(?![\w-])", names=True) == []


def test_code_contains_no_method_option_names() -> None:
    options = {
        field.name for method in METHODS.importable_objects().values() for field in dataclasses.fields(method)
    }
    assert code_matches(rf"\bmethod\.({'|'.join(sorted(options))})\b") == []


def test_code_contains_no_method_tensor_names() -> None:
    """Other packages know payload kinds; a tensor that has the name of its kind counts as a kind."""
    tensors: set[str] = set()
    for task in (TASKS[name]().minimal_task() for name in TASKS.builtin):
        setting = NodeSetting(task, LocalConfig(), Compute(), placeholder_public(task))
        for name in METHODS.builtin:
            method = METHODS[name]()
            if unmet_need(method.needs(), task) is None:
                try:
                    queries = build_node_side(method, setting).queries.values()
                except ArgumentError:  # an option that is not for this task
                    continue
                tensors |= {part for each in queries for part in (*each.sends, *each.releases)}
    assert {"logits", "counts", "x"} <= tensors
    # Audits of gates have their own queries, `methods/audit_method.py`, and read the responses. Approval
    # documents have their own keys.
    others = ("mechanism_audits.py", "approvals.py")
    # Roles, and keys of files, results and batches.
    tensors -= {"critic", "features", "inputs", "targets", "round", "view"}
    packages = ("node", "federation", "privacy", "protocol", "runs", "attacks")
    paths = [path for path in elsewhere() if path.relative_to(PACKAGE).parts[0] in packages]
    paths = [path for path in paths if path.name not in others]
    looked_up = [
        f"{path.relative_to(PACKAGE)}:{line}: {key}"
        for path in paths
        for line, key in keys(path)
        if key in tensors
    ]
    assert looked_up == []
