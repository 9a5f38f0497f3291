"""Audit log: charges before releases, idempotence, concurrent processes, and detection of damage."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.node import audit_database, audit_log
from fedstill.node.audit_entries import Entry, check_entry, parse_entry_fields
from fedstill.node.audit_head import AuditLogHead
from fedstill.node.audit_log import AuditError, AuditLog, Charge, Spending
from tests.support.audit_logs import edit, entry, fill, head
from tests.support.processes import FORKING

EVENTS = ["gaussian(1.1)", "laplace(10.0)", "pure(2.0)"]


class Refused(FedstillError):
    """Refusal by a budget."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.sqlite"


def copy(path: Path, to: Path) -> Path:
    to.mkdir()
    for file in path.parent.glob(path.name + "*"):
        shutil.copy(file, to)
    return to


# --- entries ------------------------------------------------------------------------------------------


def test_entry_holds_release_and_totals_add_up(path: Path) -> None:
    with closing(AuditLog(path)) as audit:
        assert audit.charge(entry(0))
        assert audit.charge(entry(1, cost={"laplace(10.0)": 3}))
        assert audit.charge(entry(2, run="second", cost={}, no_guarantee=1))
        assert audit.charge(entry(3, node="other"))
        assert audit.spending("clinic", "first") == Spending(
            {"laplace(10.0)": 5, "gaussian(1.1)": 1},
            {"laplace(10.0)": 5, "gaussian(1.1)": 1},
            total_no_guarantee=1,
            run_queries=2,
            total_queries=3,
            total_bytes=3 * 44,
        )
        both = {"laplace(10.0)": 5, "gaussian(1.1)": 1}
        assert audit.spending("clinic", "second") == Spending({}, both, 1, 1, 1, 3, 3 * 44)
        assert audit.spending("clinic", "third").total_events == {"laplace(10.0)": 5, "gaussian(1.1)": 1}
        assert audit.spending("nobody", "first") == Spending({}, {})
        row = next(audit.entries())
        assert [other["entry"] for other in audit.entries()] == [1, 2, 3, 4]
        audit.verify()
    at = datetime.fromisoformat(row.pop("at"))
    assert at.utcoffset() == timedelta(0)
    assert abs(at.timestamp() - time.time()) < 60
    assert len(row.pop("hash")) == 64
    fields = {name: value for name, value in row.items() if value}  # missing fields are empty
    assert fields == {"entry": 1, **{name: value for name, value in vars(entry()).items() if value}}
    assert fields["payer"] == "clinic"


@pytest.mark.parametrize(
    "other",
    [
        {"node": "b"},
        {"run": "b"},
        {"number": 1},
        {"part": "gradient"},
        {"content_hash": "b"},
        {"history_hash": "b"},
        {"release_hash": "b"},
    ],
)
def test_equal_release_is_charged_once(other: dict[str, Any], path: Path) -> None:
    with closing(AuditLog(path)) as audit:
        assert audit.charge(entry())
        spendings: list[Callable[[], Spending]] = []
        assert audit.charge(entry(rule="another", cost={"laplace(1.0)": 9}), spendings.append) == 1
        assert spendings == []  # the budget is not even checked
        assert sum(1 for _ in audit.entries()) == 1
    with closing(AuditLog(path)) as audit:
        assert audit.charge(entry()) == 1
        assert audit.charge(entry(**{"number": 0, **other})) == 2
        assert sum(1 for _ in audit.entries()) == 2


def test_counts_responses_and_further_gradients_by_query() -> None:
    """The first gradient belongs to its response; a repeated release counts if it differs."""
    with closing(AuditLog(None)) as audit:

        def count(**other: Any) -> int:
            audit.charge(entry(**other))
            return audit.totals.response_counts["first", "clinic", "predict_logits"]

        assert count() == 1
        assert count() == 1
        assert count(part="gradient") == 1
        assert count(part="gradient", release_hash="b") == 2
        assert count(release_hash="b") == 3
        assert count(number=1) == 4
        assert count(number=2, query="count_labels") == count(number=2, run="second") == 4


