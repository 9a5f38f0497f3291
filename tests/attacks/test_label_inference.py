"""Label inference: shares of classes estimated from responses, by hand and on a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.attacks.attack import AttackResult, Target
from fedstill.attacks.attack_runner import LeakageConfig, run_attacks
from fedstill.attacks.label_inference import (
    LabelInference,
    compare_shares,
    log_ratios,
    mean_predictions,
)
from fedstill.attacks.transcript import ObservedRelease, ReplayedRun, ServerTranscript
from fedstill.runs.run import run
from fedstill.runs.spec import from_dict


def bayes_scores(shares: dict[str, torch.Tensor], inputs: int) -> dict[str, torch.Tensor]:
    """Return the logits of nodes that know the likelihoods of random inputs and their own shares."""
    draw = torch.Generator().manual_seed(0)
    likelihood = torch.randn(inputs, 3, generator=draw)
    return {  # with an arbitrary offset of each input's logits
        name: likelihood + pi.log() + torch.randn(inputs, 1, generator=draw) for name, pi in shares.items()
    }


SHARES = {name: torch.tensor([0.2, 0.2, 0.2]) for name in "abc"}
for place, values in enumerate(SHARES.values()):
    values[place] = 0.6


def test_log_ratios_are_the_shares_of_nodes_that_follow_bayes_rule() -> None:
    found = log_ratios(bayes_scores(SHARES, 50))
    for name, pi in SHARES.items():
        torch.testing.assert_close(found[name], pi.double(), rtol=0, atol=1e-6)


def test_mean_prediction_by_hand() -> None:
    scores = {"a": torch.tensor([[0.9, 0.1], [0.5, 0.5]]), "b": torch.tensor([[0.0, 0.0], [2.0, 2.0]])}
    found = mean_predictions(scores)
    torch.testing.assert_close(found["a"], torch.tensor([0.7, 0.3]).double())  # probabilities as they are
    torch.testing.assert_close(found["b"], torch.tensor([0.5, 0.5]).double())  # logits by softmax


def test_without_absent_classes_there_is_no_auc() -> None:
    found = compare_shares("a", SHARES["a"], SHARES["b"], ("x", "y", "z"))
    assert found["error"] == pytest.approx(0.4)
    assert found["absent_auc"] is None
    assert (found["most_frequent"], found["estimated_most_frequent"]) == ("y", "x")


BASE = {
    "data": {"name": "digits"}, "split": {"name": "dirichlet", "nodes": 3, "alpha": 0.2}, "seed": 0,
    "nodes": {"models": ["mlp:16"], "local": {"epochs": 30}}, "student": {"model": "mlp:16"},
}  # fmt: skip
PUBLIC = {"name": "held-out", "limit": 200}


def leakage_of(table: Mapping[str, object], folder: Path) -> dict[str, object]:
    run(from_dict({**BASE, **table}), folder, command="test", progress=False)
    run_attacks(folder, LeakageConfig((LabelInference(),)))
    found: dict[str, object] = json.loads((folder / "leakage.json").read_text())
    return found


@pytest.mark.slow
def test_responses_of_a_run_reveal_the_shares(tmp_path: Path) -> None:
    """Also where the method sends no label counts."""
    method = {"name": "fedkd", "weights": "equal", "ensemble": "logits", "gamma": math.inf}
    found = leakage_of({"method": method, "public": PUBLIC}, tmp_path / "run")
    [attack] = found["attacks"]  # type: ignore[misc]
    rows = [row for row in attack["rows"] if not row["detail"]]
    errors = {row["attack"]: row for row in rows if row["metric"] == "label shares off by"}
    assert errors.keys() == {"mean prediction", "log ratio"}
    guess = float(errors["log ratio"]["baseline"].removesuffix("%"))
    assert min(row["value"] for row in errors.values()) < guess / 2
    assert found["skipped"] == []


def test_methods_without_scores_are_skipped(tmp_path: Path) -> None:
    nodes = {"models": ["mlp:16"], "local": {"epochs": 1}, "policy": {"outputs_only": False}}
    table = {"method": {"name": "fedavg", "rounds": 1}, "nodes": nodes}
    found = leakage_of(table, tmp_path / "run")
    assert found["attacks"] == []
    [skipped] = found["skipped"]  # type: ignore[misc]
    assert "no node released scores" in skipped["reason"]


def transcript_of(scores: Mapping[str, torch.Tensor], **options: Any) -> ServerTranscript:
    """Return a transcript of one query, whose inputs are the nodes' own if their numbers differ."""
    transcript = ServerTranscript(100, **options)
    for number, (name, z) in enumerate(scores.items()):
        x = torch.arange(len(z)).float().view(-1, 1)
        release = ObservedRelease(
            name, number if len(z) != 4 else 0, "predict", "response", {"logits": "logits"}, {"logits": z},
            {"x": x}, {"x": "inputs"},
        )  # fmt: skip
        transcript.record_release(release, None)
    return transcript


def test_quantized_logits_are_scaled_back() -> None:
    codes = torch.tensor([[2, -1], [0, 1], [1, 1], [-2, 0]], dtype=torch.int8)
    responses = transcript_of(
        {"a": codes}, decode=fedstill.FedKD(levels=4, z_max=3.0).decode_scores
    ).responses("a")
    assert responses is not None
    assert torch.equal(responses[1], codes.float() * 1.5)


def attacked(scores: Mapping[str, torch.Tensor]) -> AttackResult:
    """Attack a transcript in place of that of a short run."""
    replay = ReplayedRun.from_config(from_dict({**BASE, "method": {"name": "standalone"}}))
    return LabelInference().run(Target(replay, replay.experiment(), transcript_of(scores)))


def test_nodes_without_finite_responses_and_unequal_inputs_are_skipped() -> None:
    z = torch.zeros(4, 10)
    result = attacked({"node-0": z, "node-1": z.log(), "node-2": z})
    assert set(result.part["variants"]) == {"mean prediction", "log ratio"}
    assert [node["node"] for node in result.part["variants"]["log ratio"]] == ["node-0", "node-2"]
    assert [what for what, _ in result.skipped] == ["label inference at node-1"]
    alone = attacked({"node-0": z})
    assert set(alone.part["variants"]) == {"mean prediction"}
    unequal = attacked({"node-0": z, "node-1": torch.zeros(3, 10)})
    assert set(unequal.part["variants"]) == {"mean prediction"}
    assert [what for what, _ in unequal.skipped] == ["label inference by log ratio"]
