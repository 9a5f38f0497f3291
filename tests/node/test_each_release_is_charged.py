"""Two releases that differ in a single bit are charged twice; the same stored bytes only once.

For arbitrary orders of messages, stops and failures, see tests/node/test_release_ledger.py.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.data.public import PublicData
from fedstill.models.module_utils import to_vector
from fedstill.node import dp_training, folder_check
from fedstill.node.audit_entries import NODE_DATA
from fedstill.node.node_view import NodeView
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import NoPrivacy
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.protocol.run_plan import describe, public_fingerprint, public_tensors
from tests.support.node_services import FEDIOD, JUDGING, JUDGING_POLICY, PLAN, B, Clinic, image, same

PRIVATE = """
[privacy]
mechanism = "dp-sgd"
[privacy.training]
noise = 2.0
[privacy.critic]
noise = 2.0
"""
STEP = Event("gaussian", 2.0, rate=B / 40)  # of a critic, on 4 of 40 records
JUDGES = replace(PLAN, method={**FEDIOD, "name": JUDGING})  # critics can also be queried alone
ORDINARY = dp_training.clipped_sum_and_loss


def off_by_a_digit(*given: Any) -> tuple[torch.Tensor, float]:
    """Return a sum whose last digit differs, as with other threads or another processor."""
    total, loss = ORDINARY(*given)
    return torch.nextafter(total, torch.full_like(total, torch.inf)), loss


def learned(clinic: Clinic) -> int:
    """Return the number of charged steps of the critic."""
    return clinic.session.audit.spending(NODE_DATA, "one").run_events.get(str(STEP), 0)


def released(clinic: Clinic) -> int:
    """Return the number of released rows in the log."""
    return sum(row["part"] in ("response", "gradient") for row in clinic.rows())


# --- a server that restores a checkpoint and queries with other numbers ----------------------------------


@pytest.mark.parametrize("query", ["predict_logits", "score_with_critic"])
def test_query_with_another_number_changes_history(tmp_path: Path, query: str) -> None:
    clinic = Clinic(tmp_path / "clinic", JUDGING_POLICY + PRIVATE, JUDGES).ready()
    releases: set[bytes] = set()
    for number in range(1, 5):
        clinic.say("load_checkpoint", checkpoint=0)
        clinic.query(number, image(0), query=query)
        for more in range(3):
            releases.add(clinic.query(1001 + more, image(more), query=query)[1]["critic"].numpy().tobytes())
    assert len(releases) == 12, "each query has its own critic"
    assert learned(clinic) == 4 + 12
    assert released(clinic) == 4 + 12
    assert sum(line["training_cost"].get(str(STEP), 0) for line in clinic.lines()) == 16, (
        "the audit log has the training costs"
    )


def test_limits_count_queries_after_another_history(tmp_path: Path) -> None:
    """If only numbers counted, a server could get nearly twice as much as the owner allows."""
    clinic = Clinic(tmp_path / "clinic", "max_queries = 6\n" + PRIVATE).ready()
    answered = 0
    for number in range(1, 6):
        clinic.say("load_checkpoint", checkpoint=0)
        for query_number in (number, 1001, 1002):
            answered += isinstance(clinic.query(query_number, image(query_number)), tuple)
    assert answered == released(clinic) == 6
    one = 4 * 10 * 4 + 4 * 4 * 4  # logits and critic values of a response
    clinic = Clinic(tmp_path / "other", f"max_bytes = {3 * one}\n" + PRIVATE).ready()
    for number in range(1, 4):
        clinic.say("load_checkpoint", checkpoint=0)
        for query_number in (number, 1001, 1002):
            clinic.query(query_number, image(query_number))
    assert clinic.session.audit.spending(NODE_DATA, "one").total_bytes == 3 * one


@pytest.mark.parametrize("private", ["", PRIVATE])
def test_second_gradient_counts_as_query(tmp_path: Path, private: str) -> None:
    clinic = Clinic(tmp_path / "clinic", "max_queries = 2\n" + private).ready()
    clinic.query(0)
    first = clinic.pull(0, 1.0)[1]
    replies = []
    for value in (1.0, 2.0, 1.0, 3.0):
        clinic.say("load_checkpoint", checkpoint=0)
        clinic.query(0)
        replies.append(clinic.pull(0, value))
    same(replies[0][1], first)
    same(replies[2][1], first)
    assert replies[1][1], "of the second query"
    assert "max_queries: 2" in replies[3]["text"]
    assert clinic.charged_releases() == [(0, "response"), (0, "gradient"), (0, "gradient")]


@pytest.mark.parametrize("change", ["a run's folder is gone", "another name", "another run"])
def test_limits_hold_across_folders_and_names(tmp_path: Path, change: str) -> None:
    policy = "max_queries = 3\nmax_bytes = 1000000\n"
    clinic = Clinic(tmp_path / "clinic", policy).ready()
    for number in range(3):
        clinic.query(number)
    clinic.say("leave")
    plan = PLAN
    if change == "a run's folder is gone":
        shutil.rmtree(clinic.folder / "runs/one")
        (clinic.folder / "runs").rmdir()
    elif change == "another run":
        plan = replace(PLAN, run="two")
    again = Clinic(clinic.folder, policy, plan)
    if change == "another name":
        file = clinic.folder / "node.toml"
        file.write_text(file.read_text().replace('"clinic"', '"renamed"').replace("seed = 3", "seed = 4"))
        plan = replace(PLAN, run="two")
        again.plan = plan
        again.again()
    reply, _ = again.say("join", plan=plan.to_dict())
    again.say("train_locally", seconds=60)
    assert "max_queries: 3" in again.query(7)["text"]
    if change != "a run's folder is gone":
        assert reply["refused_queries"]["predict_logits"] == "max_queries: 3, over all runs"


# --- differing last digits -----------------------------------------------------------------------------


def test_differing_training_result_is_charged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another number of threads the noise differs, too, so both are charged."""
    clinic = Clinic(tmp_path / "clinic", PRIVATE).ready()
    first = clinic.query(0)[1]
    clinic.say("load_checkpoint", checkpoint=0)
    same(clinic.query(0)[1], first)
    assert learned(clinic) == 1, "equal training is not charged again"

    samples: list[tuple[Any, ...]] = []
    sample = dp_training.poisson_sample

    def watched(data: Any, rate: float, draws: Any) -> Any:
        batch = sample(data, rate, draws)
        samples.append(tuple(batch.inputs.flatten().tolist()))
        return batch

    monkeypatch.setattr(dp_training, "poisson_sample", watched)
    monkeypatch.setattr(dp_training, "clipped_sum_and_loss", off_by_a_digit)
    clinic.again()
    clinic.say("join", plan=PLAN.to_dict())
    reply, second = clinic.query(0)
    assert not torch.equal(second["critic"], first["critic"])
    assert learned(clinic) == 2
    assert reply["privacy"]["cost"] == {str(STEP): 1}, "the server receives both costs"
    assert samples[0] != samples[1], "different sums use different samples"
    clinic.say("load_checkpoint", checkpoint=0)
    same(clinic.query(0)[1], second)
    assert learned(clinic) == 2

    monkeypatch.setattr(dp_training, "clipped_sum_and_loss", ORDINARY)
    clinic.say("load_checkpoint", checkpoint=0)
    third = clinic.query(0)[1]
    assert len({x["critic"].numpy().tobytes() for x in (first, second, third)}) == learned(clinic) == 3


