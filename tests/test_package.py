"""The package exports existing names and has no unreachable modules."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstill
from fedstill.core.errors import ArgumentError
from fedstill.protocol.method import METHODS, method_name

ROOT = Path(fedstill.__file__).parent
ENTRIES = ("fedstill", "fedstill.__main__", "fedstill.cli.main")  # library, ``python -m`` and command


def texts(source: str) -> Iterator[str]:
    """Yield all strings of Python code: docstrings and messages."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_exported_names_exist() -> None:
    for name in set(fedstill.__all__) - {"__version__"}:
        assert getattr(fedstill, name).__name__ == name
    assert set(fedstill.__all__) | {"datasets", "figures", "models"} == set(dir(fedstill))
    assert fedstill.datasets.__name__ == "fedstill.datasets"


def test_public_annotations_use_exported_classes() -> None:
    with pytest.raises(ArgumentError) as refused:
        method_name("fedavg")  # the error for an unknown method
    methods = {method.__name__ for method in METHODS.values()}
    assert methods <= set(re.findall(r"\w+", str(refused.value)))
    assert methods <= set(fedstill.__all__)
    signatures = [
        text
        for name in fedstill.__all__
        if name != "__version__"
        for text in texts(inspect.getsource(getattr(fedstill, name)))
    ]
    named = {name for text in signatures for name in re.findall(r"\b\w+Config\b", text)}
    assert "SegmentationConfig" in named
    assert sorted(named - set(fedstill.__all__)) == []


def imported_by(module: str, files: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports, by a statement or by name."""
    tree, names = ast.parse(files[module].read_text(encoding="utf-8")), set[str]()
    prefixes = [""]  # for composed names such as f"fedstill.methods.{file}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
            names.add(str(node.module))
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            prefixes.append(str(node.values[0].value))
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts = [word.partition(":")[0] for word in words if isinstance(word, str)]  # the module of "module:Name"
    texts += [text.rpartition(".")[0] for text in texts]  # the module of "module.Class"
    names.update(f"{prefix}{text}" for prefix in prefixes for text in texts)
    known = names & files.keys()
    return known | {name.rpartition(".")[0] for name in known if "." in name}  # and its package


def test_modules_are_reachable_from_entry_points() -> None:
    paths = ((path, path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py"))
    files = {".".join(parts).removesuffix(".__init__"): path for path, parts in paths}
    reached, queue = set(ENTRIES), list(ENTRIES)
    while queue:
        new = imported_by(queue.pop(), files) - reached
        reached |= new
        queue.extend(new)
    assert sorted(files.keys() - reached) == []


def test_public_class_names_are_unique() -> None:
    by_name: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                by_name.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in by_name.items() if len(files) > 1} == {}


def test_test_modules_import_only_from_support() -> None:
    tests = Path(__file__).parent
    for file in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                if module.split(".")[0] == "tests":
                    assert module.split(".")[:2] == ["tests", "support"], file