def test_several_charges_are_one_transaction(path: Path) -> None:
    with closing(AuditLog(path)) as audit:
        seen: list[int] = []
        charges = [
            Charge(entry(n), lambda spending: seen.append(spending().total_queries)) for n in (0, 1, 1, 2)
        ]
        statements: list[str] = []
        audit._database.connection.set_trace_callback(statements.append)
        assert audit.charge_all(charges) == [1, 2, 2, 3], "an equal entry is written once"
        assert [s for s in statements if s.startswith("BEGIN")] == ["BEGIN IMMEDIATE"] * 2, "log and head"
        assert seen == [0, 1, 2], "each check gets the charges before it"
        audit.verify()
    lone = path.with_name("lone.sqlite")
    with closing(AuditLog(lone)) as audit:
        for number in range(3):
            audit.charge(entry(number))
    texts = []
    for file in (path, lone):
        with closing(AuditLog(file, read_only=True)) as audit:
            texts.append([{**row, "at": "", "hash": ""} for row in audit.entries()])
    assert texts[0] == texts[1], "the same entries as one by one"


@pytest.mark.parametrize("failing", ["check", "commit"])
def test_no_charge_is_written_if_one_fails(path: Path, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(spending: Callable[[], Spending]) -> None:
        raise Refused("no more")

    with closing(AuditLog(path)) as audit:
        audit.charge(entry(0))
        before = audit.spending("clinic", "first"), audit.last_hash
        if failing == "check":
            with pytest.raises(Refused):
                audit.charge_all([Charge(entry(1)), Charge(entry(2), refuse)])
        else:
            execute = audit._database.execute

            def full(statement: str, *values: Any) -> Any:
                if statement == "COMMIT" and audit._last_number == 3:
                    raise sqlite3.OperationalError("database or disk is full")
                return execute(statement, *values)

            monkeypatch.setattr(audit._database, "execute", full)
            with pytest.raises(AuditError, match="full"):
                audit.charge_all([Charge(entry(1)), Charge(entry(2))])
            monkeypatch.undo()
        assert (audit.spending("clinic", "first"), audit.last_hash) == before
        assert [row["number"] for row in audit.entries()] == [0]
        assert audit.charge_all([Charge(entry(1)), Charge(entry(2))]) == [2, 3], "a repeated attempt"
        audit.verify()


def test_refused_charge_is_not_written(path: Path) -> None:
    def refuse(spending: Callable[[], Spending]) -> None:
        raise Refused("no more")

    with closing(AuditLog(path)) as audit:
        assert audit.charge(entry(0))
        before = audit.spending("clinic", "first")
        with pytest.raises(Refused):
            audit.charge(entry(1), refuse)
        assert audit.spending("clinic", "first") == before
        assert audit.charge(entry(1))
        audit.verify()


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": ""},
        {"part": "accepted"},
        {"cost": {"": 1}},
        {"cost": {"rubbish": 1}},
        {"cost": {"gaussian(1.1)": 0}},
        {"cost": {"gaussian(1.1)": 2**53}},
        {"up": {"logits": 2**53}},
        {"training_cost": {"gaussian(1.1)": 2**53}},
        {"number": 2**53},
        {"no_guarantee": True},
        {"rule": "\ud800"},
        {"content_hash": ["c0"]},
    ],
)
def test_rejects_invalid_entries(wrong: dict[str, Any]) -> None:
    audit = AuditLog(None)
    (name,) = wrong
    with pytest.raises(ArgumentError, match=f"^invalid {name} of an entry = "):
        audit.charge(entry(**{"number": 0, **wrong}))
    assert list(audit.entries()) == []
    audit.verify()


VALUES = st.one_of(
    st.sampled_from(
        ["", "b", "refused", "accepted", "response", "\ud800", 0, 1, -1, 2**53, 0.0, False, None]
    ),
    st.dictionaries(st.sampled_from(["logits", "gaussian(1.1)", ""]), st.sampled_from([0, 1, 2**53, True])),
    st.dictionaries(st.sampled_from(["rule", "\ud800"]), st.sampled_from(["", "b", 1])),
    st.sampled_from([[], (), ["b"]]),
)


