"""Privacy output of ``fedstill node check``: protection, cost of a run, and remaining budget."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedstill.cli.main import main
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.events import Event
from tests.support.node_folders import charge, folder_of, stdout_of


def test_check_names_groups_if_records_are_the_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "a patient or slide has up to 6 at one node; privacy.group_size = 6 protects all"
    for number, (size, output) in enumerate((("", True), ("group_size = 6\n", False))):
        privacy = f'mechanism = "pate"\nepsilon = 30.0\n{size}'
        folder = folder_of(tmp_path / str(number), privacy, groups=True)
        text = (folder / "node.toml").read_text()
        text = text.replace("[data]\n", '[data]\ngroup = "groups"\n')
        (folder / "node.toml").write_text(text)
        assert (note in stdout_of(capsys, str(folder))) == output


def test_check_prints_mechanism_unit_and_remaining_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = 'mechanism = "dp-sgd"\nepsilon = 3.0\ntotal_epsilon = 10.0\ntotal_delta = 1e-6\n'
    folder = folder_of(tmp_path / "clinic", privacy)
    output = stdout_of(capsys, str(folder), "digits-fedkd-private")
    assert (
        "privacy dp-sgd, secure randomness; for one training record of this node, added or removed" in output
    )
    assert "budget of a run: epsilon 3 at delta 1e-05" in output
    assert "budget of all runs on these data: epsilon 10 at delta 1e-06, of which 10 is left" in output
    assert re.search(r"It can take part\. Privacy cost: epsilon (2\.9\d*|3) ", output)
    charge(folder, {"gaussian(2.0)": 1})
    remaining = 10 - compute_epsilon({Event("gaussian", 2.0): 1}, 1e-6)
    output = stdout_of(capsys, str(folder), "digits-fedkd-private")
    (printed,) = re.findall(r"of which (\S+) is left", output)
    assert remaining - 0.001 <= float(printed) <= remaining
    assert "It can take part." in output


def test_check_prints_missing_budgets_and_free_information(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = 'mechanism = "dp-sgd"\nepsilon = 3.0\ntotal_epsilon = 4.0\n'
    folder = folder_of(tmp_path / "clinic", privacy)
    output = stdout_of(capsys, str(folder))
    assert "accountant pld: a budget may be exceeded by some delta" in output
    assert "a server can learn at no privacy cost which classes are here" in output
    charge(folder, {"gaussian(2.0)": 1}, unit="4 records of one patient")
    assert "earlier charges protect another unit" in stdout_of(capsys, str(folder))
    other = folder_of(tmp_path / "other", f'{privacy}accountant = "rdp"\n')
    text = (other / "node.toml").read_text().replace("[data]\n", '[data]\nclasses = ["0", "1"]\n')
    (other / "node.toml").write_text(text)
    output = stdout_of(capsys, str(other))
    assert "accountant pld" not in output
    assert "can learn for free" not in output


def test_check_refuses_a_run_beyond_the_remaining_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = 'mechanism = "dp-sgd"\nepsilon = 3.0\ntotal_epsilon = 4.0\n'
    folder = folder_of(tmp_path / "clinic", privacy)
    assert "It can take part." in stdout_of(capsys, str(folder), "digits-fedkd-private")
    charge(folder, {"gaussian(1.2)": 1})
    output = stdout_of(capsys, str(folder), "digits-fedkd-private")
    budget = "the data's budget, epsilon 4 at delta 1e-05"
    assert f"It cannot take part: it costs more than is left of {budget}." in output
    bare = folder_of(tmp_path / "bare", privacy)
    charge(bare, {}, guarantee=False)
    assert "earlier releases had no guarantee" in stdout_of(capsys, str(bare), "digits-fedkd-private")


def test_check_refuses_a_run_with_other_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "clinic", "")
    text = (folder / "node.toml").read_text()
    for classes, output in (
        ("0123456789", "It can take part."),
        ("1023456789", "its classes are not those of data.classes, in their order: 0, 1, 2, 3, 4, 5"),
    ):
        (folder / "node.toml").write_text(text.replace("[data]\n", f"[data]\nclasses = {list(classes)}\n"))
        assert output in stdout_of(capsys, str(folder), "digits-fedkd-private")


def test_check_prints_cost_by_accountant_of_the_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = 'mechanism = "dp-sgd"\nepsilon = 30.0\ntraining = { noise = 2.0 }\n'
    costs = {}
    for accountant in ("pld", "rdp"):
        folder = folder_of(tmp_path / accountant, f'{privacy}accountant = "{accountant}"\n')
        output = stdout_of(capsys, str(folder), "digits-ensemble")
        (cost,) = re.findall(rf"Privacy cost: epsilon (\S+) \({accountant.upper()}\) at", output)
        costs[accountant] = float(cost)
    assert costs["pld"] + 0.01 < costs["rdp"]


@pytest.mark.parametrize(
    ("privacy", "reason"),
    [
        ('mechanism = "dp-sgd"\nepsilon = 3.0\ntraining = { noise = 0.0 }\n', "privacy.training.noise is 0"),
        ('mechanism = "pate"\nepsilon = 3.0\n', "privacy.pate.noise is none, and the number of queries"),
    ],
)
def test_check_prints_why_no_budget_suffices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], privacy: str, reason: str
) -> None:
    output = stdout_of(capsys, str(folder_of(tmp_path / "clinic", privacy)), "digits-ensemble")
    assert f"It cannot take part: {reason}" in output
    assert "epsilon no guarantee" not in output
    assert "Privacy cost: none, as the node would refuse" in output
    output = stdout_of(capsys, str(tmp_path / "clinic"))
    assert "ensemble no" in output
    assert "standalone yes" in output


def test_check_prints_no_guarantee_without_a_mechanism(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = stdout_of(capsys, str(folder_of(tmp_path / "clinic")), "digits-fediod")
    assert "privacy none: releases have no noise and no guarantee" in output
    assert "Privacy cost" not in output


@pytest.mark.parametrize(
    ("privacy", "run", "reason"),
    [
        (
            'mechanism = "pate"\nepsilon = 3.0\n',
            "digits-fedmd",
            "teachers are trained once, before the first query",
        ),
        (
            'mechanism = "dp-sgd"\nepsilon = 0.05\n',
            "digits-fediod",
            "invalid privacy.epsilon = 0.05 (expected a larger one",
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
def test_check_refuses_a_run_that_privacy_options_forbid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], privacy: str, run: str, reason: str
) -> None:
    output = stdout_of(capsys, str(folder_of(tmp_path / "clinic", privacy)), run)
    assert "It cannot take part: " in output
    assert reason in output


def test_check_notes_unlimited_runs_without_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "clinic", 'mechanism = "dp-sgd"\nepsilon = 3.0\ntotal_epsilon = inf\n')
    output = stdout_of(capsys, str(folder))
    assert "no budget of all runs on these data (privacy.total_epsilon is inf)" in output
    assert "the server names runs, and each may cost 3 again" in output
    assert "No faults." in output


def test_plan_finds_noise_from_the_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "clinic", 'mechanism = "dp-sgd"\ntotal_epsilon = 3.0\n')
    with pytest.raises(SystemExit) as exit_info:
        main(["privacy", "plan", str(folder), "digits-fedkd"])
    assert not exit_info.value.code
    output = " ".join(capsys.readouterr().out.split())
    assert "found noise chosen for epsilon <= 3" in output
    assert "of the run no budget" in output
    assert np.isclose(float(output.split("of the data budget 3 at delta 1e-05: ")[1].split()[0]), 3, atol=0.1)
