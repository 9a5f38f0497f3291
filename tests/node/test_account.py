"""The account of a data set: charged before release, once, by everybody together, and not to be edited."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fedstill.node.account import Account, Entry, LedgerError, Spent
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import ArgumentError, FedstillError

SECRET = 12345


class Refused(FedstillError):
    """A budget's word."""


def allow(spent: Spent) -> None:
    """No budget."""


def entry(number: int = 0, **other: Any) -> Entry:
    line: dict[str, Any] = {
        "run": "first",
        "node": "clinic",
        "question": "examine",
        "part": "answer",
        "content": "c0",
        "after": "a0",
        "questions": 1,
        "up": {"logits": 40, "critic": 4},
        "rule": "Laplace noise of scale 10",
        "price": {"laplace(10.0)": 2, "gaussian(1.1)": 1},
        "guarantee": True,
        **other,
    }
    return Entry(number=number, **line)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def fill(path: Path, rows: int, start: int = 0) -> None:
    with closing(Account(path, SECRET, durable=False)) as account:
        for number in range(start, start + rows):
            assert account.charge(entry(number), allow)


def edit(path: Path, *statements: str) -> None:
    """What somebody does who has the file and a copy of SQLite."""
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def anchor(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def copy(path: Path, to: Path) -> Path:
    to.mkdir()
    for file in path.parent.glob(path.name + "*"):
        shutil.copy(file, to)
    return to


# --- what is written ----------------------------------------------------------------------------------


def test_a_row_says_all_of_a_release_and_totals_add_up(path: Path) -> None:
    with closing(Account(path, SECRET)) as account:
        assert account.charge(entry(0), allow)
        assert account.charge(entry(1, price={"laplace(10.0)": 3}), allow)
        assert account.charge(entry(2, run="second", price={}, guarantee=False), allow)
        assert account.charge(entry(3, node="other"), allow)
        assert account.spent("clinic", "first") == Spent(
            {"laplace(10.0)": 5, "gaussian(1.1)": 1},
            {"laplace(10.0)": 5, "gaussian(1.1)": 1},
            bare_total=1,
            questions_run=2,
            questions=3,
            bytes=3 * 44,
        )
        both = {"laplace(10.0)": 5, "gaussian(1.1)": 1}
        assert account.spent("clinic", "second") == Spent({}, both, 1, 1, 1, 3, 3 * 44)
        assert account.spent("clinic", "third").total == {"laplace(10.0)": 5, "gaussian(1.1)": 1}
        assert account.spent("nobody", "first") == Spent({}, {})
        row = next(account.entries())
        assert [other["row"] for other in account.entries()] == [1, 2, 3, 4]
        account.verify()
    at = datetime.fromisoformat(row.pop("at"))
    assert at.utcoffset() == timedelta(0)
    assert abs(at.timestamp() - time.time()) < 60
    assert len(row.pop("hash")) == 64
    assert row == {
        "row": 1,
        "run": "first",
        "node": "clinic",
        "number": 0,
        "question": "examine",
        "part": "answer",
        "content": "c0",
        "after": "a0",
        "questions": 1,
        "up": {"logits": 40, "critic": 4},
        "rule": "Laplace noise of scale 10",
        "price": {"laplace(10.0)": 2, "gaussian(1.1)": 1},
        "bare": 0,
    }


def test_a_second_run_starts_from_what_the_first_spent(path: Path) -> None:
    fill(path, 3)
    seen: list[Spent] = []
    with closing(Account(path, SECRET)) as account:
        account.charge(entry(0, run="second"), seen.append)
    before = {"laplace(10.0)": 6, "gaussian(1.1)": 3}
    assert seen == [Spent({}, before, questions=3, bytes=3 * 44)]


@pytest.mark.parametrize(
    "other",
    [{"node": "b"}, {"run": "b"}, {"number": 1}, {"part": "gradient"}, {"content": "b"}, {"after": "b"}],
)
def test_the_same_release_is_charged_once_and_any_other_again(other: dict[str, Any], path: Path) -> None:
    with closing(Account(path, SECRET)) as account:
        assert account.charge(entry(), allow)
        asked: list[Spent] = []
        assert not account.charge(entry(rule="another", price={"laplace(1.0)": 9}), asked.append)
        assert asked == []  # not even the budget is asked
        assert sum(1 for _ in account.entries()) == 1
    with closing(Account(path, SECRET)) as account:
        assert not account.charge(entry(), allow)
        assert account.charge(entry(**{"number": 0, **other}), allow)
        assert sum(1 for _ in account.entries()) == 2


def test_what_the_budget_refuses_is_not_written(path: Path) -> None:
    def refuse(spent: Spent) -> None:
        raise Refused("no more")

    with closing(Account(path, SECRET)) as account:
        assert account.charge(entry(0), allow)
        before = account.spent("clinic", "first")
        with pytest.raises(Refused):
            account.charge(entry(1), refuse)
        assert account.spent("clinic", "first") == before
        assert account.charge(entry(1), allow)
        account.verify()


@pytest.mark.parametrize("wrong", [{"run": ""}, {"part": "settled"}, {"price": {"": 1}}, {"price": {"a": 0}}])
def test_what_can_be_no_entry(wrong: dict[str, Any]) -> None:
    account = Account(None, SECRET)
    with pytest.raises(ArgumentError):
        account.charge(entry(**wrong), allow)
    assert list(account.entries()) == []


@given(
    releases=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from("rs"),
            st.integers(0, 5),
            st.dictionaries(st.sampled_from("xyz"), st.integers(1, 9)),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_totals_are_those_of_a_slow_count(
    releases: list[tuple[str, str, int, dict[str, int], bool]],
) -> None:
    account = Account(None, SECRET)
    paid: dict[tuple[str, str, int], tuple[dict[str, int], bool]] = {}
    for node, run, number, price, sure in releases:
        fresh = (node, run, number) not in paid
        said = account.charge(entry(number, node=node, run=run, price=price, guarantee=sure), allow)
        assert said == fresh
        paid.setdefault((node, run, number), (price, sure))
    account.verify()
    for node in "ab":
        for run in "rs":
            here, total, bare_here, bare_total = Counter[str](), Counter[str](), 0, 0
            mine = [run for whose, run, _ in paid if whose == node]
            for (whose, where, _), (price, sure) in paid.items():
                if whose == node:
                    total.update(price)
                    bare_total += not sure
                    here.update(price if where == run else {})
                    bare_here += not sure and where == run
            counted = mine.count(run), len(mine), 44 * len(mine)
            assert account.spent(node, run) == Spent(here, total, bare_here, bare_total, *counted)
    account.close()


def test_many_threads_share_an_account(path: Path) -> None:
    account = Account(path, SECRET, durable=False)

    def work(name: str) -> None:
        for number in range(25):
            assert account.charge(entry(number, node=name), allow)

    threads = [threading.Thread(target=work, args=(f"node-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    account.verify()
    assert [account.spent(f"node-{i}", "first").total["gaussian(1.1)"] for i in range(4)] == [25] * 4
    account.close()
    assert '"row":100,' in anchor(path).read_text(encoding="utf-8")


def test_a_release_is_on_the_disk_when_it_is_charged(path: Path) -> None:
    """What SQLite promises with these settings; a power failure cannot be had in a test."""
    with closing(Account(path, SECRET)) as account:
        assert account._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert account._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


# --- many processes, and their end --------------------------------------------------------------------


@pytest.mark.timeout(150)
def test_killed_at_any_moment_it_never_shows_less_than_was_released(tmp_path: Path) -> None:
    """A process that charges and releases is killed 200 times, and every time another goes on from there."""
    path, released, chance = tmp_path / "ledger.sqlite", tmp_path / "released", random.Random(5)
    released.touch()
    between = 0
    for life in range(200):
        child = os.fork()
        if child == 0:  # a fork of this process starts in no time; nothing of SQLite is open in it
            _charge_until_killed(path, released)
        time.sleep(0.02 + chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not path.exists():
            continue
        out = released.read_text(encoding="utf-8").split()
        with closing(Account(path, SECRET, durable=False)) as account:
            assert account.trouble is None, life
            numbers = [row["number"] for row in account.entries()]
            spent = account.spent("clinic", "first").total.get("laplace(1.0)", 0)
        assert len(numbers) == len(set(numbers)) == spent  # nothing twice
        assert set(map(int, out)) <= set(numbers)  # nothing less
        assert len(numbers) <= len(out) + 1  # and no more than the one that was under way
        between += len(numbers) - len(out)
    assert len(out) > 100  # on a busy machine a life is short
    assert between > 10  # some were killed after the charge and before the reply


def _charge_until_killed(path: Path, released: Path) -> None:
    try:
        account = Account(path, SECRET)
        with released.open("ab", buffering=0) as file:
            number = len(released.read_bytes().split())
            while True:
                account.charge(entry(number, price={"laplace(1.0)": 1}), allow)
                file.write(b"%d\n" % number)  # the reply
                number += 1
    finally:
        os._exit(1)


SPENDER = """
import pathlib, sys
from fedstill.node.account import Account, Entry, Spent
def check(spent: Spent) -> None:
    if spent.total.get("laplace(1.0)", 0) + 3 > 200:
        raise OverflowError
account, paid = Account(pathlib.Path(sys.argv[1]), 12345, durable=False), 0
try:
    for number in range(1000):
        run = f"run-{sys.argv[2]}"
        entry = Entry(run, "n", number, "q", "answer", "", "", {}, "rule", {"laplace(1.0)": 3}, True)
        paid += account.charge(entry, check)
except OverflowError:
    print(paid)
account.close()
"""


def test_processes_together_cannot_overspend(path: Path) -> None:
    """Three start at once on a file that is not there yet, and spend 3 a release, of 200."""
    command = [sys.executable, "-c", SPENDER, str(path)]
    spenders = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(3)
    ]
    said = [spender.communicate(timeout=60) for spender in spenders]
    assert [err for _, err in said] == [b""] * 3
    paid = [int(out) for out, _ in said]
    assert sum(paid) == 66
    with closing(Account(path, SECRET)) as account:
        account.verify()
        assert account.spent("n", "run-0").total == {"laplace(1.0)": 198}
        rows = Counter(row["run"] for row in account.entries())
    assert [rows[f"run-{i}"] for i in range(3)] == paid
    assert '"row":66,' in anchor(path).read_text(encoding="utf-8")


def test_two_accounts_of_one_file_take_turns(path: Path) -> None:
    with closing(Account(path, SECRET)) as one, closing(Account(path, SECRET)) as two:
        for number in range(6):
            (one if number % 2 else two).charge(entry(number), allow)
        assert not one.charge(entry(4), allow)
        assert one.spent("clinic", "first") == two.spent("clinic", "first")
        one.verify()
        two.verify()


def test_an_anchor_is_not_put_back_by_a_process_that_was_slower(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Account(path, SECRET)) as slow, closing(Account(path, SECRET)) as quick:
        write = slow._write_anchor

        def later() -> None:
            quick.charge(entry(1), allow)
            write()

        monkeypatch.setattr(slow, "_write_anchor", later)
        slow.charge(entry(0), allow)
        assert '"row":2,' in anchor(path).read_text(encoding="utf-8")
        slow.verify()


# --- trouble ------------------------------------------------------------------------------------------


EDITS = {
    "an edited price": (
        ["UPDATE rows SET price = '{}' WHERE row = 4", "UPDATE totals SET times = times - 1"],
        "row 4 is not as it was written",
    ),
    "an edited time": (["UPDATE rows SET at = '2020' WHERE row = 4"], "row 4 is not as it was written"),
    "a guarantee": (["UPDATE rows SET bare = 1 WHERE row = 2"], "row 2 is not as it was written"),
    "a deleted row": (["DELETE FROM rows WHERE row = 4"], "row 4 is missing"),
    "the first row": (["DELETE FROM rows WHERE row = 1"], "row 1 is missing"),
    "the last row": (["DELETE FROM rows WHERE row = 6"], "older copy: it ends at row 5, and"),
    "all rows": (["DELETE FROM rows", "DELETE FROM totals"], "ends at row 0"),
    "swapped rows": (
        ["UPDATE rows SET row = 40 WHERE row = 3", "UPDATE rows SET row = 3 WHERE row = 4",
         "UPDATE rows SET row = 4 WHERE row = 40"],
        "row 3 is not as it was written",
    ),
    "moved up": (
        ["DELETE FROM rows WHERE row = 4", "UPDATE rows SET row = row - 1 WHERE row > 4"],
        "row 4 is not as it was written",
    ),
    "totals": (["UPDATE totals SET times = 1 WHERE run = 'first'"], "totals does not add up"),
    "totals of all runs": (["UPDATE totals SET times = 1 WHERE run = ''"], "totals does not add up"),
    "no totals": (["DELETE FROM totals"], "totals does not add up"),
    "a price that is none": (["UPDATE rows SET price = 'x' WHERE row = 4"], "row 4 is not as it was written"),
    "bytes": (["UPDATE rows SET price = x'ff' WHERE row = 4"], "row 4 is not as it was written"),
    "a row before the first": (
        ["INSERT INTO rows SELECT -1, at, run, node, 999, question, part, content, after, questions, up, "
         "rule, price, bare, hash, seal FROM rows WHERE row = 2"],
        "row -1 is none that it has written",
    ),
    "a trigger": (
        ["CREATE TRIGGER mine AFTER INSERT ON rows BEGIN DELETE FROM totals; END"],
        "'mine' in it is not as it was made",
    ),
    "a table": (["CREATE TABLE mine (a)"], "'mine' in it is not as it was made"),
    "no index": (["DROP INDEX releases"], "INDEX releases .* in it is not as it was made"),
    "a seal": (["UPDATE rows SET seal = '' WHERE row = 4"], "row 4 was not sealed with this node's secret"),
}  # fmt: skip


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_ledger_is_refused_until_its_owner_settles_it(kind: str, path: Path) -> None:
    fill(path, 6)
    statements, told = EDITS[kind]
    edit(path, *statements)
    with closing(Account(path, SECRET)) as account:
        with pytest.raises(LedgerError, match=told):
            account.verify()
        rows = sum(1 for _ in account.entries())
        for number in (0, 99):  # not even what was paid for
            with pytest.raises(LedgerError, match=f"{told}.*fedstill ledger settle"):
                account.charge(entry(number), allow)
        assert sum(1 for _ in account.entries()) == rows
        account.settle("I did that")
        account.verify()
        assert account.charge(entry(99), allow)
        *_, settled, _ = account.entries()
        assert (settled["part"], settled["rule"], settled["row"]) == ("settled", "I did that", 7)
    with closing(Account(path, SECRET)) as account:
        account.verify()
        spent = account.spent("clinic", "first")
        assert spent.total == spent.run
        assert spent.total["gaussian(1.1)"] >= 7  # six rows and one: nothing was gained
        assert spent.total["laplace(10.0)"] >= 14
    edit(path, "UPDATE rows SET question = 'other' WHERE row = (SELECT min(row) FROM rows)")
    with closing(Account(path, SECRET)) as account, pytest.raises(LedgerError, match="row"):
        account.verify()  # what was settled is settled as it was


def test_rolling_back_gains_nothing(path: Path) -> None:
    """An older copy is a sound chain; settled, each run and node pays again what the copy does not show."""
    fill(path, 3)
    old = copy(path, path.parent / "old")
    with closing(Account(path, SECRET)) as account:
        account.charge(entry(3), allow)
        account.charge(entry(0, run="second", price={"laplace(2.0)": 5}), allow)
        account.charge(entry(1, run="second", price={}, guarantee=False), allow)
        account.charge(entry(0, node="other"), allow)
        wanted = [account.spent(node, run) for node in ("clinic", "other") for run in ("first", "second")]
    (old / path.name).replace(path)
    with closing(Account(path, SECRET)) as account:
        with pytest.raises(LedgerError, match="it ends at row 3, and its anchor at row 7"):
            account.charge(entry(50), allow)
        account.settle("the disk was restored from a backup")
        again = [account.spent(node, run) for node in ("clinic", "other") for run in ("first", "second")]
        assert again == wanted
        assert [row["row"] for row in account.entries()] == [1, 2, 3, 8, 9, 10]
    with closing(Account(path, SECRET)) as account:
        account.verify()
    (old / anchor(path).name).replace(anchor(path))
    with closing(Account(path, SECRET)) as account:  # the ledger is ahead of an older anchor, as after a kill
        account.verify()
    assert '"row":10,' in anchor(path).read_text(encoding="utf-8")


def test_a_copy_put_back_under_a_process_that_has_it_open(path: Path) -> None:
    fill(path, 3)
    old = copy(path, path.parent / "old")
    with closing(Account(path, SECRET)) as account:
        account.charge(entry(3), allow)
        (old / path.name).replace(path)
        with pytest.raises(LedgerError, match="replaced by another file"):
            account.charge(entry(4), allow)
        path.unlink()
        with pytest.raises(LedgerError, match="replaced by another file"):
            account.charge(entry(4), allow)


def test_rows_deleted_under_a_process_that_has_it_open(path: Path) -> None:
    fill(path, 3)
    with closing(Account(path, SECRET)) as account:
        edit(path, "DELETE FROM rows WHERE row = 3")
        with pytest.raises(LedgerError, match="row 3"):
            account.charge(entry(4), allow)
        with closing(Account(path, SECRET)) as owner:
            owner.settle("a mistake")
        assert account.charge(entry(4), allow)  # the owner has settled it meanwhile
        account.verify()
        assert account.spent("clinic", "first").total["gaussian(1.1)"] == 4


def test_totals_edited_under_a_process_that_has_it_open_give_no_budget_back(path: Path) -> None:
    fill(path, 3)
    with closing(Account(path, SECRET)) as account:
        edit(path, "UPDATE totals SET times = 1")
        seen: list[Spent] = []
        with pytest.raises(LedgerError, match="totals does not add up"):
            account.charge(entry(4), seen.append)
        assert not seen, "no budget was asked by them"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.unlink(), "anchor ledger.sqlite.head is missing"),
        (lambda file: file.write_bytes(b""), "head is damaged: it is not whole"),
        (lambda file: file.write_bytes(file.read_bytes()[:-40]), "head is damaged"),
        (lambda file: file.write_bytes(b"\xff" * 20), "head is damaged"),
        (lambda file: file.write_text(file.read_text().replace('"row":4', '"row":3')), "seal does not fit"),
        (lambda file: file.write_text(file.read_text().replace('":8,', '":1,')), "seal does not fit"),
    ],
)
def test_a_damaged_anchor(damage: Any, told: str, path: Path) -> None:
    fill(path, 4)
    before = anchor(path).read_bytes()
    damage(anchor(path))
    assert not anchor(path).exists() or anchor(path).read_bytes() != before
    with closing(Account(path, SECRET)) as account:
        with pytest.raises(LedgerError, match=told):
            account.charge(entry(9), allow)
        account.settle("looked at it")
        account.verify()
        assert account.spent("clinic", "first").total == {"laplace(10.0)": 8, "gaussian(1.1)": 4}
    with closing(Account(path, SECRET)) as account:
        account.verify()


def test_a_ledger_that_is_gone_is_paid_again_from_its_anchor(path: Path) -> None:
    fill(path, 4)
    path.unlink()
    with closing(Account(path, SECRET)) as account:
        with pytest.raises(LedgerError, match="ends at row 0, and its anchor at row 4"):
            account.charge(entry(9), allow)
        account.settle("a cleaner")
        assert account.spent("clinic", "first").run == {"laplace(10.0)": 8, "gaussian(1.1)": 4}
        with pytest.raises(LedgerError, match="nothing is wrong"):
            account.settle("once more")
    with closing(Account(path, SECRET)) as account:
        account.verify()


def test_a_kill_before_the_anchor_is_written_is_no_trouble(path: Path) -> None:
    fill(path, 1)
    for rows in (1, 5):
        behind = anchor(path).read_bytes()
        fill(path, rows, start=rows)
        anchor(path).write_bytes(behind)
        with closing(Account(path, SECRET)) as account:
            account.verify()
        assert anchor(path).read_bytes() != behind


def test_a_kill_between_settling_and_the_anchor_is_settled(path: Path) -> None:
    fill(path, 5)
    before = anchor(path).read_bytes()
    edit(path, "DELETE FROM rows WHERE row > 3")
    with closing(Account(path, SECRET)) as account:
        account.settle("a mistake")
        spent = account.spent("clinic", "first")
    anchor(path).write_bytes(before)  # it names row 5, which is gone
    with closing(Account(path, SECRET)) as account:
        account.verify()
        assert account.spent("clinic", "first") == spent
        assert spent.total["gaussian(1.1)"] == 5
    assert anchor(path).read_bytes() != before


def test_a_chain_made_anew_without_the_secret(path: Path) -> None:
    """Somebody writes a whole new ledger; the plain hashes fit, the seals do not."""
    fill(path, 3)
    for file in (path, anchor(path)):
        file.unlink()
    with closing(Account(path, SECRET + 1)) as forger:
        forger.charge(entry(0), allow)
        forger.verify()
    with closing(Account(path, None, read_only=True)) as account:
        account.verify()
    with closing(Account(path, SECRET)) as account:
        with pytest.raises(LedgerError, match="row 1 was not sealed with this node's secret"):
            account.charge(entry(4), allow)
        edit(path, "UPDATE rows SET part = 'settled', seal = 'x'")
        with pytest.raises(LedgerError, match="row 1"):
            account.verify()


def test_an_anchor_of_another_ledger_of_this_node(path: Path) -> None:
    fill(path, 3)
    other = path.parent / "other.sqlite"
    with closing(Account(other, SECRET)) as account:
        account.charge(entry(7), allow)
    shutil.copy(anchor(other), anchor(path))
    with closing(Account(path, SECRET)) as account, pytest.raises(LedgerError, match="row 1 is not the row"):
        account.verify()


def test_files_that_are_no_ledger(path: Path) -> None:
    path.write_bytes(b"no database at all, and rather longer than a header of SQLite" * 20)
    with pytest.raises(LedgerError, match="cannot be read any more"):
        Account(path, SECRET)
    path.unlink()
    edit(path, "CREATE TABLE mine (x)")
    with pytest.raises(LedgerError, match="is no ledger"):
        Account(path, SECRET)
    with pytest.raises(LedgerError, match="cannot be used: unable to open"):
        Account(path.parent / "nowhere" / "ledger.sqlite", SECRET)
    with pytest.raises(ArgumentError, match="only to read"):
        Account(None, None)


@pytest.fixture
def reader(path: Path) -> Iterator[Account]:
    fill(path, 3)
    account = Account(path, None, read_only=True)
    yield account
    account.close()


def test_reading_changes_nothing(path: Path, reader: Account) -> None:
    anchor(path).unlink()
    with closing(Account(path, None, read_only=True)) as account, pytest.raises(LedgerError, match="missing"):
        account.verify()
    assert not anchor(path).exists()
    assert reader.spent("clinic", "first").total == {"laplace(10.0)": 6, "gaussian(1.1)": 3}
    with pytest.raises(LedgerError, match="read"):
        reader.charge(entry(9), allow)
    with pytest.raises(LedgerError, match="unable to open"):
        Account(path.parent / "none.sqlite", None, read_only=True)


def test_an_edit_is_seen_without_the_secret_too(path: Path) -> None:
    fill(path, 3)
    edit(path, "UPDATE rows SET rule = 'none' WHERE row = 2")
    with closing(Account(path, None, read_only=True)) as account, pytest.raises(LedgerError, match="row 2"):
        account.verify()


def test_a_disk_that_cannot_be_written_releases_nothing(path: Path) -> None:
    with closing(Account(path, SECRET)) as account:
        account.charge(entry(0), allow)
        size = account._db.execute("PRAGMA page_count").fetchone()[0]
        account._db.execute(f"PRAGMA max_page_count = {size}")  # a disk with no more room
        with pytest.raises(LedgerError, match="full"):
            account.charge(entry(1, rule="long " * 20_000), allow)
        account._db.execute("PRAGMA max_page_count = 1000000")
        assert account.charge(entry(1), allow)
        account.verify()


def test_an_anchor_that_cannot_be_written_releases_nothing_and_costs_once(path: Path) -> None:
    with closing(Account(path, SECRET)) as account:
        account.charge(entry(0), allow)
        blocker = path.with_name(path.name + ".head.new")
        blocker.mkdir()
        with pytest.raises(LedgerError, match="head: cannot be written"):
            account.charge(entry(1), allow)
        blocker.rmdir()
        assert not account.charge(entry(1), allow)  # it was written, and is paid for
        assert account.charge(entry(2), allow)
        assert account.spent("clinic", "first").total["gaussian(1.1)"] == 3


def test_a_hundred_thousand_rows_are_checked_in_seconds(path: Path) -> None:
    """At most 20 microseconds a row when nobody else wants the processor; three times that here."""
    with closing(Account(path, SECRET, durable=False)) as account:
        with account._db.turn():
            for number in range(20_000):
                account._take(account._append(account._state, entry(number), 0))
        start = time.process_time()
        account.verify()
        assert time.process_time() - start < 20_000 * 60e-6
