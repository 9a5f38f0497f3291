"""The examples run, as a newcomer would run them, and end with what they promise."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.audited import entries
from tests.forked import Command

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "page", "most"),
    [
        ("feddistill", "", 100),
        ("plates", "", 60),
        ("ordinal", "own-task", 60),
        ("skew", "own-split", 60),
        ("convmixer", "own-model", 60),
        ("robust", "own-model", 60),
        ("flip", "own-mechanism", 60),
        ("majority", "own-attack", 60),
        ("csv_tracker", "track", 30),
    ],
)
def test_each_of_a_labs_own_is_one_short_file_and_stands_whole_on_its_page(
    file: str, page: str, most: int
) -> None:
    code = (ROOT / "examples" / "my_lab" / "my_lab" / f"{file}.py").read_text()
    assert len(code.splitlines()) <= most
    assert not page or f"```python\n{code}```" in (ROOT / "docs" / f"{page}.md").read_text()


def typed(folder: Path, *words: str) -> None:
    code, printed = Command(words, folder, [ROOT]).end()
    assert code == 0, printed


@pytest.mark.waits
def test_three_hospitals_each_see_only_their_own_data_and_end_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes on by itself, FLARE's sites, are processes as anybody starts them; commands that end are
    forked from one that has imported all that they need."""
    pytest.importorskip("nvflare")
    from fedstill.federation.provision import free_port

    home = tmp_path / "hospitals"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", ["hospitals.py", str(home), str(free_port())])
    script = runpy.run_path(str(ROOT / "examples" / "hospitals" / "hospitals.py"))
    for name, here in (("fedstill", typed), ("PATIENCE", 180.0)):
        monkeypatch.setitem(script["main"].__globals__, name, here)
    script["main"]()

    result = json.loads((home / "university" / "result" / "result.json").read_text())
    assert (home / "university" / "result" / "report.html").stat().st_size > 10_000
    assert (home / "university" / "result" / "student.safetensors").exists()
    # No hospital has seen more than five of the ten digits: alone it cannot pass 50 %.
    assert result["accuracy"] > 55
    assert {node["name"]: node["model"] for node in result["nodes"]} == {
        "north": "SmallCNN",
        "east": "LeNet5",
        "west": "MLP",
    }
    assert result["local"] is None  # what the hospitals' own models reach is theirs to know
    for hospital in ("north", "east", "west"):
        (run,) = (home / hospital / "node" / "runs").iterdir()
        lines = entries(run.parent.parent)
        assert not any(line["part"] == "refused" for line in lines)
        up = sum(sum(line["up"].values()) for line in lines)
        (node,) = [node for node in result["nodes"] if node["name"] == hospital]
        assert node["bytes"]["up"] == up > 0  # the server's log and the owner's agree
        assert {line["node"] for line in lines} == {hospital}
    # Nothing of a hospital lies anywhere else.
    names = {path.name for path in (home / "university").rglob("*")}
    assert not names & {"scans.npz", "pictures", "table.csv", "node.toml", "secret"}


def test_the_first_snippet_in_python_shows_a_student_far_above_a_clinic_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The one of docs/start.md, with a fifth of its queries."""
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    code = page.partition("## From Python")[2].partition("```python\n")[2].partition("```")[0]
    assert "steps=300" in code
    exec(compile(code.replace("steps=300", "steps=60"), "start.md", "exec"), {})
    alone, student = map(float, re.findall(r"([\d.]+) %", capsys.readouterr().out))
    assert student > alone + 5
