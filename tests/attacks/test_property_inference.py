"""Property inference: ridge regression against refits, samples of shadows, planted properties, a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge

from fedstill.attacks.attack_runner import LeakageConfig, run_attacks
from fedstill.attacks.property_inference import (
    MEAN,
    RIDGES,
    Attribute,
    PropertyInference,
    fit_ridge,
    sample_shadow_records,
)
from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.runs.run import run
from fedstill.runs.spec import from_dict


def test_the_fit_is_ridge_regression_with_the_best_left_out_error() -> None:
    draw = np.random.default_rng(0)
    x, weights, new = draw.normal(size=(12, 30)), draw.normal(size=30), draw.normal(size=30)
    y = x @ weights + 5 + draw.normal(size=12)
    centered = x - x.mean(0)
    scale = (centered**2).sum(1).mean()

    def left_out(ridge: float) -> np.ndarray[Any, Any]:
        errors = []
        for row in range(len(x)):
            rest = np.delete(np.arange(len(x)), row)
            fit = Ridge(ridge * scale).fit(x[rest], y[rest])
            errors.append(y[row] - fit.predict(x[row : row + 1])[0])
        return np.asarray(errors)

    errors = {ridge: left_out(ridge) for ridge in RIDGES}
    best = min(errors, key=lambda ridge: float((errors[ridge] ** 2).sum()))
    found = fit_ridge(*map(torch.from_numpy, (x, y, new)))
    assert found.estimate == pytest.approx(Ridge(best * scale).fit(x, y).predict(new[None])[0], abs=1e-6)
    assert found.left_out_error == pytest.approx(np.abs(errors[best]).mean(), rel=1e-6)


def test_equal_responses_of_all_shadows_give_the_mean_share() -> None:
    found = fit_ridge(torch.ones(3, 4).double(), torch.tensor([0.1, 0.2, 0.6]).double(), torch.zeros(4))
    assert found.estimate == pytest.approx(0.3)


def test_shadows_have_the_shares_of_classes_and_attributes() -> None:
    targets, has = torch.arange(40) % 2, torch.arange(40) < 20
    has[targets == 1] = False  # a class without records that have the attribute
    node = TensorData(torch.zeros(900, 1), torch.arange(900) % 3)  # a third class that the pool lacks
    samples = sample_shadow_records(TensorData(torch.zeros(40, 1), targets), has, node, 3, 0)
    for rows, share in zip(samples, (0.1, 0.5, 0.9), strict=True):
        assert len(rows) == 900
        first = targets[rows] == 0
        assert first.double().mean() == pytest.approx(0.5, abs=0.06)
        assert has[rows][first].double().mean() == pytest.approx(share, abs=0.08)
        assert not has[rows][~first].any()


def test_attributes_of_images_and_tables() -> None:
    images = torch.tensor([0.0] * 10 + [1.0] * 30).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    data = DataSet("images", *[TensorData(images, torch.zeros(40).long())] * 2, ("a",), (0.5,), (0.5,))
    assert Attribute.of(data, MEAN).of_inputs(images).sum() == 30
    with pytest.raises(ArgumentError, match=r"properties\.attribute"):
        Attribute.of(data, "age")
    age, sex = SchemaColumn(name="age", range=(0.0, 9.0)), SchemaColumn(
        name="sex", type="category", categories=("f", "m")
    )  # fmt: skip
    schema = TableSchema("y", (age, sex, SchemaColumn(name="y", type="category", categories=("a", "b"))))
    rows = torch.tensor([[9.0, 1, 0]] * 12 + [[0.0, 0, 1]] * 28)
    rows[0] = torch.tensor([0.0, 0, 1])
    table = DataSet(
        "t", *[TensorData(rows, torch.zeros(40).long())] * 2, ("a", "b"), (0.0,), (1.0,), schema=schema
    )
    assert Attribute.of(table, "sex: f").share(table.test) == pytest.approx(11 / 40)
    rows[:5] = torch.tensor([0.0, 0, 1])
    with pytest.raises(ArgumentError, match="7 of 40"):
        Attribute.of(table, "age")


def write_inverted_digits(file: Path, shares: list[float]) -> None:
    """Write digits of which each site has another share inverted; half of the test images are."""
    digits = load_digits()
    images, draw = (digits.images / 16 * 255).round().astype(np.uint8), np.random.default_rng(0)
    order = draw.permutation(len(images))
    images, labels = images[order], digits.target[order]
    split = (np.arange(len(images)) >= 1000).astype(np.int64)  # 1: test
    site = np.arange(len(images)) % len(shares)
    wanted = np.where(split == 0, np.take(shares, site), 0.5)
    is_inverted = draw.random(len(images)) < wanted
    images[is_inverted] = 255 - images[is_inverted]
    np.savez(file, images=images, labels=labels, split=split, site=np.array([f"site-{k}" for k in site]))


def inferred(tmp_path: Path, attack: PropertyInference, **table: object) -> dict[str, Any]:
    """Run FedKD on two sites with 15 and 85 % of inverted images, and attack it."""
    write_inverted_digits(tmp_path / "digits.npz", [0.15, 0.85])
    config = {
        "data": {"name": str(tmp_path / "digits.npz")},
        "split": {"name": "column", "column": "site", "nodes": 0},
        "public": {"name": "held-out", "limit": 250},
        "nodes": {"models": ["mlp:32"], "local": {"epochs": 20}},
        "student": {"model": "mlp:32"},
        "method": {"name": "fedkd", "gamma": math.inf, "levels": 0, "student": {"epochs": 1}},
    }
    run(from_dict({**config, **table}), tmp_path / "run", command="test", progress=False)
    run_attacks(tmp_path / "run", LeakageConfig((attack,)))
    found: dict[str, Any] = json.loads((tmp_path / "run" / "leakage.json").read_text())
    return found


def test_responses_reveal_how_many_images_of_a_node_are_inverted(tmp_path: Path) -> None:
    found = inferred(tmp_path, PropertyInference(shadows=6, attacked=2))
    nodes = found["attacks"][0]["result"]["nodes"]
    assert len(nodes) == 2
    for node in nodes:
        assert node["guess"] > 0.3
        assert node["error"] < 0.15
    [row] = [row for row in found["attacks"][0]["rows"] if not row["detail"]]
    assert row["value"] == pytest.approx(100 * sum(node["error"] for node in nodes) / 2)


def test_nodes_that_released_no_responses_to_inputs_are_skipped(tmp_path: Path) -> None:
    nodes = {"models": ["mlp:32"], "local": {"epochs": 1}, "policy": {"outputs_only": False}}
    found = inferred(tmp_path, PropertyInference(), method={"name": "fedavg", "rounds": 1}, nodes=nodes)
    assert (found["attacks"], [each["attack"] for each in found["skipped"]]) == ([], ["properties"])
