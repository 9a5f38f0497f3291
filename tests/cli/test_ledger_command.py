"""``fedstill ledger`` as a data officer meets it."""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from fedstill.node.account import DATA, Account, Entry, Spent
from fedstill.node.ledger import Ledger

from fedstill.cli import ledger, node
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.core.seeds import derive
from fedstill.node import anchor, owner
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.events import Event
from fedstill.runs import prepared

Capture = pytest.CaptureFixture[str]


def allow(spent: Spent) -> None:
    """No budget."""


def charge(
    account: Account, number: int, run: str = "spring", node: str = "clinic", sure: bool = True
) -> None:
    entry = Entry(
        run=run,
        node=node,
        number=number,
        question="examine",
        part="answer",
        content=str(number),
        after="",
        up={"logits": 2560, "critic": 256},
        rule="logits clamped to 5, Laplace noise of scale 100",
        price={"laplace(10.0)": 2, "gaussian(4.0)": 1},
        guarantee=sure,
        questions=1,
    )
    assert account.charge(entry, allow)


def said(capsys: Capture, *words: object) -> str:
    """What a command prints; on a terminal of 80 columns."""
    ledger.main([str(word) for word in words])
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """A node's folder whose ledger has three releases, of two runs."""
    folder = tmp_path / "clinic"
    owner.init(folder)
    (folder / "node.toml").write_text('name = "clinic"\n', encoding="utf-8")
    with closing(Account(folder / "ledger.sqlite", owner.secret(folder))) as account:
        charge(account, 0)
        charge(account, 1)
        charge(account, 0, run="autumn")
    return folder


