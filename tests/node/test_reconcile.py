"""Lines of a node's runs are held against the sealed rows of its ledger, whatever was done to them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fedstill.node.account import Account
from fedstill.node.ledger import Ledger
from fedstill.node.witness import released

from fedstill.cli import ledger
from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.node import reconcile
from tests.node.test_host import PRIVATELY, Clinic, image
from tests.node.test_witness import ask as ask_once
from tests.node.test_witness import private

Lines = list[dict[str, Any]]


def file(clinic: Clinic) -> Path:
    return clinic.folder / "runs" / clinic.plan.run / "ledger.jsonl"


def write(clinic: Clinic, lines: Lines) -> None:
    file(clinic).write_text("".join(json.dumps(line) + "\n" for line in lines))


def found(clinic: Clinic, **more: Any) -> list[str]:
    with closing(Account(clinic.folder / "ledger.sqlite", 7, read_only=True)) as account:
        lines = reconcile.read(clinic.folder)
        return list(reconcile.disagreements(lines, account.entries(), sealed=account.sign, **more))


def a_run(folder: Path, privacy: str) -> Clinic:
    """Questions, ways back, a stop, and a way back to ask something else."""
    clinic = Clinic(folder, privacy).ready()
    clinic.say("answer", question="count_labels", number=0, differentiable=False)
    for number in (1, 2):
        clinic.ask(number)
        clinic.pull(number)
    clinic.again()
    clinic.ready()
    clinic.say("recall", mark=0)
    clinic.ask(1, image(99))
    clinic.say("leave")
    return clinic


@pytest.fixture(scope="module", params=["", *PRIVATELY.values()], ids=["none", *PRIVATELY])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Clinic:
    return a_run(tmp_path_factory.mktemp("reconcile") / "clinic", request.param)


@pytest.fixture
def clinic(done: Clinic, tmp_path: Path) -> Clinic:
    """A copy to spoil."""
    shutil.copytree(done.folder, tmp_path / "clinic")
    mine = copy.copy(done)
    mine.folder = tmp_path / "clinic"
    return mine


def test_what_a_sound_node_has_written_agrees(clinic: Clinic) -> None:
    assert len(clinic.lines()) == 6
    assert found(clinic) == []


def more_bytes(line: dict[str, Any]) -> None:
    line["up"][next(iter(line["up"]))] += 1


def another_kind(line: dict[str, Any]) -> None:
    line["up"]["logits of others"] = 0


def another_price(line: dict[str, Any]) -> None:
    price = line["privacy"]["price"]
    if price:
        price[next(iter(price))] += 1
    else:
        line["privacy"]["price"] = {"gaussian(9.0)": 1}


def no_guarantee(line: dict[str, Any]) -> None:
    line["privacy"]["price"] = {} if line["privacy"]["price"] is None else None


def another(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.update({name: value})


@pytest.mark.parametrize(
    "spoil",
    [
        more_bytes,
        another_kind,
        another_price,
        no_guarantee,
        another("number", 7),
        another("part", ""),
        another("at", "2999-01-01"),
        another("seal", ""),
    ],
)
def test_a_line_that_is_edited_is_named(clinic: Clinic, spoil: Callable[[dict[str, Any]], None]) -> None:
    sound = clinic.lines()
    for place in range(len(sound)):
        lines = copy.deepcopy(sound)
        spoil(lines[place])
        write(clinic, lines)
        first = found(clinic)[0]
        assert first.startswith(f"run 'one': line {place + 1} (question {lines[place]['number']}, ")


def test_a_line_that_is_taken_out_or_put_in_is_found(clinic: Clinic) -> None:
    sound = clinic.lines()
    for place, line in enumerate(sound[:-1]):
        write(clinic, sound[:place] + sound[place + 1 :])
        told = f"question {line['number']}, {line['question']}, {line['part']}"
        assert any(f"({told}) has no line in ledger.jsonl" in each for each in found(clinic)), place
    write(clinic, sound[:-1])
    assert found(clinic) == []  # as a kill between charge and line leaves it
    write(clinic, [*sound, sound[2]])
    assert any("has no row" in each for each in found(clinic))
    write(clinic, [])
    assert len(found(clinic)) == len(sound) - 1


def test_rows_that_a_node_at_work_writes_meanwhile_need_no_line_yet(clinic: Clinic) -> None:
    sound = clinic.lines()
    numbers = [line["row"] for line in sound]
    write(clinic, sound[:2])
    assert found(clinic, until=numbers[1]) == []
    assert found(clinic, until=numbers[2]) == []  # charged, and its line is being written
    assert len(found(clinic, until=numbers[3])) == 1


@pytest.mark.parametrize("broken", [{"up": {"logits": "many"}}, {"up": None}, {"privacy": {}}, {"at": ...}])
def test_a_line_that_is_none_is_named(clinic: Clinic, broken: dict[str, Any]) -> None:
    lines = clinic.lines()
    lines[1] = {key: value for key, value in {**lines[1], **broken}.items() if value is not ...}
    write(clinic, lines)
    with pytest.raises(RunFolderError, match=r"ledger\.jsonl: line 2 is no line of a ledger"):
        reconcile.read(clinic.folder)


# --- as the owner meets it ----------------------------------------------------------------------------


def test_verify_finds_lines_that_are_edited_cut_or_gone_and_the_node_still_works(
    clinic: Clinic, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.main(["verify", str(clinic.folder)])
    assert "show all that the node's runs have released, line by line\n" in capsys.readouterr().out
    sound = clinic.lines()
    bytes_up = sum(sum(line["up"].values()) for line in sound)
    lines = copy.deepcopy(sound)
    lines[2]["up"] = {"gradients": 1}
    for left, said in (
        (lines, r"run 'one': line 3 \(question 1, examine, gradient\) and row \d+ differ: bytes grad"),
        (sound[:3], r"run 'one': row \d+ \(question 2, examine, answer\) has no line in ledger.jsonl"),
        (None, rf"run 'one': runs/one/ledger.jsonl is gone; its rows hold 6 releases, {bytes_up} bytes; if"),
    ):
        if left is None:
            shutil.rmtree(clinic.folder / "runs")
        else:
            write(clinic, left)
        for path in (clinic.folder, clinic.folder / "ledger.sqlite"):
            with pytest.raises(FedstillError, match=f"is sound, and .*runs tells otherwise: {said}"):
                ledger.main(["verify", str(path)])
    other = Clinic(clinic.folder, clinic.folder.joinpath("node.toml").read_text().partition("[policy]")[2])
    other.plan = type(clinic.plan)("two", clinic.plan.method, clinic.plan.spec)
    assert "error" not in other.say("join", plan=other.plan.to_dict())[0]


# --- what may differ ----------------------------------------------------------------------------------


def test_lines_whose_rows_are_lost_are_settled_with_them(tmp_path: Path) -> None:
    clinic = private(tmp_path / "clinic").ready()
    ask_once(clinic, 0)
    clinic.say("leave")
    for path in clinic.folder.glob("ledger.sqlite*"):
        shutil.copy(path, tmp_path)
    clinic.ready()
    ask_once(clinic, 1)
    ask_once(clinic, 2)
    clinic.say("leave")
    for path in tmp_path.glob("ledger.sqlite*"):
        shutil.copy(path, clinic.folder)
    assert [each.partition(" (")[0] for each in found(clinic)] == ["run 'one': line 2", "run 'one': line 3"]
    with closing(Account(clinic.folder / "ledger.sqlite", 7, witness=released(clinic.folder))) as account:
        account.settle("the disk was replaced")
    assert found(clinic) == []
    clinic.ready()
    ask_once(clinic, 1)  # charged anew
    ask_once(clinic, 3)
    clinic.say("leave")
    assert found(clinic) == []
    lines = clinic.lines()
    for place in (0, len(lines) - 1):
        spoilt = copy.deepcopy(lines)
        more_bytes(spoilt[place])
        write(clinic, spoilt)
        assert len(found(clinic)) == 1


def test_one_release_may_be_charged_and_not_written_and_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic = private(tmp_path / "clinic").ready()
    ask_once(clinic, 0)

    def killed(*given: Any, **more: Any) -> None:
        raise OSError(5, "Input/output error")

    for number in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "write", killed)
            ask_once(clinic, number)
        assert found(clinic) == []
        clinic.again()
        clinic.ready()  # then the node writes down that it was held back
        (last,) = [row["row"] for row in clinic.rows() if row["number"] == number]
        assert [line["row"] for line in clinic.lines() if "held" in line][-1] == last
        ask_once(clinic, 10 + number)
        assert found(clinic) == []
        clinic.say("recall", mark=0)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "write", killed)
        ask_once(clinic, 21)
        ask_once(clinic, 22)
    assert "(question 21, examine, answer) has no line" in found(clinic)[0]


def test_nodes_that_share_a_ledger_answer_for_their_own_lines_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = '[privacy]\nledger = "../shared.sqlite"\n'
    nodes = [Clinic(tmp_path / name, more).ready() for name in ("clinic", "practice")]
    for clinic in nodes:
        clinic.ask(0)
        clinic.ask(1)
        clinic.say("leave")
    for clinic in nodes:
        ledger.main(["verify", str(clinic.folder)])
    lines = nodes[1].lines()
    more_bytes(lines[0])
    write(nodes[1], lines)
    ledger.main(["verify", str(nodes[0].folder)])
    with pytest.raises(FedstillError, match="run 'one': line 1"):
        ledger.main(["verify", str(nodes[1].folder)])


def test_what_an_owner_has_moved_away_is_settled_and_later_faults_are_found(
    done: Clinic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "clinic"
    shutil.copytree(done.folder, folder)
    shutil.move(folder / "runs" / "one", tmp_path / "archive")
    with pytest.raises(FedstillError, match=r"runs/one/ledger\.jsonl is gone"):
        ledger.main(["verify", str(folder)])
    ledger.main(["settle", str(folder), "--because", "moved to the archive"])
    assert "Settled: run 'one': runs/one/ledger.jsonl is gone" in capsys.readouterr().out
    ledger.main(["verify", str(folder)])
    with pytest.raises(FedstillError, match="nothing is wrong"):
        ledger.main(["settle", str(folder), "--because", "again"])


def test_a_line_that_is_there_twice_charges_nothing_twice(done: Clinic, tmp_path: Path) -> None:
    folder = tmp_path / "clinic"
    shutil.copytree(done.folder, folder)
    path = folder / "runs" / "one" / "ledger.jsonl"
    first = path.read_text().splitlines()[0]
    before = released(folder)
    path.write_text(path.read_text() + first + "\n")
    assert released(folder) == before