@given(fields=st.dictionaries(st.sampled_from([*vars(entry())]), VALUES, max_size=4))
def test_checks_entries_as_their_lines_are_read(fields: dict[str, Any]) -> None:
    """An entry is valid exactly if the line that it writes restores all of its fields."""
    written = Entry(**{**vars(entry()), **fields})
    try:
        restored = parse_entry_fields(written.to_line("")) or {}
    except (TypeError, ValueError):
        restored = {}
    same = [type(restored.get(name)) is type(value) for name, value in vars(written).items()]
    if all(same) and restored == {"at": "", **vars(written)}:
        check_entry(written)
    else:
        with pytest.raises(ArgumentError):
            check_entry(written)


@given(
    releases=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from("rs"),
            st.integers(0, 5),
            st.dictionaries(st.sampled_from(EVENTS), st.integers(1, 9)),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_totals_match_naive_count(
    releases: list[tuple[str, str, int, dict[str, int], bool]],
) -> None:
    audit = AuditLog(None)
    charged: dict[tuple[str, str, int], tuple[dict[str, int], bool]] = {}
    for node, run, number, cost, sure in releases:
        fresh = (node, run, number) not in charged
        before = sum(1 for _ in audit.entries())
        entry_id = audit.charge(entry(number, node=node, run=run, cost=cost, no_guarantee=int(not sure)))
        assert (entry_id > before) == fresh
        charged.setdefault((node, run, number), (cost, sure))
    audit.verify()
    for node in "ab":
        for run in "rs":
            here, total, bare_here, bare_total = Counter[str](), Counter[str](), 0, 0
            mine = [run for whose, run, _ in charged if whose == node]
            for (whose, where, _), (cost, sure) in charged.items():
                if whose == node:
                    total.update(cost)
                    bare_total += not sure
                    here.update(cost if where == run else {})
                    bare_here += not sure and where == run
            counted = mine.count(run), len(mine), 44 * len(mine)
            assert audit.spending(node, run) == Spending(here, total, bare_here, bare_total, *counted)
    audit.close()


def test_many_threads_share_a_log(path: Path) -> None:
    audit = AuditLog(path, durable=False)

    def charge_entries(name: str) -> None:
        for number in range(25):
            assert audit.charge(entry(number, node=name))

    threads = [threading.Thread(target=charge_entries, args=(f"node-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    audit.verify()
    assert [audit.spending(f"node-{i}", "first").total_events["gaussian(1.1)"] for i in range(4)] == [25] * 4
    audit.close()
    assert '"entry":100,' in head(path).read_text(encoding="utf-8")


def test_charged_release_is_on_disk(path: Path) -> None:
    """SQLite guarantees this with these settings; a test cannot cause a power failure."""
    with closing(AuditLog(path)) as audit:
        assert audit._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert audit._database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


# --- concurrent and killed processes --------------------------------------------------------------------


def test_killed_process_never_loses_charges(tmp_path: Path) -> None:
    """A process that charges and releases is killed 30 times; each time another one continues."""
    path, released, chance = tmp_path / "audit.sqlite", tmp_path / "released", random.Random(5)
    released.touch()
    between = 0
    for life in range(30):
        opened, signals = os.pipe()
        child = os.fork()
        if child == 0:  # forking is fast; no SQLite file is open in this process
            _charge_until_killed(path, released, signals)
        os.close(signals)
        if life % 4:  # three of four are killed after they opened the log, even on a busy machine
            os.read(opened, 1)
        time.sleep(0.02 + chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(opened)
        if not path.exists():
            continue
        out = released.read_text(encoding="utf-8").split()
        with closing(AuditLog(path, durable=False)) as audit:
            assert audit.fault is None, life
            numbers = [row["number"] for row in audit.entries()]
            spent = audit.spending("clinic", "first").total_events.get("laplace(1.0)", 0)
        assert len(numbers) == len(set(numbers)) == spent  # no charge twice
        assert set(map(int, out)) <= set(numbers)  # no charge lost
        assert len(numbers) % 2 == 0  # of two charges in one transaction, both or none
        assert len(numbers) <= len(out) + 2  # at most one transaction without its reply
        between += len(numbers) - len(out)
    assert len(out) > 15
    assert between > 2  # some were killed after the charge and before the reply


def _charge_until_killed(path: Path, released: Path, signals: int) -> None:
    try:
        audit = AuditLog(path)
        os.write(signals, b".")
        with released.open("ab", buffering=0) as file:
            number = len(released.read_bytes().split())
            while True:
                both = number, number + 1
                audit.charge_all([Charge(entry(each, cost={"laplace(1.0)": 1})) for each in both])
                file.write(b"%d\n%d\n" % both)  # the reply
                number += 2
    finally:
        os._exit(1)


def spend(path: Path, run: str, outputs: Path) -> None:
    """Spend 3 per release of a budget of 200; write the number of releases."""

    def check(spending: Callable[[], Spending]) -> None:
        if spending().total_events.get("laplace(1.0)", 0) + 3 > 200:
            raise OverflowError

    charged = 0
    with closing(AuditLog(path, durable=False)) as audit, suppress(OverflowError):
        for number in range(1000):
            one = Entry(run, "n", "n", number, "q", "response", cost={"laplace(1.0)": 3})
            charged += audit.charge(one, check) > 0
    outputs.write_text(str(charged))


def test_concurrent_processes_cannot_overspend(path: Path) -> None:
    """Three processes start at the same time on a file that does not exist yet."""
    outputs = [path.with_name(f"spent-{i}") for i in range(3)]
    spenders = [FORKING.Process(target=spend, args=(path, f"run-{i}", outputs[i])) for i in range(3)]
    for spender in spenders:
        spender.start()
    for spender in spenders:
        spender.join(60)
    assert [spender.exitcode for spender in spenders] == [0] * 3
    charged = [int(each.read_text()) for each in outputs]
    assert sum(charged) == 66
    with closing(AuditLog(path)) as audit:
        audit.verify()
        assert audit.spending("n", "run-0").total_events == {"laplace(1.0)": 198}
        rows = Counter(row["run"] for row in audit.entries())
    assert [rows[f"run-{i}"] for i in range(3)] == charged
    assert '"entry":66,' in head(path).read_text(encoding="utf-8")


def test_slower_process_does_not_overwrite_newer_head(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(AuditLog(path)) as slow, closing(AuditLog(path)) as quick:
        write = slow._write_head

        def later() -> None:
            quick.charge(entry(1))
            write()

        monkeypatch.setattr(slow, "_write_head", later)
        slow.charge(entry(0))
        assert '"entry":2,' in head(path).read_text(encoding="utf-8")
        slow.verify()


def test_charge_recomputes_head_row_of_its_run_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(AuditLog(path)) as audit:
        for number in range(20):
            audit.charge(entry(run=f"run-{number}"))
        made, row = [], audit_log.format_head_total

        def counted(payer: str, run: str, counts: Counter[str]) -> str:
            made.append(run)
            return row(payer, run, counts)

        monkeypatch.setattr(audit_log, "format_head_total", counted)
        audit.charge(entry(1, run="run-3"))
        audit.charge(entry(0, run="another"))
        assert made == ["run-3", "another"]
        head_read = AuditLogHead.read(head(path))
        assert head_read is not None
        assert head_read.totals == {names: spent for names, spent in audit.totals.events.items() if names[1]}
        assert (head_read.number, len(head_read.totals)) == (22, 21)


def test_log_file_appears_complete(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, met = os.link, []

    def record_link(made: Path, name: Path) -> None:
        met.append(name.exists())
        AuditLog(made, read_only=True).close()
        link(made, name)

    monkeypatch.setattr(os, "link", record_link)
    AuditLog(path).close()
    assert met == [False]

    def refuse(made: Path, name: Path) -> None:
        raise PermissionError("no links on this disk")

    monkeypatch.setattr(os, "link", refuse)
    other = path.with_name("other.sqlite")
    with closing(AuditLog(other)) as audit:
        assert audit.charge(entry()) == 1
    files = {path, head(path), other, head(other)}
    assert set(path.parent.iterdir()) == files  # no other file remains


# --- damage -------------------------------------------------------------------------------------------


EDITS = {
    "an edited price": (["UPDATE entries SET line = replace(line, ':2', ':1') WHERE entry = 4"], "entry 4"),
    "a deleted entry": (["DELETE FROM entries WHERE entry = 4"], "entry 4 is missing"),
    "the last entry": (["DELETE FROM entries WHERE entry = 6"], "older copy: it ends at entry 5, and"),
    "swapped entries": (
        ["UPDATE entries SET entry = 40 WHERE entry = 3", "UPDATE entries SET entry = 3 WHERE entry = 4",
         "UPDATE entries SET entry = 4 WHERE entry = 40"],
        "entry 3 is not as it was written",
    ),
    "moved up": (
        ["DELETE FROM entries WHERE entry = 4", "UPDATE entries SET entry = entry - 1 WHERE entry > 4"],
        "entry 4 is not as it was written",
    ),
    "a line that is none": (["UPDATE entries SET line = 'x' WHERE entry = 4"], "entry 4 is not"),
    "an entry before the first": (
        ["INSERT INTO entries SELECT -1, line, hash FROM entries WHERE entry = 2"], "entry 1 is missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", EDITS)
def test_edited_log_is_refused_until_accepted(kind: str, path: Path) -> None:
    fill(path, 6)
    statements, message = EDITS[kind]
    edit(path, *statements)
    with closing(AuditLog(path)) as audit:
        with pytest.raises(AuditError, match=message):
            audit.verify()
        rows = sum(1 for _ in audit.entries())
        for number in (0, 99):  # not even releases that are already charged
            with pytest.raises(AuditError, match=f"{message}.*fedstill audit accept"):
                audit.charge(entry(number))
        assert sum(1 for _ in audit.entries()) == rows
        audit.accept("I did that")
        audit.verify()
        assert audit.charge(entry(99))
        *_, settled, _ = audit.entries()
        assert (settled["part"], settled["rule"], settled["entry"]) == ("accepted", "I did that", 7)
    with closing(AuditLog(path)) as audit:
        audit.verify()
        spent = audit.spending("clinic", "first")
        assert spent.total_events == spent.run_events
        assert spent.total_events["gaussian(1.1)"] >= 7  # six rows and one: no charge was lost
        assert spent.total_events["laplace(10.0)"] >= 14
    edit(path, "UPDATE entries SET line = line || ' ' WHERE entry = (SELECT min(entry) FROM entries)")
    with closing(AuditLog(path)) as audit, pytest.raises(AuditError, match="entry 1 is"):
        audit.verify()  # an acceptance only holds for the damage at its time


def test_restored_copy_regains_no_budget(path: Path) -> None:
    """An older copy is a valid log; after acceptance each run and node is charged for what the copy lacks."""
    fill(path, 3)
    old = copy(path, path.parent / "old")
    with closing(AuditLog(path)) as audit:
        audit.charge(entry(3))
        audit.charge(entry(0, run="second", cost={"laplace(2.0)": 5}))
        audit.charge(entry(1, run="second", cost={}, no_guarantee=1))
        audit.charge(entry(0, node="other"))
        wanted = [audit.spending(node, run) for node in ("clinic", "other") for run in ("first", "second")]
    (old / path.name).replace(path)
    with closing(AuditLog(path)) as audit:
        with pytest.raises(AuditError, match=r"entry 3, .*head at 7"):
            audit.charge(entry(50))
        audit.accept("the disk was restored from a backup")
        again = [audit.spending(node, run) for node in ("clinic", "other") for run in ("first", "second")]
        assert again == wanted
        assert [row["entry"] for row in audit.entries()] == [1, 2, 3, 8, 9, 10]
    with closing(AuditLog(path)) as audit:
        audit.verify()
    (old / head(path).name).replace(head(path))
    with closing(AuditLog(path)) as audit:  # a log ahead of its head, as after a kill, is valid
        audit.verify()
    assert '"entry":10,' in head(path).read_text(encoding="utf-8")


def test_restored_copy_is_detected_by_open_process(path: Path) -> None:
    fill(path, 3)
    old = copy(path, path.parent / "old")
    with closing(AuditLog(path)) as audit:
        audit.charge(entry(3))
        (old / path.name).replace(path)
        with pytest.raises(AuditError, match="another file"):
            audit.charge(entry(4))
        path.unlink()
        with pytest.raises(AuditError, match="another file"):
            audit.charge(entry(4))


def test_restored_copy_with_its_head_is_detected_by_open_process(path: Path) -> None:
    """Also at the next attempts, which read the whole log again."""
    fill(path, 3)
    old = head(path).read_bytes()
    with closing(AuditLog(path)) as audit:
        audit.charge(entry(3))
        edit(path, "DELETE FROM entries WHERE entry > 3")
        head(path).write_bytes(old)
        for _ in range(3):
            with pytest.raises(AuditError, match="entry 4"):
                audit.charge(entry(4))
        audit.accept("restored from the backup of Monday")
        assert audit.charge(entry(4)) == 6, "used numbers are not reused"
        audit.verify()


def test_deleted_entries_are_detected_by_open_process(path: Path) -> None:
    fill(path, 3)
    with closing(AuditLog(path)) as audit:
        edit(path, "DELETE FROM entries WHERE entry = 3")
        with pytest.raises(AuditError, match="entry 3"):
            audit.charge(entry(4))
        with closing(AuditLog(path)) as owner:
            owner.accept("a mistake")
        assert audit.charge(entry(4))  # the owner has accepted the damage meanwhile
        audit.verify()
        assert audit.spending("clinic", "first").total_events["gaussian(1.1)"] == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "head audit.sqlite.head is missing"),
        (lambda file: file.write_bytes(b""), "head is damaged"),
        (lambda file: file.write_bytes(file.read_bytes()[:-40]), "head is damaged"),
        (lambda file: file.write_bytes(b"\xff" * 20), "head is damaged"),
        (
            lambda file: file.write_text(file.read_text().replace('"entry":4', '"entry":3')),
            "entry 3 differs from the one",
        ),
        (lambda file: file.write_text(file.read_text().replace('":8,', '":"8",')), "head is damaged"),
    ],
)
def test_damaged_head_is_reported(damage: Any, message: str, path: Path) -> None:
    fill(path, 4)
    before = head(path).read_bytes()
    damage(head(path))
    assert not head(path).exists() or head(path).read_bytes() != before
    with closing(AuditLog(path)) as audit:
        with pytest.raises(AuditError, match=message):
            audit.charge(entry(9))
        audit.accept("looked at it")
        audit.verify()
        assert audit.spending("clinic", "first").total_events == {"laplace(10.0)": 8, "gaussian(1.1)": 4}
    with closing(AuditLog(path)) as audit:
        audit.verify()


def test_missing_log_is_charged_again_from_head(path: Path) -> None:
    fill(path, 4)
    path.unlink()
    with closing(AuditLog(path)) as audit:
        with pytest.raises(AuditError, match=r"entry 0, .*head at 4"):
            audit.charge(entry(9))
        audit.accept("a cleaner")
        assert audit.spending("clinic", "first").run_events == {"laplace(10.0)": 8, "gaussian(1.1)": 4}
        with pytest.raises(AuditError, match="no fault"):
            audit.accept("once more")
    with closing(AuditLog(path)) as audit:
        audit.verify()


def test_kill_between_acceptance_and_head_keeps_acceptance(path: Path) -> None:
    fill(path, 5)
    before = head(path).read_bytes()
    edit(path, "DELETE FROM entries WHERE entry > 3")
    with closing(AuditLog(path)) as audit:
        audit.accept("a mistake")
        spent = audit.spending("clinic", "first")
    head(path).write_bytes(before)  # it names entry 5, which does not exist anymore
    with closing(AuditLog(path)) as audit:
        audit.verify()
        assert audit.spending("clinic", "first") == spent
        assert spent.total_events["gaussian(1.1)"] == 5
    assert head(path).read_bytes() != before


def test_rejects_other_files(path: Path) -> None:
    path.write_bytes(b"no database at all, and rather longer than a header of SQLite" * 20)
    with pytest.raises(AuditError, match="cannot be read"):
        AuditLog(path)
    path.unlink()
    edit(path, "CREATE TABLE mine (x)")
    with pytest.raises(AuditError, match="not an audit"):
        AuditLog(path)
    with pytest.raises(AuditError, match="unable to open"):
        AuditLog(path.parent / "nowhere" / "audit.sqlite")


@pytest.fixture
def reader(path: Path) -> Iterator[AuditLog]:
    fill(path, 3)
    audit = AuditLog(path, read_only=True)
    yield audit
    audit.close()


def test_reading_changes_nothing(path: Path, reader: AuditLog) -> None:
    head(path).unlink()
    with closing(AuditLog(path, read_only=True)) as audit, pytest.raises(AuditError, match="missing"):
        audit.verify()
    assert not head(path).exists()
    assert reader.spending("clinic", "first").total_events == {"laplace(10.0)": 6, "gaussian(1.1)": 3}
    with pytest.raises(AuditError, match="read"):
        reader.charge(entry(9))
    with pytest.raises(AuditError, match="unable to open"):
        AuditLog(path.parent / "none.sqlite", read_only=True)


def test_unwritable_disk_blocks_release(path: Path) -> None:
    with closing(AuditLog(path)) as audit:
        audit.charge(entry(0))
        size = audit._database.execute("PRAGMA page_count").fetchone()[0]
        audit._database.execute(f"PRAGMA max_page_count = {size}")  # simulates a full disk
        with pytest.raises(AuditError, match="full"):
            audit.charge(entry(1, rule="long " * 20_000))
        audit._database.execute("PRAGMA max_page_count = 1000000")
        assert audit.charge(entry(1))
        audit.verify()


def test_unwritable_head_blocks_release_and_charges_once(path: Path) -> None:
    with closing(AuditLog(path)) as audit:
        audit.charge(entry(0))
        blocker = path.with_name(path.name + ".head.part")
        blocker.mkdir()
        for _ in range(2):  # also at the second attempt
            with pytest.raises(AuditError, match=r"head: .*written"):
                audit.charge(entry(1))
        assert audit.charge(entry(0)) == 1  # the head contains this charge
        blocker.rmdir()
        assert audit.charge(entry(1)) == 2  # already written, so it is not charged again
        assert '"entry":2,' in head(path).read_text(encoding="utf-8")
        assert audit.charge(entry(2)) == 3
        assert audit.spending("clinic", "first").total_events["gaussian(1.1)"] == 3


def test_only_locked_file_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_database, "LOCK_TIMEOUT", 0.2)
    calls: list[str] = []

    def failing(*troubles: str) -> None:
        calls.append("tried")
        if len(calls) <= len(troubles):
            raise sqlite3.OperationalError(troubles[len(calls) - 1])

    audit_database._retry_while_locked(lambda: failing("database is locked", "database table is locked"))
    assert len(calls) == 3
    calls.clear()
    with pytest.raises(sqlite3.OperationalError, match="full"):
        audit_database._retry_while_locked(lambda: failing("database or disk is full"))
    assert len(calls) == 1
    calls.clear()
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        audit_database._retry_while_locked(lambda: failing(*["database is locked"] * 1000))


def test_privacy_unit_survives_lost_log(path: Path) -> None:
    """Otherwise an owner who changed nothing could not spend any more."""
    unit = "4 records of one patient"
    with closing(AuditLog(path)) as audit:
        audit.charge(entry(0, unit=unit))
        audit.charge(entry(1, unit=unit, run="second"))
        assert audit.totals.units("clinic") == audit.totals.units("clinic", "second") == {unit}
    path.unlink()
    with closing(AuditLog(path)) as audit:
        audit.accept("the disk broke")
        assert audit.totals.units("clinic") == audit.totals.units("clinic", "second") == {unit}
        assert audit.spending("clinic", "first").run_events == {"laplace(10.0)": 2, "gaussian(1.1)": 1}