def edit(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        database.execute(statement)
        database.commit()


def test_show_says_what_left_when_where_to_and_at_which_price(clinic: Path, capsys: Capture) -> None:
    with closing(Account(clinic / "ledger.sqlite", owner.secret(clinic))) as account:
        rows = list(account.entries())
    out = said(capsys, "show", clinic)
    assert max(map(len, out.splitlines()[1:])) <= 80
    words = " ".join(out.split())
    for row in rows:
        assert row["at"][:10] in out
        assert row["at"][11:19] in out
    for what in ("spring", "autumn", "examine 0, answer", "examine 1, answer", "critic 256 B, logits"):
        assert what in words
    assert "Paid in all for clinic: 3 x gaussian(4), 6 x laplace(10)." in words
    assert words.count("A logits clamped to 5, Laplace noise of scale 100") == 1  # said once, for three rows
    assert "NOT SOUND" not in out


def test_show_counts_epsilon_for_each_run_and_for_all(
    clinic: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstill.privacy import accounting

    def stand_in(spent: dict[Event, int], delta: float, accountant: str) -> float:
        assert accountant == "pld"
        return sum(times / event.noise for event, times in spent.items()) + delta

    monkeypatch.setattr(accounting, "epsilon", stand_in)
    out = said(capsys, "show", clinic, "--delta", "1e-9")
    assert "delta 1e-09" in " ".join(out.split())
    lines = [line.split() for line in out.splitlines() if line.startswith("clinic")]
    assert lines == [
        ["clinic", "spring", "2", "0", "0.901"],  # 4/10 + 2/4, and what delta adds is rounded up
        ["clinic", "autumn", "1", "0", "0.451"],
        ["clinic", "all", "runs", "3", "0", "1.351"],
    ]


def test_show_counts_as_the_owners_budget_does_and_tells_what_is_left(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "clinic"
    owner.init(folder)
    limits = '[privacy]\nmechanism = "dp-sgd"\nepsilon = 8.0\ntotal_epsilon = 20.0\ndelta = 1e-6\n'
    price = {Event("laplace", 10.0): 2, Event("gaussian", 4.0): 1}
    with closing(Account(folder / "ledger.sqlite", owner.secret(folder))) as account:
        charge(account, 0, node=DATA)
        charge(account, 0, run="autumn", node=DATA)
    shown = {}
    for accountant in ("pld", "rdp"):
        text = f'name = "clinic"\n{limits}accountant = "{accountant}"\n'
        (folder / "node.toml").write_text(text, encoding="utf-8")
        out = said(capsys, "show", folder)
        lines = [line.split() for line in out.splitlines() if line.startswith(DATA)]
        assert [line[2] for line in lines] == ["spring", "autumn", "all"]
        one, all_runs = (
            epsilon(Counter({event: n * times for event, n in price.items()}), 1e-6, accountant)  # type: ignore[arg-type]
            for times in (1, 2)
        )
        assert float(lines[0][-2]) == pytest.approx(one, abs=1e-3)
        assert float(lines[0][-1]) == pytest.approx(8 - one, abs=1e-3)
        assert float(lines[2][-1]) == pytest.approx(20 - all_runs, abs=1e-3)
        assert f"Budgets, by {accountant.upper()}: a run has epsilon 8 at delta 1e-06" in out
        shown[accountant] = float(lines[0][-2])
    assert shown["pld"] + 0.01 < shown["rdp"]
    (folder / "node.toml").write_text('name = "clinic"\n', encoding="utf-8")
    out = said(capsys, "show", folder)
    assert "left\n" not in out.split("whose")[1]
    assert "Budgets" not in out


def test_show_shortens_long_runs_in_rows_alone(tmp_path: Path, capsys: Capture) -> None:
    run = "0123456789abcdef0123"
    with closing(Account(tmp_path / "ledger.sqlite", 1)) as account:
        charge(account, 0, run=run)
        charge(account, 1, run=run)
    rows, totals = said(capsys, "show", tmp_path).split("whose")
    assert rows.count("01234567…") == 2
    assert run not in rows
    assert run in totals


def test_rows_that_are_lost_are_told_after_a_settlement(clinic: Path, capsys: Capture) -> None:
    edit(clinic, "DELETE FROM rows WHERE row > 1")
    said(capsys, "settle", clinic, "--because", "restored from a backup")
    out = said(capsys, "show", clinic)
    assert "Rows 2 to 3 are lost, and their numbers are not used again." in out
    rows, totals = " ".join(out.split()).split("rule what is done before it leaves")
    assert "restored from a" in rows  # the reason is no rule
    assert "restored" not in totals


def test_without_the_secret_a_ledger_is_shown_and_a_new_one_takes_a_settlement(
    clinic: Path, capsys: Capture
) -> None:
    (clinic / "secret").unlink()
    out = said(capsys, "show", clinic)
    assert "Seals are not checked" in out
    assert "3 x gaussian(4)" in out
    assert "NOT SOUND" not in out
    with pytest.raises(FedstillError, match="`fedstill node init` makes a new one"):
        ledger.main(["settle", str(clinic), "--because", "lost"])
    node.main(["init", str(clinic)])
    told = capsys.readouterr().out
    assert "Noise is keyed anew" in told
    assert f"fedstill ledger settle {clinic} --because" in told
    assert "was not sealed with this node's secret" in said(capsys, "show", clinic)
    said(capsys, "settle", clinic, "--because", "the secret was lost")
    out = said(capsys, "show", clinic)
    assert "NOT SOUND" not in out
    assert "Seals are not checked" not in out
    assert "3 x gaussian(4)" in out


def test_a_file_that_is_no_ledger_is_left_where_it_is(clinic: Path, capsys: Capture) -> None:
    file = clinic / "data.npz"
    file.write_bytes(b"images and labels" * 1000)
    for command in ("show", "verify"):
        with pytest.raises(FedstillError) as told:
            ledger.main([command, str(file)])
        assert str(told.value) == f"{file} is no ledger"
    (clinic / "ledger.sqlite").write_bytes(b"once a ledger, as its anchor says" * 1000)
    with pytest.raises(FedstillError, match="move it away, and settle"):
        ledger.main(["show", str(clinic)])


def test_show_prints_the_epsilon_of_the_accountant(tmp_path: Path, capsys: Capture) -> None:
    """Pure noise of one event: epsilon is 1 over its scale at most, and at this delta hardly less."""
    folder = tmp_path / "run"
    folder.mkdir()
    entry = Entry(
        "r", "n", 0, "count", "answer", "", "", {"label counts": 80}, "rule", {"laplace(2.0)": 1}, True
    )
    with closing(Account(folder / "ledger.sqlite", 1)) as account:
        account.charge(entry, allow)
    (line,) = [line for line in said(capsys, "show", folder).splitlines() if line.startswith("n  ")]
    assert 0.49 < float(line.split()[-1]) <= 0.502


def test_where_something_left_without_a_guarantee_no_epsilon_is_shown(clinic: Path, capsys: Capture) -> None:
    with closing(Account(clinic / "ledger.sqlite", owner.secret(clinic))) as account:
        charge(account, 5, run="autumn", sure=False)
    out = said(capsys, "show", clinic)
    lines = [line for line in out.splitlines() if line.startswith("clinic")]
    assert ["no guarantee" in line for line in lines] == [False, True, True]


def test_show_last(clinic: Path, capsys: Capture) -> None:
    out = said(capsys, "show", clinic, "--last", "1")
    assert "These are the last 1 of 3 rows" in out
    assert out.count("examine") == 1
    assert "3 x gaussian(4)" in out  # totals are of all
    assert said(capsys, "show", clinic, "--last=0").count("examine") == 3


def test_what_is_paid_for_before_any_question_has_no_number(clinic: Path, capsys: Capture) -> None:
    entry = Entry("spring", "clinic", -1, "training", "training", "c", "", {}, "DP-SGD", {}, True)
    with closing(Account(clinic / "ledger.sqlite", owner.secret(clinic))) as account:
        account.charge(entry, allow)
    words = said(capsys, "show", clinic, "--last", 1).split()
    assert "training" in words
    assert "-1" not in words
    assert "free" in words


def test_verify_is_one_line_or_one_error(clinic: Path, capsys: Capture) -> None:
    out = said(capsys, "verify", clinic)
    assert out == f"{clinic / 'ledger.sqlite'}: 3 rows: rows, seals, totals and anchor agree\n"
    edit(clinic, "UPDATE rows SET price = '{}' WHERE row = 2")
    with pytest.raises(FedstillError, match="row 2 is not as it was written"):
        ledger.main(["verify", str(clinic)])
    assert "NOT SOUND: row 2 is not as it was written" in said(capsys, "show", clinic)


def test_without_the_secret_the_seals_are_not_checked_and_that_is_said(clinic: Path, capsys: Capture) -> None:
    elsewhere = clinic.parent / "elsewhere"
    elsewhere.mkdir()
    for file in clinic.glob("ledger.sqlite*"):
        shutil.copy(file, elsewhere)
    assert "seals take the node's secret, and were not checked" in said(capsys, "verify", elsewhere)
    edit(elsewhere, "UPDATE rows SET seal = 'x'")
    said(capsys, "verify", elsewhere / "ledger.sqlite")
    with pytest.raises(FedstillError, match="by its owner alone"):
        ledger.main(["settle", str(elsewhere), "--because", "why not"])
    edit(elsewhere, "DELETE FROM rows WHERE row = 3")
    with pytest.raises(FedstillError, match="older copy"):
        ledger.main(["verify", str(elsewhere)])
    edit(clinic, "UPDATE rows SET seal = 'x'")
    with pytest.raises(FedstillError, match="sealed"):  # the file in a node's folder has the node's secret
        ledger.main(["verify", str(clinic / "ledger.sqlite")])


def test_a_simulation_seals_with_its_seed(tmp_path: Path, capsys: Capture) -> None:
    assert ledger.FILE == prepared.LEDGER
    with closing(Account(tmp_path / "ledger.sqlite", derive(7, "ledger.sqlite"))) as account:
        charge(account, 0)
    (tmp_path / "config.toml").write_text('name = "x"\nseed = 7\n', encoding="utf-8")
    assert "1 row: rows, seals, totals" in said(capsys, "verify", tmp_path)
    (tmp_path / "config.toml").write_text('name = "x"\nseed = 8\n', encoding="utf-8")
    with pytest.raises(FedstillError, match="sealed"):
        ledger.main(["verify", str(tmp_path)])


def test_a_node_file_can_keep_its_ledger_elsewhere(clinic: Path, capsys: Capture) -> None:
    other = clinic.parent / "data of the clinic.sqlite"
    for file in list(clinic.glob("ledger.sqlite*")):
        file.rename(other.with_name(other.name + file.name.removeprefix("ledger.sqlite")))
    named = 'name = "clinic"\n[privacy]\nledger = "../data of the clinic.sqlite"\n'
    (clinic / "node.toml").write_text(named, encoding="utf-8")
    assert "3 rows: rows, seals" in said(capsys, "verify", clinic)


def test_settle_writes_the_reason_and_charges_what_is_lost_again(clinic: Path, capsys: Capture) -> None:
    with pytest.raises(FedstillError, match="nothing is wrong"):
        ledger.main(["settle", str(clinic), "--because", "so"])
    edit(clinic, "DELETE FROM rows WHERE row = 3")
    out = said(capsys, "settle", clinic, "--because", "restored from a backup")
    assert "Settled: is an older copy" in out
    assert "Charged again to clinic, run autumn: gaussian(4), 2 x laplace(10)." in out
    assert "3 rows: rows, seals" in said(capsys, "verify", clinic)
    out = " ".join(said(capsys, "show", clinic).split())
    assert "settled by" in out
    assert "restored from a backup" in out
    assert "3 x gaussian(4)" in out


def test_a_ledger_that_is_gone(clinic: Path, capsys: Capture) -> None:
    (clinic / "ledger.sqlite").unlink()
    with pytest.raises(FedstillError, match="is gone, and its anchor is there"):
        ledger.main(["verify", str(clinic)])
    out = said(capsys, "settle", clinic, "--because", "lost")
    assert out.count("Charged again") == 2
    assert "3 x gaussian(4)" in said(capsys, "show", clinic)


def released(folder: Path, run: str, times: int, first: int = 0) -> None:
    """Lines of a run's own ledger, as this node's releases leave them."""
    path = folder / "runs" / run / "ledger.jsonl"
    path.parent.mkdir(parents=True)
    lines, key = Ledger(), anchor.make_key(owner.secret(folder))
    lines.open(path)
    lines.sign = lambda line: anchor.seal(key, f"{run} {line}")
    for number in range(first, first + times):
        lines.write(
            node="clinic",
            number=number,
            question="examine",
            part="answer",
            content="",
            down={},
            up={"logits": 2560, "critic": 256},
            privacy={"mechanism": "noisy-outputs", "price": {"laplace(10.0)": 2, "gaussian(4.0)": 1}},
            row=number + 1,
        )
    lines.close()


def test_a_backup_of_ledger_and_anchor_together_is_found_by_what_runs_released(
    clinic: Path, capsys: Capture
) -> None:
    for file in clinic.glob("ledger.sqlite*"):
        file.unlink()
    file = clinic / "ledger.sqlite"
    with closing(Account(file, owner.secret(clinic))) as account:
        charge(account, 0, node=DATA)
    released(clinic, "spring", 1)
    assert "agree, and show all that the node's runs have released" in said(capsys, "verify", clinic)
    for path in clinic.glob("ledger.sqlite*"):
        shutil.copy(path, clinic.parent)
    with closing(Account(file, owner.secret(clinic))) as account:
        charge(account, 1, run="autumn", node=DATA)
    released(clinic, "autumn", 1, first=1)
    said(capsys, "verify", clinic)
    for path in clinic.parent.glob("ledger.sqlite*"):
        shutil.copy(path, clinic)

    fault = r"shows less than run 'autumn' has released: 2 x laplace\(10.0\), and 3 more of the like"
    for path in (clinic, file):  # the file in a node's folder is the node's
        with pytest.raises(FedstillError, match=fault):
            ledger.main(["verify", str(path)])
    assert "NOT SOUND: shows less than run 'autumn'" in said(capsys, "show", clinic)
    out = said(capsys, "settle", clinic, "--because", "the disk was replaced")
    assert "Charged again to these data, run autumn: gaussian(4), 2 x laplace(10)." in out
    said(capsys, "verify", clinic)
    with pytest.raises(FedstillError, match="nothing is wrong"):
        ledger.main(["settle", str(clinic), "--because", "again"])


def test_a_ledger_that_is_gone_with_its_anchor_is_made_anew_from_what_runs_released(
    clinic: Path, capsys: Capture
) -> None:
    for file in clinic.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(FedstillError, match="nothing has been charged to it"):
        ledger.main(["verify", str(clinic)])
    released(clinic, "spring", 3)
    with pytest.raises(FedstillError, match="is gone, and its node's runs are there"):
        ledger.main(["verify", str(clinic)])
    out = said(capsys, "settle", clinic, "--because", "lost")
    assert "Charged again to these data, run spring: 3 x gaussian(4), 6 x laplace(10)." in out
    shutil.rmtree(clinic / "runs")  # which is no fault
    assert "seals, totals and anchor agree\n" in said(capsys, "verify", clinic)


def test_a_node_s_ledger_reads_well_though_it_names_no_node(clinic: Path, capsys: Capture) -> None:
    for file in clinic.glob("ledger.sqlite*"):
        file.unlink()
    with closing(Account(clinic / "ledger.sqlite", owner.secret(clinic))) as account:
        charge(account, 0, node=DATA)
        charge(account, 0, run="autumn", node=DATA)
    out = said(capsys, "show", clinic)
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert "run, node" not in out
    words = " ".join(out.split())
    assert "Paid in all for these data: 2 x gaussian(4), 4 x laplace(10)." in words
    lines = [line.split() for line in out.splitlines() if line.startswith("these data")]
    assert [line[2:-1] for line in lines] == [
        ["spring", "1", "0"],
        ["autumn", "1", "0"],
        ["all", "runs", "2", "0"],
    ]


def test_export(clinic: Path, capsys: Capture) -> None:
    with closing(Account(clinic / "ledger.sqlite", owner.secret(clinic))) as account:
        rows = list(account.entries())
    lines, table = clinic.parent / "out.jsonl", clinic.parent / "out.csv"
    said(capsys, "export", clinic, "--out", lines)
    secret = ("content", "after", "hash")
    secretive = [{name: row[name] for name in row if name not in secret} for row in rows]
    assert [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] == secretive
    said(capsys, "export", clinic, f"--out={table}")
    with table.open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert [json.loads(row["price"]) for row in read] == [row["price"] for row in rows]
    assert [row["at"] for row in read] == [row["at"] for row in rows]
    for out in (lines, clinic.parent / "out.txt", ""):
        with pytest.raises(ArgumentError, match="--out"):
            ledger.main(["export", str(clinic), "--out", str(out)])
    edit(clinic, "DELETE FROM rows WHERE row = 1")
    with pytest.raises(FedstillError, match=r"not sound, and .* holds it as it is: row 1 is missing"):
        ledger.main(["export", str(clinic), "--out", str(clinic.parent / "again.csv")])


def test_an_export_holds_nothing_that_guesses_at_the_records_could_be_compared_with(
    clinic: Path, capsys: Capture
) -> None:
    """Contents begin with a hash of the records, and hashes of rows are over contents."""
    with closing(Account(clinic / "ledger.sqlite", owner.secret(clinic))) as account:
        rows = list(account.entries())
    for ending in ("jsonl", "csv"):
        short, whole = (clinic.parent / f"{name}.{ending}" for name in ("short", "whole"))
        assert "keep it to yourself" not in said(capsys, "export", clinic, "--out", short)
        assert "keep it to yourself" in said(capsys, "export", clinic, "--whole", "--out", whole)
        for row in rows:
            assert row["hash"] not in short.read_text(encoding="utf-8")
            assert row["hash"] in whole.read_text(encoding="utf-8")
        head = whole.read_text(encoding="utf-8").splitlines()[0]
        assert "content" in head
        assert "after" in head
    lines = (clinic.parent / "whole.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows
    names = (clinic.parent / "short.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert not {"content", "after", "hash"} & set(names)
    assert "guesses" in said(capsys, "--help")


def test_only_settle_changes_anything(clinic: Path, capsys: Capture) -> None:
    edit(clinic, "UPDATE rows SET rule = 'x' WHERE row = 1")
    before = {file.name: file.read_bytes() for file in clinic.iterdir()}
    said(capsys, "show", clinic)
    for words in (["verify", clinic], ["export", clinic, "--out", clinic.parent / "x.csv"]):
        with pytest.raises(FedstillError):
            ledger.main([str(word) for word in words])
    after = {
        file.name: file.read_bytes() for file in clinic.iterdir() if not file.name.endswith(("-wal", "-shm"))
    }
    assert after == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["shw", "."], "did you mean 'ledger show'"),
        (["show"], "PATH"),
        (["show", "a", "b"], "PATH"),
        (["show", "nowhere.sqlite"], "nowhere.sqlite is not there"),
        (["show", "."], "is no node's folder"),
        (["show", ".", "--lst", "3"], "did you mean '--last'"),
        (["settle", "here.sqlite"], "--because"),
        (["show", "here.sqlite", "--delta", "0"], "--delta is '0'"),
        (["show", "here.sqlite", "--delta", "nan"], "--delta is 'nan'"),
        (["show", "here.sqlite", "--last", "-1"], "--last is '-1'"),
        (["show", "here.sqlite", "--last", "x"], "--last is 'x'"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Account(Path("here.sqlite"), 1).close()
    with pytest.raises(FedstillError, match=told) as raised:
        ledger.main(words)
    assert isinstance(raised.value, UnknownName) == ("mean" in told)


def test_help_and_an_empty_ledger(tmp_path: Path, capsys: Capture) -> None:
    assert all(f"fedstill ledger {name}" in said(capsys) for name in ("show", "verify", "export", "settle"))
    assert said(capsys, "show", "--help") == ledger.HELP
    assert max(map(len, ledger.HELP.splitlines())) <= 110
    Account(tmp_path / "ledger.sqlite", 1).close()
    assert said(capsys, "show", tmp_path).endswith("Nothing has left.\n")
