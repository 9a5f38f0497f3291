"""``fedstill node check`` about policy and privacy: what it says, and every fault that it finds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fedstill.cli.main import main
from fedstill.node import owner
from fedstill.node.audit import AuditLog
from fedstill.node.entries import DATA, Entry
from fedstill.node.faults import known_questions, policy_faults, privacy_faults
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.events import Event
from fedstill.privacy.pate import PATE

NODE = 'name = "clinic"\nonline = false\n[data]\n[local]\nepochs = 2\n'
MODEL = '[model]\nname = "mlp:8"\n'


def folder_of(path: Path, privacy: str = "", rest: str = MODEL, groups: bool = False) -> Path:
    """A node's folder with 60 records."""
    path.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    arrays = {"images": draw.uniform(0, 1, (60, 8, 8)).astype(np.float32), "labels": np.arange(60) % 10}
    if groups:
        arrays["groups"] = np.arange(60) // 6
    np.savez(path / "data.npz", **arrays)
    (path / "node.toml").write_text(f"{NODE}{rest}[privacy]\n{privacy}")
    secret = path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("7\n")
    return path


def charge(folder: Path, events: dict[str, int], *, guarantee: bool = True) -> None:
    audit = AuditLog(folder / "audit.sqlite")
    entry = Entry("old", DATA, "clinic", 0, "q", "answer", price=events, bare=int(not guarantee))
    audit.charge(entry)
    audit.close()


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What the command says, on one line; errors behind the rest."""
    with pytest.raises(SystemExit) as left:
        main(["node", "check", *words])
    assert left.value.code == code
    told = capsys.readouterr()
    return " ".join((told.out + told.err).split())


# --- faults -------------------------------------------------------------------------------------------

FAULTS = {
    "no epsilon to find noise from": (
        'mechanism = "dp-sgd"\n',
        "privacy.epsilon is inf: allowed is finite, where privacy.training.noise is to be found from it",
    ),
    "the same of votes": ('mechanism = "pate"\n', "where privacy.pate.noise is to be found"),
    "a budget and no mechanism": ("epsilon = 3.0\n", "privacy.mechanism is 'none': allowed is a mechanism"),
    "a budget of the data and no mechanism": ("total_epsilon = 3.0\n", "privacy.mechanism is 'none'"),
    "noise without a bound": (
        'mechanism = "noisy-outputs"\nepsilon = 3.0\n',
        "privacy.outputs.bound is 0.0: allowed is above 0, where a budget is set",
    ),
    "no groups": (
        'mechanism = "pate"\nepsilon = 3.0\ngroup_size = 4\n',
        "privacy.group_size is 4: allowed is 1, where data.group does not say",
    ),
    "a delta of one record": (
        'mechanism = "pate"\nepsilon = 3.0\ndelta = 0.02\n',
        "privacy.delta is 0.02: allowed is well below 1 / 60",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_privacy_that_cannot_be_kept_is_a_fault(tmp_path: Path, what: str) -> None:
    privacy, told = FAULTS[what]
    (fault,) = owner.faults(folder_of(tmp_path / "clinic", privacy))
    assert told in fault


@pytest.mark.parametrize(
    "privacy",
    [
        "",
        'mechanism = "dp-sgd"\nepsilon = 3.0\n',
        'mechanism = "dp-sgd"\ntraining = { noise = 1.0 }\n',
        'mechanism = "noisy-outputs"\nepsilon = 3.0\noutputs = { bound = 4.0 }\n',
        'mechanism = "noisy-outputs"\noutputs = { noise = 4.0 }\n',
    ],
)
def test_what_can_be_kept_is_none(tmp_path: Path, privacy: str) -> None:
    assert owner.faults(folder_of(tmp_path / "clinic", privacy)) == []


def test_who_has_several_records_is_named_where_one_is_protected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "a patient or slide has up to 6 at one node; privacy.group_size = 6 protects all"
    for number, (size, told) in enumerate((("", True), ("group_size = 6\n", False))):
        privacy = f'mechanism = "pate"\nepsilon = 30.0\n{size}'
        folder = folder_of(tmp_path / str(number), privacy, groups=True)
        text = (folder / "node.toml").read_text()
        text = text.replace("[data]\n", '[data]\ngroup = "groups"\n')
        (folder / "node.toml").write_text(text)
        assert (note in said(capsys, str(folder))) == told


def test_every_layer_that_cannot_learn_privately_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LSTM(8, 4))
    config = DPSGD(epsilon=3.0)
    (fault,) = privacy_faults(config, None, model)
    assert "privacy.mechanism dp-sgd: the model cannot learn privately" in fault
    assert "1: BatchNorm2d -> GroupNorm(" in fault
    assert "3: LSTM -> " in fault
    assert privacy_faults(PATE(epsilon=3.0), None, model) == []


def test_an_audit_log_in_trouble_is_a_fault(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "clinic", 'mechanism = "pate"\nepsilon = 3.0\n')
    charge(folder, {"gaussian(2.0)": 1})
    assert owner.faults(folder) == []
    (folder / "audit.sqlite").rename(tmp_path / "elsewhere")
    (fault,) = owner.faults(folder)
    assert "privacy.audit_log 'audit.sqlite'" in fault
    assert "its head is there" in fault
    assert f"fedstill audit settle {folder}" in fault
    (folder / "audit.sqlite").write_bytes(b"no audit at all, and long enough to be read as one" * 100)
    assert len(owner.faults(folder)) == 1


def test_an_audit_log_that_is_gone_with_its_head_is_a_fault_while_its_runs_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "clinic", 'mechanism = "dp-sgd"\nepsilon = 30.0\n')
    (folder / "runs" / "spring").mkdir(parents=True)
    (folder / "runs" / "spring" / "plan.json").touch()
    (fault,) = owner.faults(folder)
    assert "'audit.sqlite': is gone, and its node's runs are there" in fault
    told = said(capsys, str(folder), "digits-ensemble", code=2)
    assert "is left" not in told
    assert "It cannot take part: nothing can be charged" in told
    (folder / "runs" / "spring" / "plan.json").unlink()
    assert owner.faults(folder) == []


def test_a_question_that_no_method_asks_is_a_fault(tmp_path: Path) -> None:
    assert policy_faults(PolicyConfig()) == []
    assert policy_faults(PolicyConfig(questions=("*", *known_questions()))) == []
    (fault,) = policy_faults(PolicyConfig(questions=("examine", "count_lables")))
    assert "unknown question of policy.questions 'count_lables': did you mean 'count_labels'?" in fault
    rest = MODEL + '[policy]\nquestions = ["examin"]\n'
    (fault,) = owner.faults(folder_of(tmp_path / "clinic", rest=rest))
    assert "did you mean 'examine'" in fault


def test_questions_of_methods_options_are_known() -> None:
    """Asked by FedIOD for fresh inputs, FedMD for transfer learning, and FedKD where bounds are agreed on."""
    assert {"predict", "transfer", "tell_range", "examine", "train", "hand_over"} <= known_questions()


# --- what is said -------------------------------------------------------------------------------------


def test_mechanism_unit_and_what_is_left_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    privacy = 'mechanism = "dp-sgd"\nepsilon = 3.0\ntotal_epsilon = 10.0\ntotal_delta = 1e-6\n'
    folder = folder_of(tmp_path / "clinic", privacy)
    told = said(capsys, str(folder), "digits-fediod")
    assert "privacy dp-sgd, secure randomness; for one training record of this node, added or removed" in told
    assert "budget of a run: epsilon 3 at delta 1e-05" in told
    assert "budget of all runs on these data: epsilon 10 at delta 1e-06, of which 10 is left" in told
    assert "It can take part. It would pay epsilon 2.9" in told or "It would pay epsilon 3 at" in told
    charge(folder, {"gaussian(2.0)": 1})
    left = 10 - epsilon({Event("gaussian", 2.0): 1}, 1e-6)
    told = said(capsys, str(folder), "digits-fediod")
    (kept,) = re.findall(r"of which (\S+) is left", told)
    assert left - 0.001 <= float(kept) <= left
    assert "It can take part." in told


def test_a_run_that_the_data_cannot_pay_any_more_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = 'mechanism = "dp-sgd"\nepsilon = 3.0\ntotal_epsilon = 4.0\n'
    folder = folder_of(tmp_path / "clinic", privacy)
    assert "It can take part." in said(capsys, str(folder), "digits-fediod")
    charge(folder, {"gaussian(1.2)": 1})
    told = said(capsys, str(folder), "digits-fediod")
    left = "the data's budget, epsilon 4 at delta 1e-05"
    assert f"It cannot take part: it costs more than is left of {left}." in told
    bare = folder_of(tmp_path / "bare", privacy)
    charge(bare, {}, guarantee=False)
    assert "releases without guarantee have left" in said(capsys, str(bare), "digits-fediod")


def test_what_a_run_costs_is_told_by_the_owners_accountant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = 'mechanism = "dp-sgd"\nepsilon = 30.0\ntraining = { noise = 2.0 }\n'
    costs = {}
    for accountant in ("pld", "rdp"):
        folder = folder_of(tmp_path / accountant, f'{privacy}accountant = "{accountant}"\n')
        told = said(capsys, str(folder), "digits-ensemble")
        (cost,) = re.findall(rf"It would pay epsilon (\S+) \({accountant.upper()}\) at", told)
        costs[accountant] = float(cost)
    assert costs["pld"] + 0.01 < costs["rdp"]


@pytest.mark.parametrize(
    ("privacy", "reason"),
    [
        ('mechanism = "dp-sgd"\nepsilon = 3.0\ntraining = { noise = 0.0 }\n', "privacy.training.noise is 0"),
        ('mechanism = "pate"\nepsilon = 3.0\n', "privacy.pate.noise is none, and nobody says how often"),
    ],
)
def test_what_no_budget_can_pay_for_is_told_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], privacy: str, reason: str
) -> None:
    told = said(capsys, str(folder_of(tmp_path / "clinic", privacy)), "digits-ensemble")
    assert f"It cannot take part: {reason}" in told
    assert "epsilon no guarantee" not in told
    assert "It would pay nothing, since it would refuse" in told
    told = said(capsys, str(tmp_path / "clinic"))
    assert "ensemble no" in told
    assert "standalone yes" in told


def test_without_a_mechanism_no_guarantee_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, str(folder_of(tmp_path / "clinic")), "digits-fediod")
    assert "privacy none: answers leave as they are, without any guarantee" in told
    assert "It would pay" not in told


@pytest.mark.parametrize(
    ("privacy", "run", "reason"),
    [
        (
            'mechanism = "pate"\nepsilon = 3.0\n',
            "digits-fedmd",
            "teachers learn once, before the first question",
        ),
        (
            'mechanism = "dp-sgd"\nepsilon = 0.05\n',
            "digits-fediod",
            "privacy.epsilon is 0.05: allowed is more",
        ),
        (
            'mechanism = "dp-sgd"\nepsilon = 0.5\ntraining = { noise = 1.0 }\n',
            "digits-fedkd",
            "it costs more than the budget of a run, epsilon 0.5",
        ),
        (
            'mechanism = "dp-sgd"\nepsilon = 3.0\ncounts_noise = 0.0\n',
            "digits-fediod",
            "it refuses count_labels (privacy: a budget is set, and mechanism dp-sgd gives no guarantee for",
        ),
    ],
)
def test_a_run_that_the_owners_privacy_forbids_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], privacy: str, run: str, reason: str
) -> None:
    told = said(capsys, str(folder_of(tmp_path / "clinic", privacy)), run)
    assert "It cannot take part: " in told
    assert reason in told
