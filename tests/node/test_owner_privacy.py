"""Report of ``fedstill node check`` on policy and privacy, with all faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from fedstill.node import folder_check
from fedstill.node.folder_check import known_queries, policy_faults, privacy_faults
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.pate import PATE
from tests.support.node_folders import MODEL, charge, folder_of, stdout_of
from tests.support.node_services import JUDGING

# --- faults -------------------------------------------------------------------------------------------

FAULTS = {
    "no epsilon to calibrate noise from": (
        'mechanism = "dp-sgd"\n',
        "invalid privacy.epsilon = inf (expected a finite value, from which privacy.training.noise",
    ),
    "the same of votes": ('mechanism = "pate"\n', "from which privacy.pate.noise is calibrated"),
    "a budget and no mechanism": (
        "epsilon = 3.0\n",
        "invalid privacy.mechanism = 'none' (expected a mechanism",
    ),
    "a budget of the data and no mechanism": ("total_epsilon = 3.0\n", "privacy.mechanism = 'none'"),
    "noise without a bound": (
        'mechanism = "noisy-outputs"\nepsilon = 3.0\n',
        "invalid privacy.outputs.bound = 0.0 (expected above 0 if a budget is set",
    ),
    "no groups": (
        'mechanism = "pate"\nepsilon = 3.0\ngroup_size = 4\n',
        "invalid privacy.group_size = 4 (expected 1 without data.group",
    ),
    "a delta of one record": (
        'mechanism = "pate"\nepsilon = 3.0\ndelta = 0.02\n',
        "invalid privacy.delta = 0.02 (expected well below 1 / 60",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_impossible_privacy_options_are_a_fault(tmp_path: Path, what: str) -> None:
    privacy, message = FAULTS[what]
    (fault,) = folder_check.check_folder(folder_of(tmp_path / "clinic", privacy)).faults
    assert message in fault


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
def test_valid_privacy_options_are_no_fault(tmp_path: Path, privacy: str) -> None:
    assert folder_check.check_folder(folder_of(tmp_path / "clinic", privacy)).faults == ()


def test_layers_without_dp_support_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LSTM(8, 4))
    config = DPSGD(epsilon=3.0)
    (fault,) = privacy_faults(config, None, model)
    assert "privacy.mechanism dp-sgd: the model cannot be trained with DP-SGD" in fault
    assert "1: BatchNorm2d -> GroupNorm(" in fault
    assert "3: LSTM -> " in fault
    assert privacy_faults(PATE(epsilon=3.0), None, model) == []


def test_damaged_audit_log_is_a_fault(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "clinic", 'mechanism = "pate"\nepsilon = 3.0\n')
    charge(folder, {"gaussian(2.0)": 1})
    assert folder_check.check_folder(folder).faults == ()
    (folder / "audit.sqlite").rename(tmp_path / "elsewhere")
    (fault,) = folder_check.check_folder(folder).faults
    assert "privacy.audit_log 'audit.sqlite'" in fault
    assert "its head exists" in fault
    assert f"fedstill audit accept {folder}" in fault
    (folder / "audit.sqlite").write_bytes(b"no audit at all, and long enough to be read as one" * 100)
    assert len(folder_check.check_folder(folder).faults) == 1


def test_missing_audit_log_with_runs_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "clinic", 'mechanism = "dp-sgd"\nepsilon = 30.0\n')
    (folder / "runs" / "spring").mkdir(parents=True)
    (folder / "runs" / "spring" / "plan.json").touch()
    (fault,) = folder_check.check_folder(folder).faults
    assert "'audit.sqlite': is missing, but its node's runs exist" in fault
    output = stdout_of(capsys, str(folder), "digits-ensemble", code=2)
    assert "is left" not in output
    assert "It cannot take part: nothing can be charged" in output
    (folder / "runs" / "spring" / "plan.json").unlink()
    assert folder_check.check_folder(folder).faults == ()


def test_unknown_query_name_is_a_fault(tmp_path: Path) -> None:
    assert policy_faults(PolicyConfig()) == []
    assert policy_faults(PolicyConfig(queries=("*", *known_queries()))) == []
    (fault,) = policy_faults(PolicyConfig(queries=("predict_logits", "count_lables")))
    assert "unknown query of policy.queries 'count_lables': did you mean 'count_labels'?" in fault
    rest = MODEL + '[policy]\nqueries = ["predict_logit"]\n'
    (fault,) = folder_check.check_folder(folder_of(tmp_path / "clinic", rest=rest)).faults
    assert "did you mean 'predict_logits'" in fault


def test_plugin_that_is_neither_method_nor_task_is_a_fault() -> None:
    method, task = JUDGING, "fedstill.tasks.classification:ClassificationConfig"
    assert policy_faults(PolicyConfig(plugins=(method, task))) == []
    names = ("missing_of_owner:Method", "gone", "json:JSONDecoder")
    faults = policy_faults(PolicyConfig(plugins=(method, names[0], task, *names[1:])))
    assert [name for name, fault in zip(names, faults, strict=True) if name in fault] == list(names)


def test_queries_behind_method_options_are_known() -> None:
    """FedIOD has one for fresh inputs, FedMD for transfer learning, FedKD for agreeing on bounds."""
    assert {"predict", "transfer", "max_logit", "predict_logits", "train", "upload_data"} <= known_queries()