def test_response_after_differing_training_is_charged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic = Clinic(tmp_path / "clinic", PRIVATE).ready()
    clinic.query(0)
    before = clinic.query(1)[1]
    clinic.say("load_checkpoint", checkpoint=0)
    monkeypatch.setattr(dp_training, "clipped_sum_and_loss", off_by_a_digit)
    clinic.query(0)
    monkeypatch.setattr(dp_training, "clipped_sum_and_loss", ORDINARY)
    assert not torch.equal(clinic.query(1)[1]["critic"], before["critic"])
    assert learned(clinic) == 4


def test_unaffordable_second_attempt_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Event("laplace", NoPrivacy().counts_noise)
    whole = PrivacyCost({STEP: 6, Event("gaussian", 2.0, rate=0.2): 20, counts: 1})
    budget = f"epsilon = {1.0001 * compute_epsilon(whole, 1e-5)!r}\n"
    private = PRIVATE.replace('"dp-sgd"\n', f'"dp-sgd"\n{budget}')
    clinic = Clinic(tmp_path / "clinic", private).ready()
    counts_labels = {"query": "count_labels", "number": 0, "differentiable": False}
    clinic.say("answer_query", **counts_labels)
    for number in range(1, 7):
        assert clinic.query(number)[1]
    monkeypatch.setattr(dp_training, "clipped_sum_and_loss", off_by_a_digit)
    clinic.say("load_checkpoint", checkpoint=0)
    clinic.say("answer_query", **counts_labels)
    rows = released(clinic)
    assert "privacy budget" in clinic.query(1)["text"]
    assert learned(clinic) == 6
    assert released(clinic) == rows
    assert "resume the run from an earlier checkpoint" in clinic.query(2)["text"]


