"""Nothing leaves a node except through its gate: policy first, then bound, noise, charge, release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fedstill.node.account import Account, Spent
from fedstill.node.ledger import Ledger

from fedstill.core.errors import ArgumentError, QuestionRefused
from fedstill.node.asked import Asked
from fedstill.node.budgets import Budgets
from fedstill.node.gate import Gate
from fedstill.node.mechanism import Mechanism
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.bill import Bill, total
from fedstill.privacy.config import GradientsConfig
from fedstill.privacy.events import Event, Price
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.protocol.kinds import PARAMETERS
from fedstill.protocol.questions import NodeSide, Question
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks.classification import Classification

QUESTION = Question(
    "examine",
    lambda group, number: {},
    sends={"x": "inputs"},
    releases={"logits": "logits", "critic": "critic"},
    differentiable=("x",),
)
UPLOAD = Question("upload", lambda group, number: {}, releases={"logits": "logits", "weights": PARAMETERS})
ANSWER = {"logits": torch.ones(2, 3), "critic": torch.ones(4, dtype=torch.float64)}  # 24 and 32 bytes


def gate(ledger: Ledger | None = None, **policy: Any) -> Gate:
    return Gate("clinic", PolicyConfig(**policy), ledger or Ledger())


def asked(number: int = 0, content: str = "c0", question: str = "examine") -> Asked:
    return Asked(number, question, content, "", {"inputs": 10})


def release(
    door: Gate,
    what: Asked | None = None,
    part: str = "answer",
    tensors: Mapping[str, torch.Tensor] = ANSWER,
    question: Question = QUESTION,
    sent: Mapping[str, torch.Tensor] | None = None,
) -> Mapping[str, torch.Tensor]:
    return door.release(what or asked(), part, tensors, question, sent or {})


class Journal:
    """Budgets, their mechanism and its rule, and a ledger, which write down what is called, in order."""

    name, text = "journal", "written down"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.training: Bill = {"training": Price()}
        self.learned: Bill = {}
        self.stamps: set[str] = set()
        self.questions = self.rows = 0
        self.mechanism: Any = self

    def rule(self, question: Question, name: str) -> Any:
        return self

    def says(self, *given: Any) -> str:
        return self.text

    def draws(self, *names: str | int) -> Any:
        return None

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("bound")
        return tensor.clamp(max=0.5)

    def noise(self, tensor: torch.Tensor, draws: Any) -> torch.Tensor:
        self.calls.append("noise")
        return tensor + 1

    def release(self, *given: Any) -> Bill:
        self.calls.append("price")
        return {"logits": Price({Event("laplace", 4.0): 2})}

    def learning(self, *given: Any) -> Bill:
        return self.learned

    def first(self) -> Bill:
        return self.training

    def objection(self, question: Question) -> str | None:
        return None

    def afford(self, *given: Any) -> None:
        self.calls.append("afford")

    def pay_learning(self, *given: Any) -> None:
        self.calls.append("pay for learning")

    def votes(self, *given: Any) -> Any:
        return ()

    def attempts(self, *given: Any) -> int:
        return 0

    def spent(self) -> Spent:
        return Spent({}, {}, questions=self.questions)

    def seal(self, text: str) -> str:
        return text

    def behind(self, what: Asked, part: str, *given: Any) -> Any:
        if total(self.training) != Price():
            yield "before", what.origin, total(self.training)
        if part == "answer" and total(self.learned) != Price():
            yield "for", str(what.number), total(self.learned)

    def pay(
        self, what: Asked, part: str, up: Mapping[str, int], price: Price, rule: str, stamp: str, limit: Any
    ) -> tuple[int, bool]:
        self.calls.append("pay")
        self.paid, self.stamps = (what, part, dict(up), price, rule), {*self.stamps, stamp}
        self.rows += 1
        return self.rows, True


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
    assert door.objection(QUESTION) == rule
    if rule is None:
        door.admit(asked(), QUESTION, {})
    else:
        with pytest.raises(QuestionRefused) as caught:
            door.admit(asked(), QUESTION, {})
        assert (caught.value.node, caught.value.question, caught.value.rule) == ("clinic", "examine", rule)


def test_outputs_only_refuses_parameters_and_nothing_else() -> None:
    assert gate().objection(UPLOAD) == "outputs_only: no parameters"
    assert gate(questions=("upload",)).objection(UPLOAD) == "outputs_only: no parameters"
    assert gate(outputs_only=False).objection(UPLOAD) is None
    assert gate().objection(QUESTION) is None
    with pytest.raises(QuestionRefused, match="'clinic' refuses question 'upload' by rule outputs_only"):
        gate().admit(asked(question="upload"), UPLOAD, {})


def test_most_questions_counts_questions_not_releases() -> None:
    door = gate(most_questions=2)
    for number in range(2):
        door.admit(asked(number), QUESTION, {})
        release(door, asked(number))
        release(door, asked(number), "gradient", {"d/dx": torch.ones(1)})
    door.admit(asked(1), QUESTION, {})  # the same question again is not a third one
    with pytest.raises(QuestionRefused, match="most_questions: 2"):
        door.admit(asked(2), QUESTION, {})


def test_each_node_has_its_own_limits_though_they_share_a_ledger() -> None:
    ledger = Ledger()
    first, second = (Gate(name, PolicyConfig(most_questions=1), ledger) for name in ("a", "b"))
    release(first, asked(0))
    second.admit(asked(1), QUESTION, {})
    with pytest.raises(QuestionRefused, match="'a'"):
        first.admit(asked(1), QUESTION, {})


def test_most_bytes_is_never_overstepped_by_a_release() -> None:
    ledger = Ledger()
    door = gate(ledger, most_bytes=2 * 56 + 55)
    for number in range(2):
        release(door, asked(number))
    door.admit(asked(2), QUESTION, {})  # 55 bytes are left, so it may be asked
    with pytest.raises(QuestionRefused, match="most_bytes: 167"):
        release(door, asked(2))
    assert ledger.up("clinic") == 112
    assert ledger.answers("clinic") == 2


def test_once_the_bytes_are_used_up_no_question_is_let_in() -> None:
    door = gate(most_bytes=56)
    release(door, asked(0))
    with pytest.raises(QuestionRefused, match="most_bytes: 56"):
        door.admit(asked(1), QUESTION, {})


def test_less_memory_than_the_program_needs_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"allowed is 0 \(no limit\), or 50000000 or more"):
        PolicyConfig(most_memory=1000)
    assert PolicyConfig(most_memory=0).most_memory == 0


@pytest.mark.parametrize("name", ["most_questions", "most_bytes"])
def test_a_negative_limit_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"policy.{name} is -1"):
        PolicyConfig(**{name: -1})  # type: ignore[arg-type]


def test_objecting_counts_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.open(tmp_path / "ledger.jsonl")
    door = gate(ledger, most_questions=1)
    door.objection(QUESTION)
    door.admit(asked(), QUESTION, {})
    ledger.close()
    assert ledger.summary() == Ledger().summary()
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""


# --- release -------------------------------------------------------------------------------------


def test_a_tensor_that_was_not_declared_does_not_leave() -> None:
    ledger = Ledger()
    with pytest.raises(QuestionRefused, match="undeclared: diary, secret"):
        release(gate(ledger), tensors={**ANSWER, "secret": torch.ones(1), "diary": torch.ones(1)})
    assert ledger.summary() == Ledger().summary()


def journalled() -> tuple[Gate, Journal, JournalLedger]:
    journal = Journal()
    ledger = JournalLedger(journal.calls)
    door = gate(ledger)
    door.budgets = journal  # type: ignore[assignment]
    return door, journal, ledger


def test_a_release_is_bounded_noised_priced_paid_and_charged_in_this_order() -> None:
    door, journal, ledger = journalled()
    released = release(door)
    assert journal.calls == ["bound", "bound", "noise", "noise", "price", "pay", "charge"]
    assert ledger.line["privacy"] == {"mechanism": "journal", "price": {"laplace(4.0)": 2}}
    assert all((tensor == 1.5).all() for tensor in released.values()), "what leaves is bounded and noised"
    assert set(released) == set(ANSWER)
    price, rule = Price({Event("laplace", 4.0): 2}), "logits: written down; critic: written down"
    assert journal.paid == (asked(), "answer", {"logits": 24, "critic": 32}, price, rule)


def test_what_the_method_finishes_is_noised_already_and_sees_what_was_sent() -> None:
    door, journal, _ = journalled()

    def finish(told: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> Any:
        journal.calls.append("finish")
        return {name: tensor.sum() * sent["z"] for name, tensor in told.items()}

    released = release(door, question=replace(QUESTION, finish=finish), sent={"z": torch.tensor(2.0)})
    assert journal.calls == [
        "bound",
        "bound",
        "noise",
        "noise",
        "price",
        "finish",
        "pay",
        "charge",
    ]
    assert released == {"logits": torch.tensor(18.0), "critic": torch.tensor(12.0)}, "1.5 each, x 2"
    assert journal.paid[2] == {"logits": 4, "critic": 8}, "bytes are those that leave"


def test_only_an_answer_is_finished() -> None:
    door, _, _ = journalled()
    finishing = replace(QUESTION, finish=lambda told, sent: {})
    assert set(release(door, None, "gradient", {"d/dx": torch.ones(1)}, finishing)) == {"d/dx"}


def test_what_cannot_be_paid_for_is_neither_written_nor_handed_over() -> None:
    door, journal, ledger = journalled()

    def refuse(*given: Any) -> None:
        raise QuestionRefused("clinic", "examine", "privacy budget: spent")

    journal.pay = refuse  # type: ignore[method-assign]
    with pytest.raises(QuestionRefused, match="privacy budget: spent"):
        release(door)
    assert "charge" not in journal.calls
    assert ledger.summary() == Ledger().summary()


def test_the_first_line_of_a_run_carries_what_the_training_cost() -> None:
    door, journal, ledger = journalled()
    journal.training = {"training": Price({Event("gaussian", 2.0, rate=0.5): 30})}
    release(door, asked(0))
    assert ledger.line["privacy"]["price"] == {"laplace(4.0)": 2, "gaussian(2.0, rate=0.5)": 30}
    release(door, asked(1))
    assert ledger.line["privacy"]["price"] == {"laplace(4.0)": 2}
    assert ledger.spent("clinic") == ({"laplace(4.0)": 4, "gaussian(2.0, rate=0.5)": 30}, 0)


def test_where_the_training_has_no_guarantee_nor_has_the_run() -> None:
    door, journal, ledger = journalled()
    journal.training = {"training": None}
    release(door)
    assert ledger.line["privacy"] == {"mechanism": "journal", "price": None}
    assert ledger.spent("clinic") == ({}, 1)


def test_a_line_carries_what_was_learned_for_the_answer_and_for_nothing_else() -> None:
    door, journal, ledger = journalled()
    journal.learned = {"critic": Price({Event("gaussian", 3.0, rate=0.5): 1})}
    release(door, asked(0))
    assert ledger.line["privacy"]["price"] == {"laplace(4.0)": 2, "gaussian(3.0, rate=0.5)": 1}
    assert journal.paid[3] == Price({Event("laplace", 4.0): 2}), "it has been paid for by itself"
    release(door, asked(0), "gradient", {"d/dx": torch.ones(1)})
    assert ledger.line["privacy"]["price"] == {"laplace(4.0)": 2}
    journal.learned = {"critic": None}
    release(door, asked(1))
    assert ledger.line["privacy"]["price"] is None


def test_what_is_learned_is_paid_for_as_a_question_is_let_in_and_after_it_was_found_affordable() -> None:
    door, journal, _ = journalled()
    door.admit(asked(), QUESTION, {})
    assert journal.calls == ["afford", "pay for learning"]
    release(door)
    journal.calls.clear()
    door.admit(
        asked(), QUESTION, {}
    )  # after a stop it is learned once more: the budgets know if that is paid
    assert journal.calls == ["pay for learning"]
    strict = gate(most_questions=1)
    journal.calls.clear()
    strict.budgets, journal.questions = journal, 1  # type: ignore[assignment]
    with pytest.raises(QuestionRefused, match="most_questions"):
        strict.admit(asked(1), QUESTION, {})
    assert journal.calls == [], "what the policy refuses is not paid for"


def test_objections_are_the_budgets_too_but_the_policys_first() -> None:
    door, journal, _ = journalled()
    journal.objection = lambda question: "privacy: too dear"  # type: ignore[method-assign]
    assert door.objection(QUESTION) == "privacy: too dear"
    assert door.objection(UPLOAD) == "outputs_only: no parameters"


def test_what_is_let_in_can_be_afforded_and_again_costs_nothing() -> None:
    door, journal, _ = journalled()
    given: list[Any] = []
    journal.afford = lambda *what: given.append(what)  # type: ignore[method-assign]
    sent = {"x": torch.ones(2)}
    door.admit(asked(), QUESTION, sent)
    assert given == [(asked(), QUESTION, sent)]
    release(door)
    door.admit(asked(), QUESTION, sent)
    assert len(given) == 1, "asked again it is not asked for again"


def test_the_charge_is_on_disk_before_the_release_is_handed_over(tmp_path: Path) -> None:
    path, seen = tmp_path / "ledger.jsonl", []

    class Watching(Gate):
        def _charge(self, *args: Any) -> None:
            super()._charge(*args)
            seen.append(len(path.read_text().splitlines()))  # read while nothing has been returned

    ledger = Ledger()
    ledger.open(path)
    release(Watching("clinic", PolicyConfig(), ledger))
    ledger.close()
    assert seen == [1]


def test_where_the_ledger_cannot_be_written_nothing_is_released() -> None:
    with pytest.raises(OSError, match="no space"):
        release(gate(FullDisk()))


def test_a_closed_ledger_file_releases_nothing_and_counts_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.open(tmp_path / "ledger.jsonl")
    ledger.close()
    with pytest.raises(ValueError, match="closed file"):
        release(gate(ledger), asked())
    assert ledger.summary() == Ledger().summary()


def test_bytes_are_counted_by_kind_and_direction_to_the_byte(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.open(tmp_path / "ledger.jsonl")
    door = gate(ledger)
    two_of_a_kind = replace(QUESTION, releases={**QUESTION.releases, "more": "logits"})
    more = {**ANSWER, "more": torch.ones(5, dtype=torch.float16)}
    release(door, asked(0), "answer", more, two_of_a_kind)
    release(door, asked(0), "gradient", {"d/dx": torch.ones(2, 1, 8, 8)})
    ledger.close()
    answer, gradient = (json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert (answer["up"], answer["down"]) == ({"logits": 24 + 10, "critic": 32}, {"inputs": 10})
    assert (gradient["up"], gradient["part"]) == ({"gradients": 512}, "gradient")


def test_without_a_mechanism_there_is_no_guarantee_and_no_price() -> None:
    ledger = JournalLedger([])
    released = release(gate(ledger), asked())
    assert ledger.line["privacy"] == {"mechanism": "none", "price": None}
    assert all(torch.equal(released[name], ANSWER[name]) for name in ANSWER)


def test_a_release_carries_no_graph() -> None:
    released = release(gate(), tensors={"logits": torch.ones(2, requires_grad=True) * 2})
    assert not released["logits"].requires_grad


def test_the_same_release_again_is_handed_over_but_not_counted_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):  # the second time as after a stop: a new ledger on the same file
        ledger = Ledger()
        ledger.open(path)
        for _ in range(2):
            assert set(release(gate(ledger), asked())) == set(ANSWER)
        ledger.close()
        assert ledger.up("clinic") == 56
    assert len(path.read_text().splitlines()) == 1


def test_other_content_another_part_or_another_number_is_counted() -> None:
    ledger = Ledger()
    door = gate(ledger)
    release(door, asked(0, "c0"))
    release(door, asked(0, "c1"))
    assert ledger.up("clinic") == 2 * 56
    release(door, asked(0, "c1"), "gradient", ANSWER)
    assert ledger.up("clinic") == 3 * 56
    release(door, asked(1, "c1"))
    assert ledger.up("clinic") == 4 * 56


def noisy(
    node: str = "a",
    secret: int = 0,
    binding: str = "b",
    salt: str = "",
    bound: float = 3.0,
    account: Account | None = None,
) -> Gate:
    """A gate with noise on its answers."""
    side = NodeSide({"examine": replace(QUESTION, reads=())})
    outputs, gradients = OutputsConfig(noise=1.0, bound=bound), GradientsConfig(noise=1.0)
    privacy = NoisyOutputs(outputs=outputs, gradients=gradients)
    mechanism = Mechanism(node, privacy, side, LocalConfig(), 10, Classification(3), secret=secret, salt=salt)
    mechanism.binding = binding
    door = Gate(node, PolicyConfig(), Ledger())
    door.budgets = Budgets(mechanism, account or Account(None, 0), "run")
    return door


def test_noise_follows_from_secret_node_question_part_content_what_came_before_and_the_data() -> None:
    question = replace(QUESTION, reads=())

    def drawn(
        door: Gate | None = None, number: int = 0, part: str = "answer", content: str = "c0", after: str = ""
    ) -> tuple[float, ...]:
        what = Asked(number, "examine", content, after, {})
        name = "logits" if part == "answer" else "d/dx"
        left = (door or noisy()).release(what, part, {name: torch.zeros(2, 3)}, question, {})
        return tuple(left[name].flatten().tolist())

    assert drawn() == drawn()
    others = [
        drawn(noisy("b")),
        drawn(noisy(secret=1)),
        drawn(noisy(binding="c")),
        drawn(number=1),
        drawn(part="gradient"),
        drawn(content="c1"),
        drawn(after="c0"),
    ]
    assert all(len(set(noise)) == 6 for noise in (drawn(), *others)), "each number has its own"
    assert len({drawn(), *others}) == 8


def examined(door: Gate, logits: torch.Tensor, part: str = "answer", number: int = 0) -> torch.Tensor:
    """What leaves in place of some logits."""
    what, name = Asked(number, "examine", "c0", "", {}), "logits" if part == "answer" else "d/dx"
    return door.release(what, part, {name: logits}, replace(QUESTION, reads=()), {})[name]


def rows_of(door: Gate) -> int:
    assert door.budgets is not None
    return len(list(door.budgets.account.entries()))


@pytest.mark.parametrize("part", ["answer", "gradient"])
def test_an_answer_that_differs_in_its_last_digit_is_noised_and_charged_anew(part: str) -> None:
    door, one = noisy(), torch.ones(2, 3)
    other = one.clone()
    other[1, 2] = torch.nextafter(one[1, 2], torch.tensor(2.0))
    first, again = examined(door, one, part), examined(door, one, part)
    assert torch.equal(first, again)
    assert (rows_of(door), door.ledger.up("a")) == (1, 24), "the very same costs nothing"
    moved = examined(door, other, part)
    assert ((moved - first).abs() > 1e-3).all(), "no number has the noise that it had"
    assert (rows_of(door), door.ledger.up("a")) == (2, 48), "and its line is written, too"
    assert torch.equal(examined(door, one, part), first)
    assert torch.equal(examined(door, other, part), moved)
    assert (rows_of(door), door.ledger.up("a")) == (2, 48)
    assert sum(door.ledger.spent("a")[0].values()) == sum(spent_at(door).values())


def spent_at(door: Gate) -> Mapping[str, int]:
    assert door.budgets is not None
    return door.budgets.account.spent("a", "run").run


def test_what_the_bound_makes_equal_is_one_release() -> None:
    door = noisy(bound=1.0)
    first = examined(door, torch.full((2, 3), 5.0))
    assert torch.equal(examined(door, torch.full((2, 3), 7.0)), first)
    assert rows_of(door) == 1


def test_the_runs_salt_is_in_all_noise_and_in_what_is_charged() -> None:
    account = Account(None, 0)
    left = [
        examined(noisy(salt=salt, account=account), torch.zeros(2, 3)) for salt in ("", "one", "two", "one")
    ]
    assert torch.equal(left[1], left[3])
    assert all(((left[a] - left[b]).abs() > 1e-3).all() for a, b in ((0, 1), (1, 2), (0, 2)))
    assert len(list(account.entries())) == 3


# --- after a restart -----------------------------------------------------------------------------


def restarted(path: Path, **policy: Any) -> Gate:
    """A gate on a ledger's file as a new process opens it."""
    ledger = Ledger()
    ledger.open(path)
    return gate(ledger, **policy)


