"""The command `fedstill privacy audit`: table, file, and exit code if a claim is refuted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstill.attacks import mechanism_audits
from fedstill.attacks.mechanism_audits import AuditFinding
from fedstill.cli.main import dispatch
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName

SOUND = AuditFinding("pate", "noisy votes", 4.377, 1.25, 3.5, False, 2000, 3.2)
BROKEN = AuditFinding("counts", "noisy label counts", 2.0, 2.5, None, True, 1, 0.4)


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the audits by stubs and return the list of their seeds."""
    run: list[int] = []

    def finds(finding: AuditFinding) -> mechanism_audits.Audit:
        def one(seed: int) -> AuditFinding:
            run.append(seed)
            return finding

        return one

    monkeypatch.setattr(mechanism_audits, "AUDITS", {"counts": (finds(BROKEN),), "pate": (finds(SOUND),) * 2})
    return run


def run(*words: str) -> None:
    dispatch(["privacy", "audit", *words])


def test_prints_one_table(seeds: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    run("--mechanism", "pate", "--seed=3")
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "mechanism",
        "what",
        "was",
        "attacked",
        "claimed",
        "shown",
        "as",
        "noise",
        "runs",
        "s",
    ]
    assert lines[0].split() == ["pate", "noisy", "votes", "4.38", "1.25", "3.50", "2000", "3"]
    assert max(map(len, lines[:2])) <= 80
    assert lines[-1] == "6.4 s in all."
    assert seeds == [3, 3]


def test_refuted_claim_exits_with_error(
    seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FedstillError, match="refuted: counts "):
        run("--out", str(tmp_path / "found.json"), "--json")
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "found.json").read_text())
    with pytest.raises(FedstillError, match="refuted: counts "):
        run("--out", str(tmp_path / "found.json"))
    assert capsys.readouterr().out.splitlines()[1].split()[-4:] == ["-", "1", "0", "REFUTED"]
    record = json.loads((tmp_path / "found.json").read_text())
    assert [finding["refuted"] for finding in record["findings"]] == [True, False, False]
    assert (record["seed"], record["delta"], record["confidence"]) == (0, 1e-5, 0.95)
    assert seeds == [0, 0, 0] * 2


def test_rejects_invalid_arguments_before_audits(seeds: list[int], tmp_path: Path) -> None:
    for words, error in (
        (["--mechanism", "pats"], UnknownName),
        (["--seed", "-1"], ArgumentError),
        (["--sed=1"], UnknownName),
        (["pate"], ArgumentError),
    ):
        with pytest.raises(error):
            run(*words)
    assert seeds == []
    with pytest.raises(OSError, match="directory"):
        run("--mechanism", "pate", "--out", str(tmp_path))
