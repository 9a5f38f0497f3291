"""The audit trail: one line a release, sums that survive a stop."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from fedstill.node.ledger import Ledger

from fedstill.core.errors import RunFolderError
from tests.node.test_host import FEDIOD, PLAN, Clinic, image


def write(ledger: Ledger, node: str = "a", number: int = 0, part: str = "answer", **other: Any) -> None:
    line: dict[str, Any] = {
        "question": "examine",
        "content": "c0",
        "down": {"inputs": 100},
        "up": {"logits": 7, "critic": 5},
        "privacy": {"mechanism": "none", "price": None},
        **other,
    }
    ledger.write(node=node, number=number, part=part, **line)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def opened(path: Path) -> Ledger:
    ledger = Ledger()
    ledger.open(path)
    return ledger


def test_a_line_says_who_what_when_how_much_and_at_what_price(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.jsonl")
    write(ledger, "clinic", 3)
    (line,) = lines(tmp_path / "ledger.jsonl")  # on disk before the ledger is closed
    assert datetime.fromisoformat(line.pop("at")).utcoffset() == timedelta(0)
    assert line == {
        "node": "clinic",
        "number": 3,
        "question": "examine",
        "part": "answer",
        "content": "c0",
        "down": {"inputs": 100},
        "up": {"logits": 7, "critic": 5},
        "privacy": {"mechanism": "none", "price": None},
    }
    ledger.close()


def test_what_was_spent_is_added_up_and_known_again_after_a_restart(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.jsonl")
    for number in range(2):
        write(ledger, "a", number, privacy={"mechanism": "pate", "price": {"gaussian(2.0)": 3}})
    write(ledger, "a", 2, privacy={"mechanism": "pate", "price": {}})
    write(ledger, "b", 2, privacy={"mechanism": "none", "price": None})
    ledger.close()
    for known in (ledger, opened(tmp_path / "ledger.jsonl")):
        assert known.spent("a") == ({"gaussian(2.0)": 6}, 0)
        assert known.spent("b") == ({}, 1), "no guarantee is not the same as no price"
        assert known.spent("c") == ({}, 0)
        assert known.nodes == {"a", "b"}


def test_privacy_is_of_the_last_release_under_a_number(tmp_path: Path) -> None:
    """Where a server goes back it may ask something else under a number, or the same in another order."""
    ledger = opened(tmp_path / "ledger.jsonl")
    events = ("laplace(1.0)", "laplace(2.0)", "laplace(3.0)")
    asked = (("c0", ""), ("c1", ""), ("c0", "a1"))
    for (content, after), event in zip(asked, events, strict=True):
        write(ledger, content=content, after=after, privacy={"mechanism": "pate", "price": {event: 1}})
        assert ledger.privacy("a", 0, "answer")["price"] == {event: 1}
    for place in (0, 2, 1, 0):
        assert ledger.released("a", 0, "answer", *asked[place])  # it leaves once more
        told = {"mechanism": "pate", "price": {events[place]: 1}, "after": asked[place][1]}
        assert ledger.privacy("a", 0, "answer") == told
    assert not ledger.released("a", 0, "answer", "c1", "a1")
    assert not ledger.released("a", 0, "gradient", "c1")
    assert ledger.privacy("a", 0, "answer")["price"] == {events[0]: 1}, "what did not leave is not told of"
    ledger.close()
    again = opened(tmp_path / "ledger.jsonl")
    assert again.privacy("a", 0, "answer") == {"mechanism": "pate", "price": {events[2]: 1}, "after": "a1"}
    again.close()


def test_a_node_that_went_back_tells_the_price_of_what_leaves_now(tmp_path: Path) -> None:
    noise = "[privacy.pate]\nnoise = 20.0\n[privacy.gradients]\nnoise = 5.0\n"
    privacy = f'[privacy]\nmechanism = "pate"\n{noise}'
    clinic = Clinic(tmp_path / "clinic", privacy, replace(PLAN, method={**FEDIOD, "gan": 0.0})).ready()
    prices = []
    for inputs in (image(0), image(9)[:1], image(0)):
        prices.append(clinic.ask(0, inputs)[0]["privacy"]["price"])
        clinic.say("recall", mark=0)
    clinic.say("leave")
    assert prices[0] == prices[2] != prices[1]


def test_sums_by_kind_node_and_direction() -> None:
    ledger = Ledger()
    write(ledger, "a", 0, question="count", down={}, up={"counts": 12})
    write(ledger, "b", 0, question="count", down={}, up={"counts": 12})
    write(ledger, "a", 1)
    write(ledger, "a", 1, "gradient", down={"gradients": 3}, up={"gradients": 100})
    assert ledger.summary() == {
        "up": 12 + 12 + 7 + 5 + 100,
        "down": 100 + 3,
        "by_kind": {
            "counts": {"up": 24, "down": 0},
            "critic": {"up": 5, "down": 0},
            "gradients": {"up": 100, "down": 3},
            "inputs": {"up": 0, "down": 100},
            "logits": {"up": 7, "down": 0},
        },
        "by_node": {"a": {"up": 124, "down": 103}, "b": {"up": 12, "down": 0}},
        "questions": 2,
        "questions_by_name": {"count": 1, "examine": 1},
    }
    assert (ledger.up("a"), ledger.up("b"), ledger.up("nobody")) == (124, 12, 0)
    assert (ledger.answers("a"), ledger.answers("b"), ledger.answers("nobody")) == (2, 1, 0)
    assert ledger.released("a", 1, "gradient", "c0")
    assert not ledger.released("a", 1, "gradient", "other")
    assert not ledger.released("b", 1, "answer", "c0")


def test_a_ledger_that_is_opened_again_takes_up_its_sums_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = opened(path)
    write(first, "a", 0)
    write(first, "b", 0, content="other")
    first.close()
    again = opened(path)
    assert again.summary() == first.summary()
    assert again.answers("a") == 1
    assert again.released("b", 0, "answer", "other")
    write(again, "a", 1)
    again.close()
    assert [line["number"] for line in lines(path)] == [0, 0, 1]
    assert opened(path).summary() == again.summary()


def test_a_file_serves_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = opened(path)
    code = (
        "import sys, pathlib, fedstill.core.errors, fedstill.node.ledger as ledger\n"
        "try: ledger.Ledger().open(pathlib.Path(sys.argv[1]))\n"
        "except fedstill.core.errors.RunFolderError: sys.exit(7)"
    )
    second = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(second, check=False).returncode == 7
    first.close()
    assert subprocess.run(second, check=False).returncode == 0


@pytest.mark.parametrize("left", [1, 20, -1])
def test_a_last_line_torn_by_a_kill_is_cut(left: int, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = opened(path)
    write(first, "a", 0)
    whole = path.read_bytes()
    write(first, "a", 1)
    first.close()
    torn = path.read_bytes()[len(whole) : -1][:left]  # -1: all but the last brace
    path.write_bytes(whole + torn)

    again = opened(path)
    assert again.answers("a") == 1
    assert path.read_bytes() == whole
    write(again, "a", 1)
    again.close()
    assert [line["number"] for line in lines(path)] == [0, 1]


def test_a_broken_line_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = opened(path)
    for number in range(2):
        write(first, "a", number)
    first.close()
    kept = path.read_bytes()
    path.write_bytes(b"x" + kept)
    with pytest.raises(RunFolderError, match="line 1 is no line of a ledger"):
        opened(path)
    assert path.read_bytes() == b"x" + kept


@pytest.mark.parametrize("line", ['{"node": "a"}', "null", "[]", '"text"', "{"])
def test_a_whole_line_that_is_no_line_of_a_ledger_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = opened(path)
    write(first, "a", 0)
    first.close()
    path.write_bytes(path.read_bytes() + line.encode() + b"\n")
    kept = path.read_bytes()
    with pytest.raises(RunFolderError, match=r"ledger\.jsonl: line 2 is no line of a ledger"):
        opened(path)
    assert path.read_bytes() == kept


class FillsUp(FileIO):
    """A file on a disk with room for so many bytes more."""

    room = 10**9

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        written = super().write(bytes(data)[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_disk_that_fills_up_leaves_the_file_as_it_was(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    monkeypatch.setattr("fedstill.node.ledger.FileIO", FillsUp)
    ledger = opened(path)
    write(ledger, "a", 0)
    before, sums = path.read_bytes(), ledger.summary()
    file: Any = ledger._file
    file.room = room
    with pytest.raises(OSError, match="No space left"):
        write(ledger, "a", 1)
    assert path.read_bytes() == before
    assert ledger.summary() == sums
    file.room = 10**9  # somebody has made room
    write(ledger, "b", 1)
    ledger.close()
    assert [(line["node"], line["number"]) for line in lines(path)] == [("a", 0), ("b", 1)]


def test_a_line_written_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:7])

    monkeypatch.setattr("fedstill.node.ledger.FileIO", Slow)
    ledger = opened(tmp_path / "ledger.jsonl")
    write(ledger, "a", 0)
    ledger.close()
    assert [line["number"] for line in lines(tmp_path / "ledger.jsonl")] == [0]


def test_an_empty_file_is_a_new_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").touch()
    assert opened(tmp_path / "ledger.jsonl").summary() == Ledger().summary()
