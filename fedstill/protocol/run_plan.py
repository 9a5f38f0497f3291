"""Run plans: the server's declaration of a run to its nodes, and the description that an owner approves.

A :class:`RunPlan` holds the run's name, method and data spec, and reaches the nodes before any query. A
:class:`RunDescription` lists all that the server may query under a plan, as one canonical text with its
SHA-256. Server and node each compute it with their installed version of the method, so that no statement of
the server is taken on trust. A node whose owner has approved a description answers no other query. The node's
own data, model and protection are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.config_tables import read_table, to_table
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.name_normalization import check_run_name
from fedstill.core.text_format import format_shape
from fedstill.data.data_spec import DataSpec
from fedstill.data.public import PublicData
from fedstill.data.table_data import check_features
from fedstill.models.principal_components import MIN_FEATURE_STD
from fedstill.protocol.digests import digest
from fedstill.protocol.feature_plan import FeaturePlan
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, build_node_side
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.payload_kinds import INPUTS, KNOWN_KINDS, PayloadKind
from fedstill.protocol.queries import Query
from fedstill.protocol.recalibration import Recalibration
from fedstill.protocol.wire_format import WireConfig

FORMAT = 1
MOMENTS = ("mean", "std", "projection")  # names of the moments of public features
MAX_MOMENT = 1e6  # largest absolute value of a moment
PUBLIC_TENSORS = ("inputs", "labels", *MOMENTS)


@dataclass(frozen=True)
class RunDescription:
    """Description of a run as JSON values.

    Its keys are ``method`` with all options, ``spec``, ``wire``, ``public``, ``student`` and ``min_nodes``
    (both known to the server alone), ``secure_aggregation``, ``features`` if the models take those of a
    backbone, ``recalibration`` if nodes recalibrate the student, and ``queries``: by name ``times``,
    ``rows``, ``releases`` and ``bytes``, the largest size of one response with its gradients. 0 is no limit.
    """

    table: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """Canonical JSON text, equal for equal runs on every machine."""
        return json.dumps(self.table, sort_keys=True, separators=(",", ":"))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the text, 64 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def queries(self) -> Mapping[str, Any]:
        """Description of each query, by name."""
        queries: Mapping[str, Any] = self.table["queries"]
        return queries

    @property
    def max_queries(self) -> int:
        """Largest number of queries in all; 0: the plan does not limit one of them."""
        return _sum_if_limited([entry["times"] for entry in self.queries.values()])

    @property
    def max_bytes(self) -> int:
        """Largest number of released bytes in all; 0: the plan does not limit one of the queries."""
        releasing = [entry for entry in self.queries.values() if entry["releases"]]
        return _sum_if_limited([entry["times"] * entry["bytes"] for entry in releasing])

    def release_fault(self, query: Query) -> str | None:
        """Return the reason if a query of this name may release other tensors than described, or None.

        The description is made without the node's own options and networks, on which the declaration of a
        plug-in may depend.
        """
        described = self.queries[query.name]["releases"] if query.name in self.queries else None
        if described in (None, {name: str(kind) for name, kind in query.released_kinds().items()}):
            return None
        return f"approved: {', '.join(described) or 'nothing'}, and here other tensors may leave"


def describe(plan: RunPlan, public: PublicData | None) -> RunDescription:
    """Return the description of a plan with its public data."""
    method = plan.make_method()
    setting = NodeSetting(
        plan.model_spec.make_task(),
        LocalConfig(),
        Compute(),
        public,
        schema=plan.model_spec.schema,
        secure_aggregation=plan.secure_aggregation,
        shape=plan.model_spec.shape,
        recalibration=plan.recalibration,
    )
    queries = build_node_side(method, setting).queries
    table = {
        "format": FORMAT,
        "method": to_table(method),
        "spec": plan.spec.to_dict(),
        "wire": to_table(plan.wire),
        "public": {
            "fingerprint": plan.public,
            "name": plan.public_note[0],
            "inputs": 0 if public is None else len(public),
        },
        "student": plan.student,
        "min_nodes": plan.min_nodes,
        "secure_aggregation": plan.secure_aggregation,
        "queries": {name: _query_entry(query, plan) for name, query in queries.items()},
        **({} if plan.features is None else {"features": to_table(plan.features)}),
        **({} if plan.recalibration is None else {"recalibration": to_table(plan.recalibration)}),
    }
    return RunDescription(json.loads(json.dumps(table)))


def _query_entry(query: Query, plan: RunPlan) -> dict[str, Any]:
    kinds = query.released_kinds().items()
    sizes = [_max_tensor_bytes(query, name, kind, plan.model_spec) for name, kind in kinds]
    return {
        "times": query.times,
        "rows": query.rows,
        "releases": {name: str(kind) for name, kind in query.released_kinds().items()},
        "bytes": _sum_if_limited(sizes),
    }


def _max_tensor_bytes(query: Query, name: str, kind: PayloadKind, spec: DataSpec) -> int:
    """Return the largest size in bytes of one tensor of a response; 0: the plan does not limit it."""
    number = 8 if query.sums else 4  # bytes of a number
    if kind.category in ("moments", "records") and list(query.releases) == [name] and query.details.width:
        return number * query.details.width
    if kind not in KNOWN_KINDS or name in query.unstacked:  # its shape is unknown here
        return 0
    if kind.category == "counts":
        return 16 * (len(spec.classes) + 1)  # counts by class, or sizes
    if kind.category == "scores":
        return number * query.rows * math.prod(spec.output_shape)
    of_inputs = kind.category == "gradients" and query.sends.get(name.removeprefix("d/d")) == INPUTS
    if of_inputs or kind.category == "critic":  # a critic value stands for several pixels
        return number * query.rows * math.prod(spec.shape)
    return 0


def _sum_if_limited(limits: list[int]) -> int:
    """Return the sum of limits; 0, no limit, if one of them is 0."""
    return sum(limits) if all(limits) else 0


PROTOCOL = 11  # version of the messages between a server and a node
PLAN_FILE = "plan.json"  # plan of a run, in its folder at a node


@dataclass(frozen=True)
class RunPlan:
    """Declaration of a run to its nodes. It names no data, model or policy, which are the nodes' own.

    Args:
        run: name of the run. A plan of the same name resumes the run.
        method: ``name`` and options of the method.
        spec: shape and task of the inputs.
        wire: encoding of sent tensors.
        public: hash of the public data; ``""`` without any.
        public_note: name and note of the public data.
        student: name of the server's model; ``""`` if it is chosen later. Nodes use it to recalibrate only.
        min_nodes: number of nodes below which the run stops, according to the server; 0: not stated.
        secure_aggregation: the server sees sums of the nodes' responses only.
        features: features that the models take in place of the inputs; None: they take the inputs.
        recalibration: recalibration of the student's batch norm; None: none.

    Raises:
        ArgumentError: an invalid run name, or an unknown method or option.
    """

    run: str
    method: Mapping[str, Any]
    spec: DataSpec
    wire: WireConfig = field(default_factory=WireConfig)
    public: str = ""
    public_note: tuple[str, str] = ("", "")
    student: str = ""
    min_nodes: int = 0
    secure_aggregation: bool = False
    features: FeaturePlan | None = None
    recalibration: Recalibration | None = None

    def __post_init__(self) -> None:
        check_run_name(self.run)
        if self.public and not re.fullmatch(r"[0-9a-f]{32}", self.public):
            raise ArgumentError("public", self.public, "a hash of 32 hexadecimal digits")
        if self.secure_aggregation and self.wire.gradients != "float32":
            raise ArgumentError("wire.gradients", self.wire.gradients, "float32 with secure_aggregation")
        if not re.fullmatch(r"[ -~]{0,200}", self.student):
            raise ArgumentError("student", self.student, "up to 200 ASCII characters")
        self.make_method()
        self.model_spec  # noqa: B018 - raises for tables and maps with features

    @property
    def model_spec(self) -> DataSpec:
        """Spec of what the models take: the inputs, or features of them."""
        return self.spec if self.features is None else self.spec.on_features(self.features.model_width)

    def make_method(self) -> Any:
        """Return the method with its options, checked."""
        name = self.method.get("name")
        if not isinstance(name, str):
            raise ArgumentError("method.name", name, "a text")
        options = {key: value for key, value in self.method.items() if key != "name"}
        values = [(f"method.{key}", value) for key, value in options.items()]
        for path, value in values:  # it grows by the values of nested tables
            if isinstance(value, Mapping):
                values.extend((f"{path}.{key}", inner) for key, inner in value.items())
            elif isinstance(value, int) and abs(value) > 2**53:  # no size or count is larger
                raise ArgumentError(path, value, "a number up to 2**53")
        return read_table(METHODS[name], options, "method.")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; :meth:`from_dict` is the inverse."""
        return {
            "protocol": PROTOCOL,
            "run": self.run,
            "method": dict(self.method),
            "spec": self.spec.to_dict(),
            "wire": {"inputs": self.wire.inputs, "gradients": self.wire.gradients},
            "public": self.public,
            "public_note": list(self.public_note),
            "student": self.student,
            "min_nodes": self.min_nodes,
            "secure_aggregation": self.secure_aggregation,
            "features": None if self.features is None else to_table(self.features),
            "recalibration": None if self.recalibration is None else to_table(self.recalibration),
        }

    @classmethod
    def from_dict(cls, table: Any, plugins: Collection[str] = ()) -> RunPlan:
        """Return the plan that JSON values describe.

        Args:
            table: the received values.
            plugins: names of methods and tasks that may be imported in addition to the built-in ones.

        Raises:
            ArgumentError: invalid values, or another version of the protocol.
        """
        if not isinstance(table, Mapping):
            raise ArgumentError("plan", type(table).__name__, "a table")
        if table.get("protocol") != PROTOCOL:
            raise ArgumentError(
                "protocol", table.get("protocol"), f"{PROTOCOL}: a server of the same version"
            )
        known = {"protocol", *(part.name for part in fields(cls))}
        if set(table) != known or not isinstance(table["method"], Mapping):
            raise ArgumentError("plan", sorted(table), f"exactly {sorted(known)}")
        for name in ("run", "public", "student"):
            if not isinstance(table[name], str):
                raise ArgumentError(name, table[name], "a text")
        note = table["public_note"]
        if not (isinstance(note, list | tuple) and len(note) == 2 and all(isinstance(n, str) for n in note)):
            raise ArgumentError("public_note", note, "two texts")
        if type(table["min_nodes"]) is not int or not 0 <= table["min_nodes"] < 2**31:
            raise ArgumentError("min_nodes", table["min_nodes"], "an integer from 0")
        if type(table["secure_aggregation"]) is not bool:
            raise ArgumentError("secure_aggregation", table["secure_aggregation"], "true or false")
        METHODS.require_allowed(table["method"].get("name"), plugins, "method.name")
        if not isinstance(table["wire"], Mapping):
            raise ArgumentError("wire", type(table["wire"]).__name__, "a table")
        wire = read_table(WireConfig, table["wire"], "wire.")
        spec = DataSpec.from_dict(table["spec"], plugins)
        features, recalibration = table["features"], table["recalibration"]
        return cls(
            table["run"],
            table["method"],
            spec,
            wire,
            table["public"],
            (note[0], note[1]),
            table["student"],
            table["min_nodes"],
            table["secure_aggregation"],
            None if features is None else read_table(FeaturePlan, features, "features."),
            None if recalibration is None else read_table(Recalibration, recalibration, "recalibration."),
        )


