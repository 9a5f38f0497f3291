"""Each method has a page with fixed sections, a valid Python call and a valid command."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.protocol.method import METHODS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "methods"
SECTIONS = [
    "What leaves the node",
    "When to use it",
    "Python",
    "Command",
    "Differences from the paper",
    "Results",
]
OPTIONAL = {"Options"}
WITHOUT_PAPER = {"baselines", "column-sums"}
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="without the docs")


class Names(dict[str, Any]):
    """Names of a page's examples; those that a reader supplies stand for any arguments."""

    def __missing__(self, name: str) -> Any:
        if name in ("nodes", "slices", "vectors", "table"):  # data, models, student, test and classes
            return dict.fromkeys(("data", "models", "student", "test", "classes"), ())
        if name in ("public", "share_weights"):
            return [fedstill.PolicyConfig(outputs_only=False)] * 3
        raise KeyError(name)


def text(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def block(page: str, language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", text(page), re.DOTALL))


@pytest.mark.parametrize("page", PAGES)
def test_page_has_the_sections_in_order(page: str) -> None:
    expected = [name for name in SECTIONS if not (page in WITHOUT_PAPER and name.startswith("Differences"))]
    assert [
        name for name in re.findall(r"^## (.+)$", text(page), re.MULTILINE) if name not in OPTIONAL
    ] == expected


@pytest.mark.parametrize("page", PAGES)
def test_python_call_is_valid(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signature, methods = inspect.signature(fedstill.distil), []

    def distil(*args: Any, **options: Any) -> None:
        method = signature.bind(*args, **options).arguments["method"]
        methods.append(METHODS[method]() if isinstance(method, str) else method)

    monkeypatch.setattr(fedstill, "distil", distil)
    exec(compile(block(page, "python"), page, "exec"), {}, Names(fedstill=fedstill))
    assert methods


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_valid(page: str, command: Callable[..., tuple[int, str, str]]) -> None:
    lines = [shlex.split(line, comments=True) for line in block(page, "sh").splitlines()]
    runs = [words[2:] for words in lines if words[:2] == ["fedstill", "run"]]
    assert runs
    for preset, *options in runs:
        if preset == "mine.toml":
            preset = "digits-fedkd"
        if "--out" in options:  # an option of the run's place, not of its configuration
            at = options.index("--out")
            del options[at : at + 2]
        code, _, err = command("config", str(ROOT / preset) if preset.endswith(".toml") else preset, *options)
        assert code == 0, err


def test_every_method_is_called_on_a_page() -> None:
    calls = "\n".join(block(page, "python") + block(page, "sh") for page in PAGES)
    for name in METHODS.builtin:
        ways = (f"fedstill.{METHODS[name].__name__}(", f'"{name}"', f"-{name}", f" {name}")
        assert any(way in calls for way in ways), name
