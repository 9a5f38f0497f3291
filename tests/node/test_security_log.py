"""The security log: each line once, whole and in order, over several files, and what is noticed otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstill.node import owner_folder, security_log
from fedstill.node.security_log import FILE, HEAD, SecurityLog, SecurityLogError

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def log(tmp_path: Path) -> SecurityLog:
    security_log = SecurityLog(tmp_path)
    for number in range(5):
        security_log.write("joined", "aa", f"reason {number}", run=f"run-{number}")
    return security_log


def change(old: str, new: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        text = (folder / FILE).read_text()
        assert old in text
        (folder / FILE).write_text(text.replace(old, new))

    return apply


def keep(*lines: int) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        text = (folder / FILE).read_text().splitlines(keepends=True)
        (folder / FILE).write_text("".join(text[index] for index in lines))

    return apply


def test_lines_hold_actor_time_and_reason(log: SecurityLog, tmp_path: Path) -> None:
    lines = list(log.lines())
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5]
    assert (
        lines[2].items() >= {"event": "joined", "actor": "aa", "reason": "reason 2", "run": "run-2"}.items()
    )
    assert lines[0]["at"] <= lines[4]["at"]
    assert log.find_fault() is None
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("reason 2", "reason 9"), "line 3 is not as it was written"),
        (
            change('"reason":"reason 4"', '"reason":"reason 5"'),
            "line 5 is not as it was",
        ),
        (change('"line":3', '"line": 3'), "line 3 is not as it was written"),
        (keep(0, 1, 3, 4), "line 3 is missing"),
        (keep(0, 1, 3, 2, 4), "line 3 is missing"),
        (keep(1, 2, 3, 4), "begins at line 2, and no line says"),
        (keep(4), "begins at line 5, and no line says"),
        (keep(0, 1, 2), "ends at line 3, and its head at 5"),
        (keep(), "ends at line 0, and its head at 5"),
        (lambda folder: (folder / FILE).unlink(), "ends at line 0, and its head at 5"),
        (lambda folder: (folder / HEAD).unlink(), "head is missing"),
        (lambda folder: (folder / HEAD).write_text("{"), "damaged"),
    ],
)
def test_tampering_is_detected(
    log: SecurityLog, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(tmp_path)
    assert message in (log.find_fault() or "")


def test_truncated_log_is_not_extended(log: SecurityLog, tmp_path: Path) -> None:
    keep(0, 1, 2)(tmp_path)
    with pytest.raises(SecurityLogError, match="does not end as its head says"):
        log.write("joined", "aa", "more")


def test_incomplete_line_is_removed(log: SecurityLog, tmp_path: Path) -> None:
    with (tmp_path / FILE).open("a") as file:
        file.write('{"line":6,"at"')
    assert log.find_fault() is None
    log.write("joined", "aa", "sixth")
    assert [line["line"] for line in log.lines()] == [1, 2, 3, 4, 5, 6]
    assert log.find_fault() is None


def test_full_files_are_renamed_and_chain_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_log, "MAX_FILE_BYTES", 500)
    log = SecurityLog(tmp_path)
    for number in range(12):
        log.write("joined", "aa", str(number))
    older = sorted(tmp_path.glob("security-*.jsonl"))
    assert len(older) > 2
    assert [line["reason"] for line in log.lines()] == [str(number) for number in range(12)]
    assert log.find_fault() is None
    text = older[-1].read_text()
    older[-1].unlink()  # from the middle
    assert "is missing" in (log.find_fault() or "")
    older[-1].write_text(text.replace('"aa"', '"ab"', 1))
    assert "is not as it was written" in (log.find_fault() or "")


def test_archived_files_are_known_and_others_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Main
) -> None:
    folder, away = tmp_path / "node", tmp_path / "away"
    owner_folder.init_folder(folder, "clinic")
    monkeypatch.setattr(security_log, "MAX_FILE_BYTES", 500)
    log = SecurityLog(folder)
    log.record_policy({"policy.max_bytes": 1})
    for number in range(12):
        log.write("joined", "aa", str(number))
    older = sorted(folder.glob("security-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    text = older[0].read_text()
    older[0].unlink()  # by hand
    assert "no line says that those before were archived" in (log.find_fault() or "")
    with pytest.raises(SecurityLogError, match="no line says"):
        log.archive(away)
    older[0].write_text(text)
    named = older[-1].rename(folder / "security-99999.jsonl")  # as if more had been archived
    assert "does not end with the line that it is named after" in (log.find_fault() or "")
    named.rename(older[-1])
    away.mkdir()
    (away / older[0].name).write_text("other")
    with pytest.raises(SecurityLogError, match="exists already with other content"):
        log.archive(away)
    (away / older[0].name).write_text(text)  # of an earlier time that was cut short
    code, out, _ = command("node", "log", folder, "--archive", away)
    through = int(older[-1].stem.partition("-")[2])
    assert (code, f"from line {through + 1} on, as those before were archived" in out) == (0, True)
    assert {path.name for path in away.iterdir()} == {path.name for path in older}
    assert (away / older[0].name).read_text() == text
    assert not list(folder.glob("security-*.jsonl"))
    log.record_policy({"policy.max_bytes": 1})  # which is known still
    assert [line["event"] for line in log.lines()][-1] == "archived"
    assert log.archive(tmp_path / "again") == []
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    (folder / FILE).write_text("".join(lines[1:]))
    assert log.find_fault() is not None


def test_server_cannot_fill_log_with_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_log, "MAX_REFUSALS", 4)
    log = SecurityLog(tmp_path)
    for number in (0, 0, 1, 2, 3, 4, 5):
        log.record_refusal("aa", f"rule {number}", run="one")
    message = [line["reason"] for line in log.lines()]
    assert message == ["rule 0", "rule 1", "rule 2", "further lines of this process are in node.log only"]


def test_full_disk_share_stops_server_events_only(tmp_path: Path) -> None:
    log = SecurityLog(tmp_path, max_bytes=2000)
    for number in range(100):
        log.record_refusal("aa", f"rule {number}", run="one")
    refused = len(list(log.lines()))
    assert 5 < refused < 20
    assert security_log.log_size_bytes(tmp_path) < 2000 + 400
    log.write("approved", "owner", "it is sound", run="one")
    SecurityLog(tmp_path, max_bytes=2000).record_refusal("aa", "of another process", run="one")
    assert [line["event"] for line in log.lines()] == [*["refused"] * refused, "approved"]


def test_changed_rules_are_logged_once_by_name(tmp_path: Path) -> None:
    log = SecurityLog(tmp_path)
    for most in (1, 1, 2):
        SecurityLog(tmp_path).record_policy({"policy.max_bytes": most, "policy.hours": ""})
    first, second = log.lines()
    assert (first["event"], first["reason"], second["reason"]) == (
        "policy",
        "first start",
        "policy.max_bytes = 2",
    )


def test_server_texts_are_one_short_line(tmp_path: Path) -> None:
    log = SecurityLog(tmp_path)
    log.record_refusal("aa\n", "two\nlines\x1b[31m" + "x" * 10_000, run='r"}\n{')
    (text,) = (tmp_path / FILE).read_text().splitlines()
    assert len(text) < 2000
    assert json.loads(text)["reason"].startswith("two lines [31mxxx")
    assert log.find_fault() is None