def public_fingerprint(public: PublicData | None) -> str:
    """Return the hash that identifies public data; ``""`` for None."""
    if public is None:
        return ""
    return digest("public", public_tensors(public))


def read_public(plan: RunPlan, tensors: Mapping[str, Any], max_rows: int) -> PublicData | None:
    """Return the public data of a plan from received tensors.

    Args:
        plan: the plan.
        tensors: the received tensors.
        max_rows: largest number of inputs; 0 is no limit.

    Raises:
        DataError: invalid data, or other data than the plan's.
    """
    public = None
    if "inputs" in tensors:
        name, note = plan.public_note
        public = PublicData(name, tensors["inputs"], tensors.get("labels"), note)
        check_public(public, plan.model_spec, max_rows)
        if plan.features is not None and plan.features.normalize == "public":
            moments = {each: tensors[each] for each in MOMENTS if each in tensors}
            public = replace(public, moments=_check_moments(moments, plan.features))
    if public_fingerprint(public) != plan.public:
        raise DataError("the public data that came are not those of the plan")
    return public


def _check_moments(moments: Mapping[str, torch.Tensor], features: FeaturePlan) -> Mapping[str, torch.Tensor]:
    """Return received moments of public features: their mean, and their deviation or projection.

    Extreme values would make some features infinite, and failures would tell a server which.
    """
    shapes: dict[str, tuple[int, ...]] = {"mean": (features.width,), "std": (features.width,)}
    if features.components:
        shapes = {"mean": (features.width,), "projection": (features.width, features.components)}
    is_sound = moments.keys() == shapes.keys() and all(
        moment.dtype == torch.float32
        and moment.shape == shapes[name]
        and bool((moment.abs() <= MAX_MOMENT).all())
        for name, moment in moments.items()
    )
    if not is_sound or ("std" in moments and not (moments["std"] >= MIN_FEATURE_STD).all()):
        sizes = " and ".join(f"{name} of {format_shape(shape)}" for name, shape in shapes.items())
        expected = f"{sizes}, float32, up to {MAX_MOMENT:g}, and deviations from {MIN_FEATURE_STD:g}"
        raise DataError(f"public data lack moments of their features (expected {expected})")
    return moments


