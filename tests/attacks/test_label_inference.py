"""Label inference: shares of classes estimated from responses, by hand and on a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fedstill.attacks.attack_runner import LeakageConfig, run_attacks
from fedstill.attacks.label_inference import (
    LabelInference,
    compare_shares,
    log_ratios,
    mean_predictions,
)
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
    assert (found["largest"], found["estimated_largest"]) == ("y", "x")


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
