"""With --json, commands print the content of their text output as one document, with equal exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedstill import cli
from fedstill.cli.console import print_json
from fedstill.federation import admin, flare_site, provision
from fedstill.node import owner_folder
from fedstill.node.audit_log import AuditLog
from fedstill.privacy.budget import epsilon_text_rounded_up

Main = Callable[..., tuple[int, str, str]]


CLOSED: list[str] = []  # closed sessions; a session that stays open would keep its process running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the folders of a running node, with startup kit and audit log, and of a server with two runs."""
    node = tmp_path / "node"
    owner_folder.init_folder(node, "north")
    text = (node / "node.toml").read_text(encoding="utf-8")
    text = text.replace("\nonline = true\n", "\nonline = false\n")
    (node / "node.toml").write_text(text, encoding="utf-8")
    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)
    np.savez(node / "data.npz", images=images[:100], labels=digits.target[:100])
    startup = node / "kit" / "startup"
    startup.mkdir(parents=True)
    (startup / "fed_client.json").write_text('{"servers": [{"service": {"target": "h:1"}}]}')
    AuditLog(node / "audit.sqlite").close()
    for name in ("one", "two"):
        (tmp_path / "server" / "runs" / name).mkdir(parents=True)

    class Admin:
        def __init__(self, kit: Path) -> None:
            assert kit == Path("server/admin")

        def nodes(self) -> dict[str, float]:
            return {"north": 3.0}

        def close(self) -> None:
            CLOSED.append("server")

        def jobs(self) -> list[dict[str, object]]:
            return [{"name": "one", "status": "RUNNING", "submit_time": 1.0, "job_id": "x1"}]

    monkeypatch.setattr(admin, "Admin", Admin)
    monkeypatch.setattr(provision, "read_federation", lambda _: {"host": "h", "port": 1, "name": "fl"})
    monkeypatch.setattr(flare_site, "server", lambda folder: folder)
    monkeypatch.setattr(flare_site, "is_reachable", lambda address: address == "h:1")
    monkeypatch.setattr(flare_site, "process_id", lambda site: 77)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "known", "more"),
    [
        ("node status node", {"process": 77, "server": "h:1", "answers": True}, {"log"}),
        ("server status server", {"process": 77, "address": "h:1", "nodes": {"north": 3.0}}, {"runs"}),
        ("audit verify node", {"log": "node/audit.sqlite", "sound": True, "entries": 0}, {"trouble"}),
        (
            "node check node digits-fedkd",
            {"node": "north", "faults": []},
            {"facts", "exposed", "rounding", "run"},
        ),
        ("node check node", {"node": "north", "faults": []}, {"facts", "exposed", "rounding", "methods"}),
        ("privacy cost laplace(50.0) 3", {"events": {"laplace(50.0)": 3}, "delta": 1e-5}, {"epsilon"}),
    ],
)
def test_json_has_the_content_of_the_text_output(
    words: str, known: dict[str, object], more: set[str], folder: Path, command: Main
) -> None:
    code, out, err = command(*words.split(), "--json")
    assert (code, err) == (0, "")
    output = json.loads(out)
    assert known.items() <= output.items()
    assert more <= set(output)
    text = " ".join(command(*words.split())[1].split())
    assert ["server"] * (2 * words.startswith("server")) == CLOSED
    CLOSED.clear()
    if "run" in output:
        assert output["run"]["can take part"] == "yes"
        assert "It can take part." in text
        queries = {each["query"]: each for each in output["run"]["queries"]}
        assert queries["predict"]["times"] == 1
        assert "predict releases " + ", ".join(queries["predict"]["answers with"]) in text
    for row in output.get("methods", ()):
        assert f"{row['method']} {row['can take part']} " in text
    for lines in output.get("facts", {}).values():
        assert " ".join(lines[0].split())[:30] in text
    for run in output.get("runs", ()):
        begun = datetime.fromisoformat(run["begun"])
        assert begun.utcoffset() is not None, "times need a time zone"
        assert f"{run['run']} {begun.astimezone():%Y-%m-%d %H:%M}" in text
        assert run["status"] in text
    if "epsilon" in output:
        pld, rdp = (epsilon_text_rounded_up(output["epsilon"][name]) for name in ("pld", "rdp"))
        assert f"epsilon {pld} (PLD), {rdp} (RDP)" in text


def test_exit_codes_of_partial_results_and_faults(
    folder: Path, command: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flare_site, "process_id", lambda site: None)
    for group in ("node", "server"):
        code, out, _ = command(group, "status", group, "--json")
        assert (code, json.loads(out)["process"]) == (1, None)
    Path("node/data.npz").unlink()
    code, out, err = command("node", "check", "node", "--json")
    faults = json.loads(out)["faults"]
    assert (code, len(faults)) == (2, 1)
    assert err == f"fedstill: {' '.join(faults[0].split())}\n"


def test_faults_are_printed_as_json(folder: Path, command: Main) -> None:
    """Faults are included in the JSON document, with the same exit code."""
    Path("node/audit.sqlite.head").unlink()
    with closing(AuditLog(Path("node/audit.sqlite"))):
        Path("node/audit.sqlite.head").write_text("no head")
    code, out, err = command("audit", "verify", "node", "--json")
    output = json.loads(out)
    assert (code, output["sound"]) == (2, False)
    assert err == f"fedstill: {output['trouble']}\n"
    Path("node/node.toml").write_text("name = ")
    code, out, err = command("node", "check", "node", "--json")
    (fault,) = json.loads(out)["faults"]
    assert (code, err) == (2, f"fedstill: {' '.join(fault.split())}\n")


def test_infinite_values_are_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"epsilon": {"pld": float("inf"), "rdp": 1.5}, "rows": (float("nan"), None)})
    assert json.loads(capsys.readouterr().out) == {"epsilon": {"pld": None, "rdp": 1.5}, "rows": [None, None]}


def test_all_commands_use_print_json() -> None:
    """``json.dumps`` writes NaN and Infinity, which are not valid JSON."""
    files = sorted(Path(cli.__file__).parent.glob("*.py"))
    assert [file.name for file in files if re.search(r"json\.dumps?\(", file.read_text("utf-8"))] == []
