"""Column sums by hand, with their charged sensitivity, release by policy, and the resulting scales."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data import table_data
from fedstill.methods.column_sums import (
    ColumnSums,
    compute_column_sums,
    count_column_sums,
    schema_with_scales,
)
from fedstill.models import Linear
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.policy import PolicyConfig
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.config import SumsConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.events import Event
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import COLUMN_SUMS
from fedstill.protocol.queries import Query
from fedstill.runs.build import Setting
from fedstill.runs.results import write_results
from fedstill.runs.simulation import Simulation
from fedstill.tasks import TASKS
from tests.support.errors import raises_refused
from tests.support.runs import make_setting
from tests.support.small_world import SETTING

AGE = SchemaColumn(name="age", range=(0.0, 200.0))
DOSE = SchemaColumn(name="dose", range=(0.0, 8.0), missing=True)
WARD = SchemaColumn(name="ward", type="category", categories=("a", "b"))
ILL = SchemaColumn(name="ill", type="category", categories=("no", "yes"))
SCHEMA = TableSchema("ill", (AGE, WARD, DOSE, ILL))
TASK = TASKS["tabular"]().make(2)
CELLS = {
    "age": [50, 150, 100, 20],
    "ward": ["a", "b", "a", "b"],
    "dose": [8, None, 2, 4],
    "ill": ["no", "yes", "no", "yes"],
}


def rows(cells: dict[str, list[Any]], schema: TableSchema = SCHEMA) -> TensorData:
    return table_data.encode_rows(cells, schema, "clinic", lambda row: f"row {row}")


def column_sums_query(schema: TableSchema = SCHEMA) -> tuple[Query, Any]:
    """Return the query, and a node's setting."""
    at = SimpleNamespace(task=TASK, schema=schema, secure_aggregation=False)
    (query,) = ColumnSums().queries(at)
    return query, at


def sums_of(data: TensorData) -> torch.Tensor:
    """Return the tensors that the query's function computes from a node's records."""
    query, setting = column_sums_query()
    return query.function(SimpleNamespace(data=data, setting=setting))["moments"]


def test_sums_by_hand() -> None:
    # Age: -0.5, 0.5, 0, -0.8. Dose of the three rows that have one: 1, -0.5, 0.
    assert sums_of(rows(CELLS)).tolist() == pytest.approx([4, -0.8, 1.14, 3, 0.5, 1.25])
    assert count_column_sums(SCHEMA) == 6


