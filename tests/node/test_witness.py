"""What a node's runs have released bears witness to what its data have cost."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fedstill.node.account import DATA, Account, Entry, LedgerError, Spent
from fedstill.node.anchor import Totals
from fedstill.node.ledger import Ledger
from fedstill.node.witness import released

from fedstill.core.errors import RunFolderError
from fedstill.node.asked import Asked
from fedstill.node.budgets import Budgets
from fedstill.node.gate import Gate
from fedstill.node.mechanism import Mechanism
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.protocol.plan import Plan
from fedstill.protocol.questions import NodeSide, Question
from fedstill.protocol.schedule import LocalConfig
from fedstill.tasks.classification import Classification
from tests.node.test_host import FEDIOD, PLAN, Clinic, same

NOISE, OTHER = "gaussian(4.0)", "laplace(10.0)"
BARE, QUESTIONS, BYTES = "", "questions", "bytes"
PRIVACY = """
[privacy]
mechanism = "noisy-outputs"
[privacy.outputs]
how = "gaussian"
noise = 200.0
bound = 1.0
"""
ONE_WAY = {**FEDIOD, "gan": 0.0, "through": False}
PRIVATE = Plan("one", ONE_WAY, PLAN.spec)


def line(price: Mapping[str, int] | None, number: int = 0, node: str = "clinic") -> str:
    """Of a run's own ledger, as a release leaves it."""
    about = {"at": "2026-01-01T00:00:00.000+00:00", "node": node, "number": number, "question": "examine"}
    sizes = {"down": {"inputs": 4}, "up": {"logits": 40}}
    told = {"mechanism": "noisy-outputs", "price": price}
    return json.dumps({**about, "part": "answer", "content": "c", **sizes, "privacy": told}) + "\n"


def write(folder: Path, run: str, *lines: str) -> None:
    path = folder / "runs" / run / "ledger.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def entry(run: str, number: int, price: Mapping[str, int], guarantee: bool = True) -> Entry:
    return Entry(run, DATA, number, "examine", "answer", "c", "", {"logits": 40}, "rule", price, guarantee)


def allow(spent: Spent) -> None:
    """No budget."""


# --- what the files say -------------------------------------------------------------------------------


def test_what_runs_released_is_added_up_by_run_whatever_the_node_was_called(tmp_path: Path) -> None:
    assert released(tmp_path) == Totals()
    refused = json.dumps({"at": "", "node": "clinic", "number": 2, "question": "examine", "refused": "no"})
    write(
        tmp_path,
        "spring",
        line({NOISE: 2, OTHER: 1}),
        line(None, 1),
        refused + "\n",
        line({NOISE: 1}, 2, "the same under another name"),
        line({}, 3),
        line({OTHER: 7}, 4)[:-1],  # killed while it was written: never released
    )
    write(tmp_path, "autumn", line({NOISE: 1}))
    write(tmp_path, "winter")
    assert released(tmp_path) == {
        (DATA, "spring", NOISE): 3,
        (DATA, "spring", OTHER): 1,
        (DATA, "spring", BARE): 1,
        (DATA, "spring", QUESTIONS): 4,
        (DATA, "spring", BYTES): 160,
        (DATA, "autumn", NOISE): 1,
        (DATA, "autumn", QUESTIONS): 1,
        (DATA, "autumn", BYTES): 40,
    }
    shutil.rmtree(tmp_path / "runs/spring")
    autumn = {NOISE: 1, QUESTIONS: 1, BYTES: 40}
    assert released(tmp_path) == {(DATA, "autumn", event): times for event, times in autumn.items()}


@pytest.mark.parametrize(
    "broken", ["?\n", line({NOISE: -1}), line({"magic(1.0)": 1}), line({NOISE: 1}).replace('"price"', '"p')]
)
def test_a_run_whose_ledger_is_broken_is_named(tmp_path: Path, broken: str) -> None:
    write(tmp_path, "spring", broken, line({NOISE: 1}))
    with pytest.raises(RunFolderError, match=r"spring.ledger\.jsonl"):
        released(tmp_path)


# --- against the account ------------------------------------------------------------------------------