def test_differing_response_counts_for_approval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server can cause this by sending equal inputs in another memory format."""
    clinic = Clinic(tmp_path / "clinic", 'approve = "each run"\n' + PRIVATE)
    assert "waits" in clinic.say("join", plan=PLAN.to_dict())["rule"]
    clinic.host.requests.decide(describe(PLAN, None).sha256, True)
    clinic.ready()
    for number in range(6):
        assert isinstance(clinic.query(number), tuple)
    rows = released(clinic)
    clinic.say("load_checkpoint", checkpoint=0)
    assert isinstance(clinic.query(0), tuple), "the stored response"
    assert released(clinic) == rows
    monkeypatch.setattr(dp_training, "clipped_sum_and_loss", off_by_a_digit)
    clinic.say("load_checkpoint", checkpoint=0)
    assert clinic.query(0)["rule"] == "approved: 6 times, and an earlier response differed"
    assert released(clinic) == rows


def test_failed_training_state_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server can make a query fail after training; a saved state would give it free rounds."""
    public = PublicData("shared", image(5), None, "")
    method = {"name": "fedmd", "rounds": 20, "initial_rounds": 1}
    plan = replace(PLAN, method=method, public=public_fingerprint(public), public_note=("shared", ""))
    clinic = Clinic(tmp_path / "clinic", PRIVATE, plan)
    clinic.say("join", public_tensors(public), plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    rows = torch.arange(B, dtype=torch.int32)
    sent = {"rows": rows, "consensus": torch.zeros(B, 10), "round": torch.tensor(0)}
    sent["rows_next"] = rows

    def fails(*about: object) -> torch.Tensor:
        raise RuntimeError("half way")

    monkeypatch.setattr(NodeView, "predict", fails)
    call = {"query": "digest_and_communicate", "number": 0, "differentiable": False}
    before = to_vector(clinic.session.node.model).clone()
    assert clinic.say("answer_query", sent, **call)["kind"] == "NodeDataError"
    assert not torch.equal(to_vector(clinic.session.node.model), before), "training changed the model"
    for checkpoint in (0, 1):
        assert "failed at query 0" in clinic.say("save_checkpoint", checkpoint=checkpoint)["text"]
    assert clinic.say("load_checkpoint", checkpoint=0) == ({}, {})
    assert torch.equal(to_vector(clinic.session.node.model), before)
    assert clinic.say("save_checkpoint", checkpoint=0) == ({}, {})
    charged = Counter(clinic.session.audit.spending(NODE_DATA, "one").run_events)
    assert clinic.say("answer_query", sent, **call)["kind"] == "NodeDataError"
    assert clinic.session.audit.spending(NODE_DATA, "one").run_events == charged, (
        "the same training is not charged again"
    )
    monkeypatch.setattr(dp_training, "clipped_sum_and_loss", off_by_a_digit)
    clinic.say("load_checkpoint", checkpoint=0)
    assert clinic.say("answer_query", sent, **call)["kind"] == "NodeDataError"
    twice = Counter(clinic.session.audit.spending(NODE_DATA, "one").run_events)
    assert sum((twice - charged).values()) == 1, "a failure may depend on training"


@pytest.mark.parametrize(
    "wrong",
    [[1], [[1]], -1, 2, 2**62, True, 1.0, *(torch.tensor(1, dtype=k) for k in (torch.int8, torch.uint8))],
)
def test_invalid_round_trains_and_charges_nothing(tmp_path: Path, wrong: Any) -> None:
    """Charged as one round and trained as two, it would give a free round."""
    plan = replace(PLAN, method={"name": "fedavg", "rounds": 2})
    clinic = Clinic(tmp_path / "clinic", "outputs_only = false\n" + PRIVATE, plan)
    clinic.say("join", plan=plan.to_dict())
    before = to_vector(clinic.session.node.model).clone()

    def train(number: int, round: torch.Tensor) -> Any:
        sent = {"parameters": before, "round": round}
        return clinic.say("answer_query", sent, query="train", number=number, differentiable=False)

    refused = train(0, wrong if isinstance(wrong, torch.Tensor) else torch.tensor(wrong))
    assert refused["kind"] in ("ArgumentError", "QueryRefused")
    assert torch.equal(to_vector(clinic.session.node.model), before)
    assert not clinic.rows(), "nothing is charged"
    assert train(1, torch.tensor(1))[1]
    assert clinic.rows()


def test_model_with_releases_is_not_retrained(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", PRIVATE).ready()
    clinic.query(0)
    clinic.say("leave")
    (clinic.folder / "runs/one/training.safetensors").unlink()
    assert "start a new run" in clinic.say("join", plan=PLAN.to_dict())["text"]


# --- faults that the check reports ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (PRIVATE.replace('"dp-sgd"', '"dp-sgd"\ndelta = 0.03'), "privacy.delta = 0.03"),
        ('[privacy]\nmechanism = "dp-sgd"\n', "privacy.epsilon = inf"),
        ('queries = ["exmine"]\n', "exmine"),
    ],
)
def test_faults_of_check_are_refused_by_node(
    tmp_path: Path, text: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    clinic = Clinic(tmp_path / "clinic", text)
    assert any(fault in line for line in folder_check.check_folder(clinic.folder).faults)
    reply = clinic.say("join", plan=PLAN.to_dict())
    assert reply["text"] == "its data or model failed: see its log"
    assert fault in caplog.text
