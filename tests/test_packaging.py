"""Installed files and dependencies."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

import fedstill

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)==(?P<version>[A-Za-z0-9_.]+)( *;.*)?")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    matches = [PIN.fullmatch(line) for line in lines if line and not line.startswith("#")]
    assert all(matches), "every line of constraints.txt is a comment or an exact pin"
    return {canonical(pin["name"]): pin["version"] for pin in matches if pin}


def test_distribution_metadata() -> None:
    about = metadata("fedstill")
    assert about["Version"] == fedstill.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.10"
    classifiers = about.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)} <= set(classifiers)
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")


def test_citation_and_changelog_name_version() -> None:
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fedstill.__version__}\n" in cited
    assert [cited.count(f'notes: "The method {name}') for name in ("FedIOD", "FedKD", "FedMD-CG")] == [
        1,
        1,
        1,
    ]
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] == fedstill.__version__


def test_command_is_installed() -> None:
    [script] = entry_points(group="console_scripts", name="fedstill")
    assert script.value == "fedstill.cli.main:main"
    assert callable(script.load())


def needs(name: str) -> set[str]:
    """Return the dependencies of an installed distribution; for fedstill, including those of its tests."""
    extra = {"extra": "dev" if name == "fedstill" else ""}
    lines = [Requirement(line) for line in requires(name) or []]
    return {canonical(line.name) for line in lines if line.marker is None or line.marker.evaluate(extra)}


def imported() -> set[str]:
    """Return the libraries that the package imports, by a statement or by name."""
    names = set[str]()
    for path in Path(fedstill.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
                names.update(word.value for word in node.args if isinstance(word, ast.Constant))
    return {name.partition(".")[0] for name in names}


def test_dependencies_are_imported() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    of_users = [line for extra, lines in extras.items() if extra not in ("dev", "docs") for line in lines]
    named = {canonical(Requirement(line).name) for line in (*project["dependencies"], *of_users)}
    otherwise = {"mlflow-skinny": "mlflow", "pillow": "PIL"}  # import names that differ
    otherwise |= {"scikit-image": "skimage", "scikit-learn": "sklearn"}
    modules = {otherwise.get(name, name.replace("-", "_")) for name in named}
    assert modules > {"torch", "nibabel", "opacus"}
    assert sorted(modules - imported()) == []


def test_named_dependencies_are_pinned() -> None:
    named = {canonical(Requirement(line).name) for line in requires("fedstill") or []}
    assert len(named) > 10
    assert named <= set(pins())
    assert pins()["torch"] == "2.13.0"


def test_transitive_dependencies_are_pinned() -> None:
    pinned = pins()
    checked, queue = {"fedstill"}, ["fedstill"]
    while queue:
        name = queue.pop()
        for other in needs(name) - checked:
            assert other in pinned, f"{name} needs {other}, which constraints.txt does not pin"
            checked.add(other)
            queue.append(other)
    assert {"torch", "sympy", "pytest", "iniconfig"} <= checked  # all dependencies were visited


@pytest.mark.parametrize("name", ["py.typed", "runs/presets/demo.toml"])
def test_package_contains_data_files(name: str) -> None:
    assert Path(fedstill.__file__).parent.joinpath(name).is_file()


def test_wheel_from_sdist_has_command_and_data(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / "dist")]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    [sdist] = (tmp_path / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "sdist")
    [source] = (tmp_path / "sdist").iterdir()
    texts = {"constraints.txt", "LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"}
    own = {path.name for path in source.iterdir()} - {".gitignore"}  # added by hatchling
    assert own == {"fedstill", "experiments", *texts}, "no files for development only"
    subprocess.run([*build, "-t", "wheel"], cwd=source, check=True, capture_output=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == f"fedstill-{fedstill.__version__}-py3-none-any.whl"
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")  # like an installer, without the command
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"fedstill"}, (
        "no tests, docs or tools"
    )
    done = subprocess.run(
        [sys.executable, "-m", "fedstill", "reproduce"],  # its files are in another folder of the sources
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "fedmd-cg-table4" in done.stdout
    ours, theirs = Path(fedstill.__file__).parent, installed / "fedstill"
    kinds = ("*.py", "*.toml", "*.j2", "py.typed")
    files = {path.relative_to(ours) for kind in kinds for path in ours.rglob(kind)}
    assert sorted(path for path in files if not (theirs / path).exists()) == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_ci_checks_code_and_docs() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")
    targets = re.findall(r"^make ([a-z]+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    dry = ["make", *targets, "--dry-run", "--directory", str(ROOT)]
    done = subprocess.run(dry, capture_output=True, text=True, check=True, timeout=60)
    for tool in ("ruff check", "lint-imports", "mypy", "-m pytest"):
        assert f"bin/{tool}" in done.stdout or f"bin/python {tool}" in done.stdout
    assert re.search(r"bin/python -m sphinx .*-W .*--keep-going", done.stdout)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_rejects_old_python(tmp_path: Path) -> None:
    old = tmp_path / "oldpython"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    venv = f"VENV={tmp_path / 'venv'}"
    done = subprocess.run(
        ["make", "--directory", str(ROOT), "demo", f"PYTHON={old}", venv],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert "fedstill needs Python 3.10 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()
