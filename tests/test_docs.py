"""What would rot in the site between two times that ``make docs`` builds it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.attacks.attack import ATTACKS
from fedstill.core.options import CheckedOptions
from fedstill.data.config import DATA
from fedstill.data.splits import SPLITS
from fedstill.federation import offline_files
from fedstill.models import MODELS
from fedstill.node import audit_database
from fedstill.privacy.config import MECHANISMS
from fedstill.protocol import run_plan
from fedstill.protocol.method import METHODS
from fedstill.protocol.run_plan import PROTOCOL
from fedstill.report.result import Result
from fedstill.tasks.config import TASKS
from fedstill.tasks.task import ENSEMBLES
from fedstill.track.tracker import TRACKERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GALLERY = sorted((ROOT / "examples" / "gallery").glob("*.py"))
NAMES = [name for name in fedstill.__all__ if name != "__version__"]
PACKAGES = ("data", "figures", "methods", "models", "privacy", "tasks", "track")  # public names for plug-ins

pytestmark = pytest.mark.skipif(not (DOCS / "conf.py").exists(), reason="without the docs")


def pages() -> set[str]:
    """All of them, as toctrees name them."""
    made = ("_build", "gallery")
    names = (path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md"))
    return {name.as_posix() for name in names if name.parts[0] not in made}


def below(page: str, known: set[str]) -> Iterator[str]:
    """The pages that the toctrees of one name."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    folder = f"{page}/".rpartition("/")[0].rpartition("/")[0]
    for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
        for entry in block.split("\n"):
            pattern = f"{folder}/{entry}".strip("/")
            if entry and not entry.startswith(":"):
                # As with Sphinx, a star ends at a folder.
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
    assert sorted(known - reached) == [], "name each in the toctree of docs/howto.md, say"


def documented() -> set[str]:
    """What the reference shows, with the module from which it is; methods by themselves, all of them."""
    module, found = "fedstill", {f"fedstill.{METHODS[name].__name__}" for name in METHODS.builtin}
    for path in (DOCS / "reference").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        for word, name in re.findall(r"^\.\. (currentmodule|auto\w+|py:data):: (\S+)$", text, re.MULTILINE):
            if word == "currentmodule":
                module = name
            else:
                found.add(name if name.startswith("fedstill.") else f"{module}.{name}")
    return found


def test_every_public_name_is_in_the_reference() -> None:
    shown = documented()
    assert sorted({f"fedstill.{name}" for name in fedstill.__all__} - shown) == []
    things = [inspect.unwrap(look_up(name)) for name in shown]
    for package in PACKAGES:
        offered = importlib.import_module(f"fedstill.{package}")
        for name in offered.__all__:
            thing = getattr(offered, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):  # by whichever name it is shown
                assert inspect.unwrap(thing) in things, f"fedstill.{package}.{name}"


def look_up(name: str) -> Any:
    """What a dotted name stands for."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_its_text_and_every_option_its_meaning(name: str) -> None:
    thing = getattr(fedstill, name)
    assert (thing.__doc__ or "").strip()
    assert not thing.__doc__.startswith(f"{name}("), "a signature that dataclass has made is no text"
    if not (is_dataclass(thing) and issubclass(thing, CheckedOptions)):
        return
    for kind in thing.__mro__:
        if is_dataclass(kind):
            body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
            for field, after in zip(body, [*body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                    told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    assert told, f"{kind.__name__}.{ast.unparse(field.target)}"


@pytest.mark.parametrize("script", GALLERY, ids=lambda path: path.stem)
def test_every_script_of_the_gallery_has_a_title_and_a_figure_and_uses_what_is_public(script: Path) -> None:
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


def test_every_file_of_ours_that_a_page_names_is_there() -> None:
    rooms = "benchmarks|docs|examples|experiments|fedstill|tests|tools"
    named = {
        (page.name, file)
        for page in PAGES
        for file in re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w./-]+\.\w+)", page.read_text(encoding="utf-8"))
    }
    assert ("leakage.md", "tests/attacks/test_label_counts.py") in named
    assert sorted((page, file) for page, file in named if not (ROOT / file).exists()) == []


def test_entry_points_bear_the_names_under_which_they_are_looked_for() -> None:
    registries = (ATTACKS, DATA, ENSEMBLES, MECHANISMS, METHODS, MODELS, SPLITS, TASKS, TRACKERS)
    groups = {registry.group for registry in registries}
    table = (DOCS / "reference" / "own.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\| `([\w.]+)` \|$", table, re.MULTILINE)) == groups
    shown = {
        group
        for page in PAGES
        for group in re.findall(r"entry-points\.\"([\w.]+)\"", page.read_text(encoding="utf-8"))
    }
    assert shown == groups


def test_the_page_on_files_has_the_versions_and_the_keys_that_are_written() -> None:
    text = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^\| [^|]* \| (\d+) \(", text, re.MULTILINE)]
    assert numbers == [audit_database.VERSION, offline_files.FORMAT, PROTOCOL, run_plan.FORMAT]
    table = text.partition("## result.json")[2].partition("\n## ")[0]
    told = {
        key
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    written = {field.name for field in fields(Result)} - {
        "reached",
        "missing",
    }  # which have no key of their own
    assert told == written | {"metric", "task", "needs", "data_digest"}
