"""Consistency of the documentation with the code, without building the site."""

from __future__ import annotations

import ast
import importlib
import inspect
import posixpath
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill import methods
from fedstill.attacks.attack import ATTACKS
from fedstill.core.options import CheckedOptions
from fedstill.core.registry import Registrable
from fedstill.data.config import DATA
from fedstill.data.partitioners import SPLITS
from fedstill.federation import offline_files
from fedstill.federation.adversaries import ADVERSARIES
from fedstill.models import MODELS
from fedstill.node import audit_database
from fedstill.privacy.config import MECHANISMS
from fedstill.protocol import run_plan
from fedstill.protocol.method import METHODS
from fedstill.protocol.run_plan import PROTOCOL
from fedstill.report.records import Result
from fedstill.tasks.task import ENSEMBLES, TASKS
from fedstill.track.trackers import TRACKERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SCRIPTS = sorted(
    path for folder in ("gallery", "tutorials") for path in (ROOT / "examples" / folder).glob("*.py")
)
NAMES = [name for name in fedstill.__all__ if name != "__version__"]
REFERENCE = runpy.run_path(str(ROOT / "tools" / "reference_pages.py"))
# packages with public names for plug-ins
PACKAGES = ("data", "datasets", "figures", "methods", "models", "privacy", "tasks", "track")

pytestmark = pytest.mark.skipif(not (DOCS / "conf.py").exists(), reason="without the docs")


def pages() -> set[str]:
    """Return all pages by their toctree names."""
    generated = ("_build", "gallery", "notebooks")
    names = (path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md"))
    return {name.as_posix() for name in names if name.parts[0] not in generated}


def below(page: str, known: set[str]) -> Iterator[str]:
    """Yield the pages in the toctrees of a page."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
        for entry in block.split("\n"):
            target = re.sub(r".*<(.+)>", r"\1", entry)  # without a title
            pattern = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            if entry and not entry.startswith(":"):
                # As in Sphinx, a star does not match folders.
                yield from (
                    name
                    for name in known - {page}
                    if fnmatch(name, pattern) and name.count("/") == pattern.count("/")
                )


def test_every_page_is_in_a_toctree() -> None:
    known, reached, queue = pages(), {"index"}, ["index"]
    while queue:
        new = set(below(queue.pop(), known)) - reached
        reached |= new
        queue.extend(new)
    assert {"data", "methods/fedkd", "reference/options"} <= reached
    assert sorted(known - reached) == [], "add each page to a toctree, for example in docs/guides.md"


def documented() -> set[str]:
    """Return the dotted names in the reference, including all methods."""
    texts = (path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    return {name for text in texts for name in REFERENCE["names_on"](text)}


@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=lambda path: path.stem)
def test_reference_is_generated_from_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == REFERENCE["regenerate"](text), "run python tools/reference_pages.py"
    names = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert len(names) == len(set(names)), "entries of one name share an anchor"


def test_every_public_name_is_in_the_reference() -> None:
    shown = documented()
    assert sorted({f"fedstill.{name}" for name in fedstill.__all__} - shown) == []
    documented_objects = [inspect.unwrap(import_name(name)) for name in shown]
    for package in PACKAGES:
        offered = importlib.import_module(f"fedstill.{package}")
        for name in offered.__all__:
            thing = getattr(offered, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):  # under any of its names
                assert inspect.unwrap(thing) in documented_objects, f"fedstill.{package}.{name}"


def import_name(name: str) -> Any:
    """Return the object of a dotted name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_and_options_have_docstrings(name: str) -> None:
    thing = getattr(fedstill, name)
    assert (thing.__doc__ or "").strip()
    assert not thing.__doc__.startswith(f"{name}("), "a generated dataclass signature is not a docstring"
    if not (is_dataclass(thing) and issubclass(thing, CheckedOptions | Registrable)):
        return
    for kind in thing.__mro__:
        if is_dataclass(kind):
            body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
            for field, after in zip(body, [*body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                    has_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    assert has_docstring, f"{kind.__name__}.{ast.unparse(field.target)}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_of_the_site_have_title_and_figure_and_use_public_names(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    title, line, *_ = (ast.get_docstring(tree) or "").split("\n")
    assert title
    assert re.fullmatch("=+", line)
    assert len(line) >= len(title)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert any(isinstance(call, ast.Attribute) and call.attr in ("subplots", "show") for call in calls)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fedstill"):
            offered = importlib.import_module(str(node.module))
            for name in node.names:
                assert name.name in offered.__all__, f"{node.module}.{name.name}"


PAGES = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in sorted(pages()))]


def test_files_named_in_pages_exist() -> None:
    folders = "benchmarks|docs|examples|experiments|fedstill|tests|tools"
    named = {
        (page.relative_to(ROOT).as_posix(), file)
        for page in PAGES
        for file in re.findall(
            rf"(?<![\w/.-])((?:{folders})/[\w./-]+\.\w+)", page.read_text(encoding="utf-8")
        )
    }
    assert ("docs/leakage.md", "tests/attacks/test_label_counts.py") in named
    places = (
        (ROOT, (ROOT / page).parent, page, file) for page, file in named
    )  # a name, or a link from the page
    assert [
        (page, file)
        for root, here, page, file in places
        if not any((at / file).exists() for at in (root, here))
    ] == []


def test_entry_point_groups_in_pages_match_registries() -> None:
    registries = (ADVERSARIES, ATTACKS, DATA, ENSEMBLES, MECHANISMS, METHODS, MODELS, SPLITS, TASKS, TRACKERS)
    groups = {registry.group for registry in registries}
    table = (DOCS / "reference" / "own.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\| `([\w.]+)` \|$", table, re.MULTILINE)) == groups
    shown = {
        group
        for page in PAGES
        for group in re.findall(r"entry-points\.\"([\w.]+)\"", page.read_text(encoding="utf-8"))
    }
    assert shown == groups


def test_page_on_files_has_current_versions_and_keys() -> None:
    text = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^\| [^|]* \| (\d+) \(", text, re.MULTILINE)]
    assert numbers == [audit_database.VERSION, offline_files.FORMAT, PROTOCOL, run_plan.FORMAT]
    table = text.partition("## result.json")[2].partition("\n## ")[0]
    documented_keys = {
        key
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    # properties without a key
    written = {field.name for field in fields(Result)} - {"metric_values", "absent_keys"}
    assert documented_keys == written | {"metric", "task", "needs", "data_digest"}


def test_page_on_methods_is_short_and_names_what_exists() -> None:
    text = (DOCS / "custom-method.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    server_fields = {field.name for field in fields(methods.Server)}
    for owner, thing, known in (
        ("node", methods.NodeView, {"setting", *dir(methods.Node)}),  # ``prepare`` receives the Node itself
        ("server", methods.Server, server_fields),
    ):
        names = {name for name in re.findall(rf"`{owner}\.(\w+)", text) if name != "toml"}
        assert len(names) > 5
        assert not [name for name in names if not hasattr(thing, name) and name not in known]
    table = text.partition("## Queries")[2].partition("### Kinds")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    documented_fields = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented_fields == {field.name for field in fields(methods.Query) if field.init} - {"function"}