def test_other_content_under_an_old_number_is_charged_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    release(restarted(path), asked(0, "c0"))
    door = restarted(path)
    door.admit(asked(0, "c1"), QUESTION, {})
    release(door, asked(0, "c1"))
    assert door.ledger.up("clinic") == 2 * 56
    assert door.ledger.answers("clinic") == 2
    assert door.ledger.summary()["questions"] == 2
    assert len(path.read_text().splitlines()) == 2


def test_an_old_number_does_not_lead_past_most_questions_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for number in range(2):
        release(restarted(path), asked(number))
    door = restarted(path, most_questions=2)
    door.admit(asked(1), QUESTION, {})  # what was answered may be answered again
    release(door, asked(1))
    assert (door.ledger.answers("clinic"), len(path.read_text().splitlines())) == (2, 2)
    for number in (0, 1, 2):
        with pytest.raises(QuestionRefused, match="most_questions: 2"):
            door.admit(asked(number, "another"), QUESTION, {})


def test_an_old_number_does_not_lead_past_most_bytes_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    release(restarted(path), asked(0))
    door = restarted(path, most_bytes=56 + 55)
    with pytest.raises(QuestionRefused, match="most_bytes: 111"):
        release(door, asked(0, "another"))
    release(door, asked(0))
    assert door.ledger.up("clinic") == 56
