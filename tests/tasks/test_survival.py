"""Survival: likelihood by hand, metrics against slow references, and times and events from tables."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data.table_data import encode_rows
from fedstill.tasks.survival import Floats, SurvivalConfig, concordance, integrated_brier, interval_labels

TASK = SurvivalConfig().make(3)


def random_rows(rows: int, seed: int, last: int = 8) -> tuple[Floats, Floats, Floats]:
    """Return scores, times and events, all with ties."""
    draw = np.random.default_rng(seed)
    score, time = draw.integers(0, 9, rows) / 4, draw.integers(0, 2 * last, rows) / 2
    return score, time, draw.integers(0, 2, rows).astype(float)


def test_likelihood_by_hand() -> None:
    hazards = torch.tensor([0.2, 0.5, 0.25]).logit()
    # event; censored (2x); event at the end
    rows = torch.tensor([[1.0, 1.0], [2.6, 0.0], [0.4, 0.0], [3.0, 1.0]])
    expected = [
        -math.log(0.8 * 0.5),  # event in interval 1, survived interval 0
        -math.log(0.8 * 0.5 * 0.75),  # censored after the middle of the last
        0.0,  # censored before the middle of the first
        -math.log(0.8 * 0.5 * 0.25),
    ]
    outputs = hazards.expand(4, 1, 3)  # four models, each with a batch of one
    assert TASK.loss(outputs, rows.unsqueeze(1)).tolist() == pytest.approx(expected)
    together = TASK.loss(outputs.transpose(0, 1), rows.unsqueeze(0))
    assert together.tolist() == pytest.approx([sum(expected) / 4])
    assert TASK.counts(TensorData(torch.zeros(4, 1), rows)).tolist() == [3, 3, 2]


def test_maximum_likelihood_hazards_are_event_rates() -> None:
    targets = torch.tensor([[0.5, 1.0], [1.5, 1.0], [1.5, 0.0], [2.5, 1.0], [3.0, 0.0]])
    outputs = torch.zeros(1, 1, 3, requires_grad=True)
    fit = torch.optim.LBFGS([outputs], max_iter=100, tolerance_change=1e-12)

    def step() -> torch.Tensor:
        fit.zero_grad()
        loss = TASK.loss(outputs.expand(1, 5, 3), targets.unsqueeze(0)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    fit.step(step)
    assert outputs.sigmoid().flatten().tolist() == pytest.approx([1 / 5, 1 / 4, 1 / 2], abs=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_concordance_equals_double_loop(seed: int) -> None:
    score, time, event = random_rows(40, seed)
    times = np.random.default_rng(seed).integers(0, 3, (2, 40)).astype(float)
    for row, weights in enumerate(times):
        right = pairs = 0.0
        for i in range(40):
            for j in range(40):
                if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                    pairs += weights[i] * weights[j]
                    right += weights[i] * weights[j] * ((score[i] < score[j]) + (score[i] == score[j]) / 2)
        assert concordance(score, time, event, times)[row] == pytest.approx(right / pairs)


def test_concordance_of_many_rows_uses_blocks() -> None:
    score, time, event = random_rows(1100, 0, last=400)
    perfect = concordance(time, time, event)
    assert concordance(score, time, event) + concordance(-score, time, event) == pytest.approx(1)
    assert perfect > 0.99, "except for censored rows at the time of an event"
    assert np.isnan(concordance(score, time, 0 * event)).all(), "no pair of rows is ordered"


@pytest.mark.parametrize("seed", range(3))
def test_integrated_brier_score_equals_definition(seed: int) -> None:
    _, time, event = random_rows(30, seed)
    survival = np.sort(np.random.default_rng(seed).random((30, 8)))[:, ::-1]

    def uncensored(until: float, including: bool) -> float:
        share = 1.0
        for t in sorted({t for t, e in zip(time, event, strict=True) if not e}):
            if t < until or (including and t == until):
                at_risk = sum(time > t) + sum((time == t) & (event == 0))
                share *= 1 - sum((time == t) & (event == 0)) / at_risk
        return share

    scores = [0.0]
    for end in [end for end in range(1, 9) if max(time) > end]:
        total = 0.0
        for s, t, e in zip(survival[:, end - 1], time, event, strict=True):
            if t < end and e:
                total += s**2 / uncensored(t, including=False)
            elif t >= end:
                total += (1 - s) ** 2 / uncensored(end, including=False)
        scores.append(total / 30)
    expected = sum((a + b) / 2 for a, b in pairwise(scores)) / (len(scores) - 1)
    assert len(scores) > 5
    assert integrated_brier(survival, time, event) == pytest.approx(expected)


def test_perfect_prediction_has_zero_brier_score_at_interval_borders() -> None:
    time, event = np.arange(0.0, 6.0), np.ones(6)  # an event at t is in interval t
    known = torch.from_numpy(np.stack([time, event], 1))
    hazards = torch.where(interval_labels(known, 6) == 1, 99.0, -99.0).double()
    survival = (-hazards).sigmoid().cumprod(1).numpy()
    assert integrated_brier(survival, time, event) < 1e-12
    assert integrated_brier(np.full((6, 6), 0.5), time, event) > 0.1


def test_survival_metrics_by_hand() -> None:
    targets = torch.tensor([[0.5, 1.0], [1.5, 1.0], [2.5, 0.0]])
    sure = interval_labels(targets, 3).clamp_min(0) * 200.0 - 100.0  # certain prediction of the true times
    metrics = TASK.compute_metrics(sure, targets)
    assert (metrics["concordance"], metrics["brier"]) == (100, pytest.approx(0, abs=1e-12))
    assert TASK.compute_metrics(-sure, targets)["concordance"] < 50
    draws = TASK.bootstrap_metric(
        sure.roll(1, 0), targets, None, np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    )
    assert draws is not None
    assert draws.tolist() == [
        TASK.compute_primary_metric(sure.roll(1, 0), targets),
        TASK.compute_primary_metric(sure[:2], targets[1:]),
    ]


def test_balance_loss_is_lowest_for_uniform_event_times() -> None:
    even = torch.tensor([[1 / 4, 1 / 3, 1 / 2]]).logit()
    assert TASK.balance_loss(even).item() == pytest.approx(-math.log(4), abs=1e-5)
    # half in the first interval, half never
    extreme = torch.tensor([[100.0, 0.0, 0.0], [-100.0, -100.0, -100.0]])
    assert TASK.balance_loss(extreme).item() == pytest.approx(-math.log(2), abs=1e-5)


def test_ensembles_average_log_odds_or_hazards() -> None:
    hazards = torch.tensor([[[0.1, 0.5, 0.2]], [[0.3, 0.9, 0.2]]])
    weights = torch.tensor([0.25, 0.75]).view(2, 1, 1).expand(2, 1, 3)
    mean = TASK.ensemble(hazards.logit(), weights, "probs").sigmoid()
    assert mean.flatten().tolist() == pytest.approx([0.25, 0.8, 0.2])
    odds = TASK.ensemble(hazards.logit(), weights, "logits")
    assert torch.allclose(odds, 0.25 * hazards[0].logit() + 0.75 * hazards[1].logit())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(3), r"targets are float32 of shape \(3,\) \(expected float32 of shape \(3, 2\)"),
        (torch.tensor([[3.5, 1.0]] * 3), "a time that is no number of intervals from 0 to 3"),
        (torch.tensor([[math.nan, 1.0]] * 3), "a time that is no number"),
        (torch.tensor([[1.0, 0.5]] * 3), "an event that is neither 1 nor 0"),
    ],
)
def test_rejects_invalid_times_and_events(targets: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TASK.check(TensorData(torch.zeros(3, 2), targets), "rows")


# --- from a table -----------------------------------------------------------------------------------------

AGE = SchemaColumn(name="age", range=(0.0, 100.0))
DAYS = SchemaColumn(name="days", range=(30.0, 60.0))
DIED = SchemaColumn(name="died", type="category", categories=("0", "1"))
SCHEMA = TableSchema("days", (AGE, DAYS, DIED), event="died", intervals=30)


def test_times_are_counted_in_intervals_without_rounding_errors() -> None:
    days = list(range(30, 61))  # interval borders: each belongs to the interval that starts there
    cells = {"age": [50] * 31, "days": days, "died": [1] * 31}
    data = encode_rows(cells, SCHEMA, "rows", str)
    assert data.inputs.tolist() == [[0.0]] * 31
    assert data.targets.tolist() == [[interval, 1] for interval in range(31)]
    responses = interval_labels(data.targets, 30)
    assert responses.argmax(1).tolist() == [*range(30), 29]
    assert SCHEMA.classes[:2] == ("30 to 31", "31 to 32")
    assert encode_rows({**cells, "died": [0] * 31}, SCHEMA, "rows", str).targets[:, 1].sum() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"event": "dead"}, r"invalid event = 'dead'"),
        ({"event": "age"}, "invalid event = 'age'"),
        ({"target": "died", "event": "died"}, r"invalid target = 'died' \(expected a number"),
        ({"intervals": 0}, r"invalid intervals = 0 \(expected from 1 to 1000"),
    ],
)
def test_rejects_invalid_survival_schemas(change: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(SCHEMA, **change)  # type: ignore[arg-type]