@given(seed=st.integers(0, 2**31), count=st.integers(3, 30), group=st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_one_record_changes_sums_within_the_charged_sensitivity(seed: int, count: int, group: int) -> None:
    query, _ = column_sums_query()
    config = DPSGD(sums=SumsConfig(noise=3.0), group_size=group)
    made = PrivacyMechanism(
        "clinic", config, NodeSide({query.name: query}, SETTING), LocalConfig(), count, TASK
    )
    rule = made.rule(query, "moments")
    x = torch.rand(count, 5, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    x[:, 1:3] = x[:, 1:3].sign().clamp(0)
    x[:group] = torch.tensor([1.0, 1, 0, -1, 0])  # changes all sums as much as possible
    # invalid values that no check has seen change them no more
    x[-1] = torch.tensor([1e9, 1, 0, math.inf, 0])
    y = torch.zeros(count)
    before = sums_of(TensorData(x, y))
    shape = tuple(before.shape)
    for without in (x[group:], x[:-1]):
        moved = (
            (rule.bound(before) - rule.bound(sums_of(TensorData(without, y[: len(without)])))).norm().item()
        )
        assert moved <= group * math.sqrt(6) + 1e-9
    assert (rule.bound(before) - rule.bound(sums_of(TensorData(x[group:], y[group:])))).norm().item() == (
        pytest.approx(group * math.sqrt(6))
    )
    # Noise on each of 6 numbers: 3 sqrt(6), three times the change by one record; 3/group for a group.
    ones = SimpleNamespace(normal=lambda shape: torch.ones(shape, dtype=torch.float64))
    assert (rule.noise(before, ones) - before).tolist() == pytest.approx([3 * math.sqrt(6)] * 6, abs=1e-4)
    assert rule.cost(shape) == {Event("gaussian", 3.0 / group): 1}
    assert made.run_costs()["sums"] == {Event("gaussian", 3.0 / group): 1}
    bare = PrivacyMechanism(
        "clinic", DPSGD(sums=SumsConfig(noise=0.0)), made.side, LocalConfig(), count, TASK
    )
    assert bare.rule(query, "moments").cost(shape) is None


def test_scales_by_hand() -> None:
    # 100 rows: age has mean -0.5 and variance 0.01; of 50 doses the mean is 0 and the variance 0.04.
    exact = [100.0, -50.0, 26.0, 50.0, 0.0, 2.0]
    made = schema_with_scales(SCHEMA, exact, 0.0, 2.0)
    assert [column.scale for column in made.columns] == [
        pytest.approx((30.0, 70.0)),
        (),
        pytest.approx((2.4, 5.6)),
        (),
    ]
    assert schema_with_scales(SCHEMA, exact, 0.0, 20.0).columns[0].scale == (), "scales stay within the range"
    # Noise of 2: means of 100 rows are off by 0.04, so 2 sqrt(0.01 + 0.04) + 0.04 on both sides.
    low, high = schema_with_scales(SCHEMA, exact, 2.0, 2.0).columns[0].scale
    reach = 2 * math.sqrt(0.05) + 0.04
    assert (low, high) == pytest.approx((100 * (0.5 - reach), 100 * (0.5 + reach)))
    # Noise as large as the sums: no scale can be computed, so the ranges stay.
    assert schema_with_scales(SCHEMA, [20.0, 90.0, -7.0, -3.0, 60.0, 0.5], 40.0, 3.0) == SCHEMA


def setting(policy: PolicyConfig, parts: list[TensorData], **changes: Any) -> Setting:
    networks = {"models": [Linear((5,), 2) for _ in parts], "student": Linear((5,), 2)}
    given = {"task": TASK, "parts": parts, "test": parts[0], "policies": [policy] * len(parts)}
    return make_setting(**{**given, **networks, "method": ColumnSums(noise=0), "schema": SCHEMA, **changes})


PARTS = [rows(CELLS), rows({**CELLS, "age": [100, 100, 100, 100]})]


def test_run_writes_schema_with_scales_and_logs_the_charge(tmp_path: Path) -> None:
    policy, private = PolicyConfig(kinds=("column sums",)), DPSGD(epsilon=3.0, sums=SumsConfig(noise=1e-6))
    with raises_refused("privacy budget", "epsilon 3", query="sum_columns", node="node-0"):
        Simulation(setting(policy, PARTS, privacies=[private] * 2)).run()
    loose = DPSGD(sums=SumsConfig(noise=1e-6))
    experiment = Simulation(setting(policy, PARTS, privacies=[loose] * 2))
    result = experiment.run(tmp_path)
    write_results(experiment, result)
    assert result["releases"] == ["column sums"]
    assert result["student"] is None
    log = AuditLog()
    log.open(tmp_path / FILE)
    entries = [entry for entry in log.entries() if entry["part"] == "response"]
    assert [entry["cost"] for entry in entries] == [{"gaussian(1e-06)": 1}] * 2
    assert {entry["query"] for entry in entries} == {"sum_columns"}
    log.close()
    made = table_data.read_schema(tmp_path / "schema.toml")
    # Ages of both nodes: the sum is -0.8, the sum of squares 1.14, over 8 rows.
    reach = 3 * math.sqrt(1.14 / 8 - 0.01)
    assert made.columns[0].scale == pytest.approx((0.0, 100 * (0.9 + reach)), abs=1e-2)
    # A value beyond a scale is clipped to it; a value outside of the range is still refused.
    scale = made.columns[0].scale[1]
    assert rows({**CELLS, "age": [0, scale, 200, scale / 2]}, made).inputs[:, 0].tolist() == pytest.approx(
        [-1, 1, 1, 0]
    )


def test_column_sums_need_policy_by_name() -> None:
    with raises_refused("outputs_only: column sums", "policy.kinds"):
        Simulation(setting(PolicyConfig(), PARTS))
    Simulation(setting(PolicyConfig(kinds=("column sums",)), PARTS))
    assert not COLUMN_SUMS.is_output


def test_requires_schema() -> None:
    policy = PolicyConfig(kinds=("column sums",))
    with pytest.raises(ArgumentError, match="schema"):
        Simulation(setting(policy, PARTS, schema=TableSchema()))


def test_long_sums_change_by_one_row_at_most() -> None:
    """In float32, a sum of three million would change in steps of a quarter."""
    x = torch.full((3_000_000, 1), 0.9)
    schema = TableSchema("ill", (AGE, ILL))
    with_one, without = compute_column_sums(x, schema), compute_column_sums(x[1:], schema)
    assert (with_one - without).abs().max().item() == pytest.approx(1.0, abs=1e-6)