def test_an_account_that_shows_less_than_was_released_charges_nothing_until_settled(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    seen = Totals({(DATA, "spring", NOISE): 3, (DATA, "spring", BARE): 2, (DATA, "autumn", OTHER): 1})
    with closing(Account(path, 1, witness=Totals({(DATA, "spring", NOISE): 1}))) as account:
        assert account.trouble is not None  # it is new, and there was a run
    with closing(Account(path, 1)) as account:
        account.charge(entry("spring", 0, {NOISE: 2, OTHER: 5}), allow)
        account.charge(entry("spring", 1, {}, guarantee=False), allow)
    with closing(Account(path, 1, witness=seen)) as account:
        for attempt in (account.verify, account.require_sound):
            with pytest.raises(
                LedgerError, match=r"less than run 'spring' has released: 1 x gaussian\(4.0\)"
            ):
                attempt()
        with pytest.raises(LedgerError, match="its owner has settled it"):
            account.charge(entry("spring", 2, {NOISE: 1}), allow)
        account.settle("from a backup")
        account.verify()
        spring, autumn = account.spent(DATA, "spring"), account.spent(DATA, "autumn")
        assert (spring.run, spring.bare_run) == ({NOISE: 3, OTHER: 5}, 2)  # no more than was missing
        assert (autumn.run, autumn.bare_run) == ({OTHER: 1}, 0)
        assert (autumn.total, autumn.bare_total) == ({NOISE: 3, OTHER: 6}, 2)
        assert account.charge(entry("spring", 2, {NOISE: 1}), allow)
    with closing(Account(path, 1, witness=seen)) as account:  # settled once is settled
        account.verify()
        with pytest.raises(LedgerError, match="nothing is wrong"):
            account.settle("again")


def test_anchor_and_witness_are_not_charged_both(tmp_path: Path) -> None:
    """An older ledger beside its newest anchor: each knows of more, and the larger number counts."""
    path = tmp_path / "ledger.sqlite"
    with closing(Account(path, 1)) as account:
        account.charge(entry("spring", 0, {NOISE: 1}), allow)
    shutil.copy(path, tmp_path / "older")
    with closing(Account(path, 1)) as account:
        account.charge(entry("spring", 1, {NOISE: 2, OTHER: 2}), allow)
    shutil.copy(tmp_path / "older", path)
    seen = Totals({(DATA, "spring", NOISE): 5, (DATA, "spring", OTHER): 1})
    with closing(Account(path, 1, witness=seen)) as account:
        assert "its anchor at row 2" in str(account.trouble)
        account.settle("from a backup")
        assert account.spent(DATA, "spring").run == {NOISE: 5, OTHER: 2}


def test_a_session_goes_on_when_its_owner_settles_meanwhile(tmp_path: Path) -> None:
    path, seen = tmp_path / "ledger.sqlite", Totals({(DATA, "spring", NOISE): 1})
    with closing(Account(path, 1, witness=seen)) as account, closing(Account(path, 1, witness=seen)) as owner:
        with pytest.raises(LedgerError):
            account.charge(entry("spring", 1, {NOISE: 1}), allow)
        owner.settle("so be it")
        assert account.charge(entry("spring", 1, {NOISE: 1}), allow)
        assert account.spent(DATA, "spring").run == {NOISE: 2}


def test_what_is_only_read_shows_the_trouble_too(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Account(path, 1).close()
    seen = Totals({(DATA, "spring", BARE): 1})
    with closing(Account(path, None, read_only=True, witness=seen)) as account:
        assert account.trouble == "shows less than run 'spring' has released: 1 without guarantee"


# --- at a node ----------------------------------------------------------------------------------------


def private(folder: Path, more: str = "", run: str = "one") -> Clinic:
    """A node that answers with noise, and pays for it."""
    return Clinic(folder, PRIVACY + more, dataclasses.replace(PRIVATE, run=run))


def ask(clinic: Clinic, number: int) -> Any:
    return clinic.ask(number, differentiable=False)


@contextmanager
def ledger(clinic: Clinic, witness: Totals | None = None) -> Iterator[Account]:
    with closing(Account(clinic.folder / "ledger.sqlite", 7, witness=witness)) as account:
        yield account


def copy(folder: Path, to: Path) -> None:
    """As an owner backs a ledger up, anchor and all."""
    to.mkdir(exist_ok=True)
    for file in folder.glob("ledger.sqlite*"):
        shutil.copy(file, to)


def test_a_ledger_restored_with_its_anchor_lets_nobody_join_until_it_is_settled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clinic = private(tmp_path / "clinic").ready()
    _, answer = ask(clinic, 0)
    clinic.say("leave")
    copy(clinic.folder, tmp_path / "backup")
    clinic.ready()
    ask(clinic, 1)
    ask(clinic, 2)
    with ledger(clinic) as account:
        before = account.spent(DATA, "one")
    assert before.run
    clinic.say("leave")
    for file in clinic.folder.glob("ledger.sqlite*"):
        file.unlink()
    copy(tmp_path / "backup", clinic.folder)
    with ledger(clinic) as account:
        assert account.trouble is None  # by itself it looks sound

    with caplog.at_level(logging.WARNING):
        refused = clinic.say("join", plan=clinic.plan.to_dict())
    assert refused["text"] == "its data or model fail here: its own log says more"
    assert not {"ledger", "released", "LedgerError", "sqlite"} & set(json.dumps(refused).split('"'))
    assert f"{clinic.folder / 'ledger.sqlite'}: shows less than run 'one' has released" in caplog.text
    assert "fedstill ledger settle" in caplog.text
    assert clinic.host.session is None
    assert "run" in ask(clinic, 3)["text"]  # no run is joined
    assert (
        "its own log says more"
        in private(clinic.folder, run="two").say(
            "join", plan=dataclasses.replace(PRIVATE, run="two").to_dict()
        )["text"]
    )

    with ledger(clinic, released(clinic.folder)) as account:
        account.settle("the disk was replaced")
        after = account.spent(DATA, "one")
    assert (after.run, after.bare_run) == (before.run, before.bare_run)
    clinic.ready()  # the same process: nothing was left locked
    same(ask(clinic, 0)[1], answer)
    assert not isinstance(ask(clinic, 3), dict)


@pytest.mark.parametrize(
    "privacy",
    [
        "",
        PRIVACY,
        '[privacy]\nmechanism = "dp-sgd"\n[privacy.training]\nnoise = 1.0\n',
        '[privacy]\nmechanism = "pate"\n[privacy.pate]\nteachers = 4\nnoise = 8.0\n'
        "threshold = 2.0\nthreshold_noise = 4.0\n",
    ],
    ids=["none", "noisy-outputs", "dp-sgd", "pate"],
)
def test_the_witness_of_a_sound_node_says_what_its_account_says(tmp_path: Path, privacy: str) -> None:
    """Else it would find trouble where there is none, or none where there is: also after a kill."""
    clinic = Clinic(tmp_path / "clinic", f"\n{privacy}", PRIVATE).ready()
    for number in range(3):
        ask(clinic, number)
        clinic.say("leave")
        clinic.again()
        clinic.ready()
    seen = released(clinic.folder)
    with ledger(clinic) as account:
        spent = account.spent(DATA, "one")
    assert sum(seen.values()) >= 3
    counted = {BARE: spent.bare_run, QUESTIONS: spent.questions_run, BYTES: spent.bytes}
    assert seen == +Totals({(DATA, "one", event): n for event, n in {**spent.run, **counted}.items()})


def test_what_was_charged_and_not_released_is_no_trouble(tmp_path: Path, monkeypatch: Any) -> None:
    clinic = private(tmp_path / "clinic").ready()

    def fails(*given: Any, **more: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:  # killed in between
        patch.setattr(Ledger, "write", fails)
        assert "error" in ask(clinic, 0)["text"]
    assert not released(clinic.folder)
    clinic.say("leave")
    clinic.ready()
    ask(clinic, 0)
    with ledger(clinic) as account:
        seen = released(clinic.folder)
        assert list(account.spent(DATA, "one").run.values()) == [1]
        assert sorted(seen.values()) == [1, 1, account.spent(DATA, "one").bytes]


@pytest.mark.parametrize("when", ["account", "protect", "ledger"])
def test_whatever_fails_while_joining_leaves_nothing_open(
    tmp_path: Path, monkeypatch: Any, when: str
) -> None:
    clinic = private(tmp_path / "clinic")
    opened: list[Account] = []

    class Seen(Account):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            opened.append(self)

    def fails(*given: Any, **more: Any) -> None:
        raise LedgerError("/home/clinic/ledger", "is broken")

    with monkeypatch.context() as patch:
        patch.setattr("fedstill.node.session.Account", Seen)
        place = {
            "account": "fedstill.node.account.Account.require_sound",
            "protect": "fedstill.node.session.protect",
            "ledger": "fedstill.node.session.Ledger.open",
        }[when]
        patch.setattr(place, fails)
        refused = clinic.say("join", plan=clinic.plan.to_dict())
    assert "/home/clinic" not in json.dumps(refused)
    (account,) = opened
    with pytest.raises(Exception, match="closed"):
        account.spent(DATA, "one")
    clinic.ready()
    assert not isinstance(ask(clinic, 0), dict)


def test_another_name_of_a_node_has_the_same_total(tmp_path: Path) -> None:
    clinic = private(tmp_path / "clinic").ready()
    ask(clinic, 0)
    clinic.say("leave")
    with ledger(clinic) as account:
        (price,) = account.spent(DATA, "one").total.items()
    file = clinic.folder / "node.toml"
    other = private(clinic.folder, run="two")
    file.write_text(file.read_text().replace('"clinic"', '"praxis"'))
    other.again()
    other.ready()
    ask(other, 0)
    with ledger(other) as account:
        assert account.spent(DATA, "two").run == dict([price])
        assert account.spent(DATA, "two").total == {price[0]: 2 * price[1]}
        assert {row["node"] for row in account.entries()} == {DATA}


def test_nodes_over_the_same_data_share_a_total(tmp_path: Path) -> None:
    """Two folders, one ledger: what the first has spent the second has not left."""
    shared = f'ledger = "{tmp_path / "shared.sqlite"}"\n'
    limits = PRIVACY.replace("[privacy.outputs]", f"{shared}total_epsilon = EPSILON\n[privacy.outputs]")
    clinics = [
        Clinic(tmp_path / name, limits.replace("EPSILON", "0.5"), dataclasses.replace(PRIVATE, run=name))
        for name in ("first", "second")
    ]
    first, second = clinics
    first.ready()
    number = 0
    while not isinstance(ask(first, number), dict):
        number += 1
    assert number > 0
    first.say("leave")
    second.say("join", plan=second.plan.to_dict())
    second.say("learn", seconds=60)
    assert "privacy budget" in ask(second, 0)["text"]


def test_nodes_that_share_a_holder_pay_each_for_its_own_release() -> None:
    """Equal in all but the name, they draw other noise: two looks at the same records."""
    account = Account(None, 7)
    question = Question(
        "predict", lambda group, number: {}, {"x": "inputs"}, {"logits": "logits"}, rows=4, reads=()
    )
    config = NoisyOutputs(outputs=OutputsConfig("gaussian", noise=50.0, bound=1.0))
    side, x = NodeSide({"predict": question}), {"x": torch.zeros(4, 1, 4, 4)}
    spent, left = [], []
    for name in ("first", "second", "second"):
        mechanism = Mechanism(
            name, config, side, LocalConfig(epochs=1, batch=10), 50, Classification(4), secret=3
        )
        mechanism.binding = "the same data, model and options"
        gate = Gate(name, PolicyConfig(), Ledger())
        gate.budgets = Budgets(mechanism, account, "run", DATA)
        asked = Asked(0, "predict", "content", "", {})
        gate.admit(asked, question, x)
        left.append(gate.release(asked, "answer", {"logits": torch.zeros(4, 4)}, question, x)["logits"])
        spent.append(sum(account.spent(DATA, "run").run.values()))
        assert not account.spent(name, "run").run
    assert not torch.equal(left[0], left[1])
    assert torch.equal(left[1], left[2])  # asked again after a stop
    assert spent == [1, 2, 2]


def test_a_ledger_beside_a_home_folder_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = PRIVACY.replace("[privacy.outputs]", 'ledger = "~/clinic.sqlite"\n[privacy.outputs]')
    clinic = Clinic(tmp_path / "clinic", text, PRIVATE).ready()
    ask(clinic, 0)
    assert (tmp_path / "clinic.sqlite").exists()
