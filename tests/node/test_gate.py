"""Nothing leaves a node except through its gate: policy first, then bound, noise, charge, release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.errors import ArgumentError, QuestionRefused
from fedstill.node.gate import PARAMETERS, Asked, Gate, PolicyConfig
from fedstill.node.ledger import Ledger

KINDS = {"logits": "logits", "critic": "critic", "d/dx": "gradients"}
ANSWER = {"logits": torch.ones(2, 3), "critic": torch.ones(4, dtype=torch.float64)}  # 24 and 32 bytes


def gate(ledger: Ledger | None = None, **policy: Any) -> Gate:
    return Gate("clinic", PolicyConfig(**policy), ledger or Ledger())


def asked(number: int = 0, content: str = "c0", question: str = "examine") -> Asked:
    return Asked(number, question, content, "", {"inputs": 10})


class Journal:
    """A mechanism and a ledger that write down what is called, in order."""

    name = "journal"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def bound(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        self.calls.append("bound")
        return {name: tensor.clamp(max=0.5) for name, tensor in tensors.items()}

    def noise(
        self, tensors: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> Mapping[str, torch.Tensor]:
        self.calls.append("noise")
        self.drawn = torch.rand(1, generator=generator).item()
        return {name: tensor + 1 for name, tensor in tensors.items()}

    def price(self, question: str, tensors: Mapping[str, torch.Tensor]) -> float | None:
        self.calls.append("price")
        return 0.25


class JournalLedger(Ledger):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def write(self, **line: Any) -> None:
        self.calls.append("charge")
        self.line = line
        super().write(**line)


class FullDisk(Ledger):
    def write(self, **line: Any) -> None:
        raise OSError("no space left on device")


# --- policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("questions", "rule"),
    [
        (("*",), None),
        (("examine",), None),
        (("count_labels", "examine"), None),
        (("count_labels",), "questions: count_labels"),
        ((), "questions: none"),
        (("exam",), "questions: exam"),
    ],
)
def test_only_the_questions_on_the_list_are_answered(questions: tuple[str, ...], rule: str | None) -> None:
    door = gate(questions=questions)
    assert door.objection("examine", KINDS) == rule
    if rule is None:
        door.admit(asked(), KINDS)
    else:
        with pytest.raises(QuestionRefused) as caught:
            door.admit(asked(), KINDS)
        assert (caught.value.node, caught.value.question, caught.value.rule) == ("clinic", "examine", rule)


def test_outputs_only_refuses_parameters_and_nothing_else() -> None:
    kinds = {"logits": "logits", "weights": PARAMETERS}
    assert gate().objection("upload", kinds) == "outputs_only: no parameters"
    assert gate(questions=("upload",)).objection("upload", kinds) == "outputs_only: no parameters"
    assert gate(outputs_only=False).objection("upload", kinds) is None
    assert gate().objection("examine", KINDS) is None
    with pytest.raises(QuestionRefused, match="'clinic' refuses question 'examine' by rule outputs_only"):
        gate().admit(asked(), kinds)


def test_most_questions_counts_questions_not_releases() -> None:
    door = gate(most_questions=2)
    for number in range(2):
        door.admit(asked(number), KINDS)
        door.release(asked(number), "answer", ANSWER, KINDS)
        door.release(asked(number), "gradient", {"d/dx": torch.ones(1)}, KINDS)
    door.admit(asked(1), KINDS)  # the same question again is not a third one
    with pytest.raises(QuestionRefused, match="most_questions: 2"):
        door.admit(asked(2), KINDS)


def test_each_node_has_its_own_limits_though_they_share_a_ledger() -> None:
    ledger = Ledger()
    first, second = (Gate(name, PolicyConfig(most_questions=1), ledger) for name in ("a", "b"))
    first.release(asked(0), "answer", ANSWER, KINDS)
    second.admit(asked(1), KINDS)
    with pytest.raises(QuestionRefused, match="'a'"):
        first.admit(asked(1), KINDS)


def test_most_bytes_is_never_overstepped_by_a_release() -> None:
    ledger = Ledger()
    door = gate(ledger, most_bytes=2 * 56 + 55)
    for number in range(2):
        door.release(asked(number), "answer", ANSWER, KINDS)
    door.admit(asked(2), KINDS)  # 55 bytes are left, so it may be asked
    with pytest.raises(QuestionRefused, match="most_bytes: 167"):
        door.release(asked(2), "answer", ANSWER, KINDS)
    assert ledger.up("clinic") == 112
    assert ledger.answers("clinic") == 2


def test_once_the_bytes_are_used_up_no_question_is_let_in() -> None:
    door = gate(most_bytes=56)
    door.release(asked(0), "answer", ANSWER, KINDS)
    with pytest.raises(QuestionRefused, match="most_bytes: 56"):
        door.admit(asked(1), KINDS)


@pytest.mark.parametrize("name", ["most_questions", "most_bytes"])
def test_a_negative_limit_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"policy.{name} is -1"):
        PolicyConfig(**{name: -1})  # type: ignore[arg-type]


def test_objecting_counts_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.open(tmp_path / "ledger.jsonl")
    door = gate(ledger, most_questions=1)
    door.objection("examine", KINDS)
    door.admit(asked(), KINDS)
    ledger.close()
    assert ledger.summary() == Ledger().summary()
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""


# --- release -------------------------------------------------------------------------------------


def test_a_tensor_that_was_not_declared_does_not_leave() -> None:
    ledger = Ledger()
    with pytest.raises(QuestionRefused, match="undeclared: diary, secret"):
        gate(ledger).release(
            asked(), "answer", {**ANSWER, "secret": torch.ones(1), "diary": torch.ones(1)}, KINDS
        )
    assert ledger.summary() == Ledger().summary()


def test_a_release_is_bounded_noised_priced_and_charged_in_this_order() -> None:
    journal = Journal()
    ledger = JournalLedger(journal.calls)
    door = Gate("clinic", PolicyConfig(), ledger, journal)
    released = door.release(asked(), "answer", ANSWER, KINDS)
    assert journal.calls == ["bound", "noise", "price", "charge"]
    assert ledger.line["privacy"] == {"mechanism": "journal", "price": 0.25}
    assert all((tensor == 1.5).all() for tensor in released.values()), "what leaves is bounded and noised"
    assert set(released) == set(ANSWER)


def test_the_charge_is_on_disk_before_the_release_is_handed_over(tmp_path: Path) -> None:
    path, seen = tmp_path / "ledger.jsonl", []

    class Watching(Gate):
        def _charge(self, *args: Any) -> None:
            super()._charge(*args)
            seen.append(len(path.read_text().splitlines()))  # read while nothing has been returned

    ledger = Ledger()
    ledger.open(path)
    Watching("clinic", PolicyConfig(), ledger).release(asked(), "answer", ANSWER, KINDS)
    ledger.close()
    assert seen == [1]


def test_where_the_ledger_cannot_be_written_nothing_is_released() -> None:
    with pytest.raises(OSError, match="no space"):
        gate(FullDisk()).release(asked(), "answer", ANSWER, KINDS)


def test_a_closed_ledger_file_releases_nothing_and_counts_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.open(tmp_path / "ledger.jsonl")
    ledger.close()
    with pytest.raises(ValueError, match="closed file"):
        gate(ledger).release(asked(), "answer", ANSWER, KINDS)
    assert ledger.summary() == Ledger().summary()


def test_bytes_are_counted_by_kind_and_direction_to_the_byte(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.open(tmp_path / "ledger.jsonl")
    door = gate(ledger)
    two_of_a_kind = {**KINDS, "more": "logits"}
    door.release(asked(0), "answer", {**ANSWER, "more": torch.ones(5, dtype=torch.float16)}, two_of_a_kind)
    door.release(asked(0), "gradient", {"d/dx": torch.ones(2, 1, 8, 8)}, KINDS)
    ledger.close()
    answer, gradient = (json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert (answer["up"], answer["down"]) == ({"logits": 24 + 10, "critic": 32}, {"inputs": 10})
    assert (gradient["up"], gradient["part"]) == ({"gradients": 512}, "gradient")


def test_without_a_mechanism_there_is_no_guarantee_and_no_price() -> None:
    ledger = JournalLedger([])
    released = gate(ledger).release(asked(), "answer", ANSWER, KINDS)
    assert ledger.line["privacy"] == {"mechanism": "none", "price": None}
    assert all(torch.equal(released[name], ANSWER[name]) for name in ANSWER)


def test_a_release_carries_no_graph() -> None:
    released = gate().release(asked(), "answer", {"logits": torch.ones(2, requires_grad=True) * 2}, KINDS)
    assert not released["logits"].requires_grad


def test_the_same_release_again_is_handed_over_but_not_counted_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):  # the second time as after a stop: a new ledger on the same file
        ledger = Ledger()
        ledger.open(path)
        for _ in range(2):
            assert set(gate(ledger).release(asked(), "answer", ANSWER, KINDS)) == set(ANSWER)
        ledger.close()
        assert ledger.up("clinic") == 56
    assert len(path.read_text().splitlines()) == 1


def test_other_content_another_part_or_another_number_is_counted() -> None:
    ledger = Ledger()
    door = gate(ledger)
    door.release(asked(0, "c0"), "answer", ANSWER, KINDS)
    door.release(asked(0, "c1"), "answer", ANSWER, KINDS)
    assert ledger.up("clinic") == 2 * 56
    door.release(asked(0, "c1"), "gradient", ANSWER, KINDS)
    assert ledger.up("clinic") == 3 * 56
    door.release(asked(1, "c1"), "answer", ANSWER, KINDS)
    assert ledger.up("clinic") == 4 * 56


def test_noise_follows_from_secret_node_question_part_and_content() -> None:
    def drawn(
        node: str = "a", secret: int = 0, number: int = 0, part: str = "answer", content: str = "c0"
    ) -> float:
        journal = Journal()
        door = Gate(node, PolicyConfig(), Ledger(), journal, secret=secret)
        door.release(asked(number, content), part, ANSWER, KINDS)
        return journal.drawn

    assert drawn() == drawn()
    others = [drawn(node="b"), drawn(secret=1), drawn(number=1), drawn(part="gradient"), drawn(content="c1")]
    assert len({drawn(), *others}) == 6


# --- after a restart -----------------------------------------------------------------------------


def restarted(path: Path, **policy: Any) -> Gate:
    """A gate on a ledger's file as a new process opens it."""
    ledger = Ledger()
    ledger.open(path)
    return gate(ledger, **policy)


