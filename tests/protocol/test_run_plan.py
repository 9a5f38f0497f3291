"""Run descriptions: derived from the plan alone, equal on server and node, with numbers by hand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from fedstill.core.config_tables import to_table
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data.data_spec import DataSpec
from fedstill.data.public import PublicData
from fedstill.methods.fediod import FedIOD
from fedstill.protocol.feature_plan import FeaturePlan
from fedstill.protocol.run_plan import RunPlan, describe, public_fingerprint, public_tensors, read_public
from fedstill.protocol.wire_format import WireConfig
from fedstill.tasks.classification import ClassificationConfig, TabularConfig

SPEC = DataSpec(ClassificationConfig(), tuple("0123456789"), (1, 8, 8), (0.5,), (0.5,))
PLAN = RunPlan("one", {"name": "fediod", "steps": 6, "batch": 4}, SPEC, student="mlp:8", min_nodes=3)


def test_describes_queries_and_bytes_of_the_method() -> None:
    description = describe(PLAN, None)
    # Four inputs with ten logits, at most 64 critic values and 64 gradient values each, four bytes per
    # number.
    assert description.queries["predict_logits"] == {
        "times": 6,
        "rows": 4,
        "releases": {"logits": "logits", "critic": "critic", "d/dx": "gradients"},
        "bytes": 4 * 4 * (10 + 64 + 64),
    }
    assert description.max_queries == 7
    assert description.max_bytes == 6 * 2208 + 2 * 16 * 11
    assert hashlib.sha256(description.text.encode()).hexdigest() == description.sha256


def test_unlimited_query_makes_total_unlimited() -> None:
    parameters = describe(replace(PLAN, method={"name": "fedavg", "rounds": 2}), None)
    assert (parameters.max_queries, parameters.max_bytes) == (3, 0)
    assert describe(replace(PLAN, method={"name": "ensemble"}), None).max_queries == 0


def test_description_ignores_run_name_and_key_order() -> None:
    method = {**to_table(FedIOD(steps=6, batch=4))}
    assert describe(replace(PLAN, method=method, run="two"), None).sha256 == describe(PLAN, None).sha256
    again = RunPlan.from_dict(json.loads(json.dumps(PLAN.to_dict())))
    assert describe(again, None).sha256 == describe(PLAN, None).sha256


@pytest.mark.parametrize(
    "change",
    [
        {"method": {**PLAN.method, "steps": 7}},
        {"method": {**PLAN.method, "critic": {"width": 4}}},
        {"spec": replace(SPEC, classes=tuple("abcdefghij"))},
        {"wire": WireConfig(gradients="int8")},
        {"student": "mlp:9"},
        {"min_nodes": 2},
        {"public": "0" * 32},
    ],
)
def test_other_plans_have_other_descriptions(change: dict[str, object]) -> None:
    assert describe(replace(PLAN, **change), None).sha256 != describe(PLAN, None).sha256  # type: ignore[arg-type]


def test_number_of_queries_depends_on_public_data() -> None:
    public = PublicData("shared", torch.zeros(3000, 1, 8, 8))
    plan = replace(PLAN, method={"name": "fedkd", "z_max": 4.0}, public=public_fingerprint(public))
    query = describe(plan, public).queries["predict"]
    assert query["times"] * query["rows"] >= 3000
    assert query["bytes"] == 4 * 10 * query["rows"]


@pytest.mark.parametrize(
    ("method", "sums"),
    [
        ({"name": "fedcgs", "clip": 1.0}, 10 * 6 + 15),
        ({"name": "fedcgs"}, 10 * 6 + 15),
        ({"name": "fedpft", "clip": 1.0}, 10 * 6 + 10 * 5),
        ({"name": "fedpft", "covariance": "spherical"}, 10 * 6 + 10),
        ({"name": "fedpft", "covariance": "full"}, 10 * 6 + 10 * 15),
    ],
)
def test_bytes_of_feature_sums_follow_from_the_number_of_features(
    method: dict[str, object], sums: int
) -> None:
    """Ten classes, five features: numbers of examples, sums of features, and sums of products."""
    plan = replace(ON_FEATURES, method=method)
    assert describe(plan, None).max_bytes == 4 * sums
    if method["name"] == "fedcgs":
        assert describe(replace(plan, secure_aggregation=True), None).max_bytes == 8 * sums


def test_bytes_of_column_sums_follow_from_the_schema() -> None:
    columns = (
        SchemaColumn(name="age", range=(0.0, 90.0)),
        SchemaColumn(name="dose", range=(0.0, 5.0), missing=True),
        SchemaColumn(name="sex", type="category", categories=("f", "m")),
        SchemaColumn(name="ill", type="category", categories=("no", "yes")),
    )
    spec = DataSpec.from_schema(TabularConfig(), TableSchema("ill", columns))
    plan = RunPlan("one", {"name": "column-sums"}, spec)
    assert describe(plan, None).max_bytes == 4 * (1 + 2 + 3)
    # Masked numbers have eight bytes.
    assert describe(replace(plan, secure_aggregation=True), None).max_bytes == 8 * (1 + 2 + 3)


# --- features of a backbone -----------------------------------------------------------------------------

FEATURES = FeaturePlan("timm:x", "", (8, 8), (0.5,), (0.5,), "public", 0, "float32", 5, "0" * 32)
ON_FEATURES = replace(PLAN, method={"name": "fedkd"}, features=FEATURES)


def test_plan_on_features_describes_models_of_features() -> None:
    again = RunPlan.from_dict(json.loads(json.dumps(ON_FEATURES.to_dict())))
    assert again == ON_FEATURES
    assert (again.spec.shape, again.model_spec.shape, again.model_spec.form) == ((1, 8, 8), (5,), "rows")
    other = replace(ON_FEATURES, features=replace(FEATURES, digest="1" * 32))
    assert describe(other, None).sha256 != describe(ON_FEATURES, None).sha256


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("width", 0),
        ("width", 2**40),
        ("components", -1),
        ("components", 6),
        ("components", 2.0),
        ("digest", "x"),
        ("mean", [float("nan")]),
        ("layer", "a\nb"),
        ("size", [1]),
    ],
)
def test_rejects_malformed_features(option: str, value: object) -> None:
    table = ON_FEATURES.to_dict()
    table["features"][option] = value
    with pytest.raises(ArgumentError, match=f"features.{option}"):
        RunPlan.from_dict(table)


@pytest.mark.parametrize(
    ("mean", "std"),
    [(0.0, 0.0), (0.0, 1e-30), (0.0, float("nan")), (float("inf"), 1.0), (1e30, 1.0), (None, 1.0)],
)
def test_rejects_moments_that_make_features_infinite(mean: float | None, std: float) -> None:
    moments = {"mean": torch.zeros(5), "std": torch.ones(5)}
    public = PublicData("made", torch.zeros(3, 5), moments=moments)
    plan = replace(ON_FEATURES, public=public_fingerprint(public), public_note=("made", ""))
    received = read_public(plan, public_tensors(public), 0)
    assert received is not None
    assert received.moments == moments
    tensors = {**public_tensors(public), "std": torch.full((5,), std)}
    if mean is None:
        del tensors["mean"]
    else:
        tensors["mean"] = torch.full((5,), mean)
    with pytest.raises(DataError, match="lack moments"):
        read_public(plan, tensors, 0)


def test_components_need_public_normalization_in_a_plan() -> None:
    table = ON_FEATURES.to_dict()
    table["features"] |= {"normalize": "example", "components": 2}
    with pytest.raises(ArgumentError, match=r"features\.components"):
        RunPlan.from_dict(table)


def test_models_take_as_many_inputs_as_there_are_components() -> None:
    plan = replace(ON_FEATURES, features=replace(FEATURES, components=2))
    again = RunPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.model_spec.shape == (2,)
    assert describe(plan, None).sha256 != describe(ON_FEATURES, None).sha256


def with_components() -> tuple[RunPlan, PublicData]:
    """Return a plan with two components of five features, and its public data."""
    moments = {"mean": torch.zeros(5), "projection": torch.ones(5, 2)}
    public = PublicData("made", torch.zeros(3, 2), moments=moments)
    plan = replace(ON_FEATURES, features=replace(FEATURES, components=2))
    return replace(plan, public=public_fingerprint(public), public_note=("made", "")), public


def test_projection_is_received_as_it_was_sent() -> None:
    plan, public = with_components()
    received = read_public(plan, public_tensors(public), 0)
    assert received is not None
    assert received.moments == public.moments
    with pytest.raises(DataError, match="not those of the plan"):
        read_public(plan, {**public_tensors(public), "projection": torch.full((5, 2), 2.0)}, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"projection": torch.ones(5, 3)},
        {"projection": torch.ones(4, 2)},
        {"projection": torch.ones(10)},
        {"projection": torch.ones(5, 2).double()},
        {"projection": torch.full((5, 2), float("nan"))},
        {"projection": torch.full((5, 2), float("inf"))},
        {"projection": torch.full((5, 2), -1e30)},
        {"projection": None},
        {"projection": None, "std": torch.ones(5)},
        {"std": torch.ones(5)},
        {"mean": torch.zeros(2)},
    ],
)
def test_rejects_malformed_projections(change: dict[str, torch.Tensor | None]) -> None:
    plan, public = with_components()
    tensors = {**public_tensors(public), **change}
    with pytest.raises(DataError, match="lack moments"):
        read_public(plan, {name: each for name, each in tensors.items() if each is not None}, 0)