def check_public(public: PublicData, spec: DataSpec, max_rows: int) -> None:
    """Check received public data.

    Args:
        public: the public data.
        spec: shape and task of the inputs.
        max_rows: largest number of inputs; 0 is no limit.

    Raises:
        DataError: inputs of another shape, too many, or NaN; or labels that do not suit the task.
    """
    inputs = public.inputs
    if tuple(inputs.shape[1:]) != spec.shape or not len(inputs):
        shape = f"(N, {', '.join(map(str, spec.shape))})"
        raise DataError(f"public inputs are of shape {tuple(inputs.shape)} (expected {shape})")
    if 0 < max_rows < len(inputs):
        raise DataError(f"public data have {len(inputs)} inputs (expected {max_rows}, by policy max_rows)")
    task = spec.make_task()
    labels = task.empty_targets(len(inputs), spec.shape) if public.labels is None else public.labels
    task.check(TensorData(inputs, labels), "public data")
    if spec.schema:
        check_features(inputs, spec.schema, "public data")
    if spec.vocabulary and int(inputs.max()) >= spec.vocabulary:
        raise DataError(f"public data hold token {int(inputs.max())} (expected below {spec.vocabulary})")


def public_tensors(public: PublicData) -> dict[str, Any]:
    """Return public data as named tensors: ``inputs``, and ``labels`` and moments if there are any."""
    labels = {} if public.labels is None else {"labels": public.labels}
    return {"inputs": public.inputs, **labels, **(public.moments or {})}