def test_other_content_under_an_old_number_is_charged_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    restarted(path).release(asked(0, "c0"), "answer", ANSWER, KINDS)
    door = restarted(path)
    door.admit(asked(0, "c1"), KINDS)
    door.release(asked(0, "c1"), "answer", ANSWER, KINDS)
    assert door.ledger.up("clinic") == 2 * 56
    assert door.ledger.answers("clinic") == 2
    assert door.ledger.summary()["questions"] == 2
    assert len(path.read_text().splitlines()) == 2


def test_an_old_number_does_not_lead_past_most_questions_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for number in range(2):
        restarted(path).release(asked(number), "answer", ANSWER, KINDS)
    door = restarted(path, most_questions=2)
    door.admit(asked(1), KINDS)  # what was answered may be answered again
    door.release(asked(1), "answer", ANSWER, KINDS)
    assert (door.ledger.answers("clinic"), len(path.read_text().splitlines())) == (2, 2)
    for number in (0, 1, 2):
        with pytest.raises(QuestionRefused, match="most_questions: 2"):
            door.admit(asked(number, "another"), KINDS)


def test_an_old_number_does_not_lead_past_most_bytes_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    restarted(path).release(asked(0), "answer", ANSWER, KINDS)
    door = restarted(path, most_bytes=56 + 55)
    with pytest.raises(QuestionRefused, match="most_bytes: 111"):
        door.release(asked(0, "another"), "answer", ANSWER, KINDS)
    door.release(asked(0), "answer", ANSWER, KINDS)
    assert door.ledger.up("clinic") == 56
