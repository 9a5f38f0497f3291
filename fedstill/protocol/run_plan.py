"""A run's description: what a server may ask in it, in one canonical text, and its SHA-256.

Server and node each compute it from the plan, by the method that is installed where they are: so both have
the same fingerprint, and what a server says of its own run is not taken on trust. An owner who has approved a
description has a node that answers nothing beyond it. What is the node's own (data, model, protection) is not
in it.

What a server declares to its nodes before it asks anything: the run, the method, the input spec.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.config_tables import as_table, read_table
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import check_run_name
from fedstill.data.input_spec import InputSpec
from fedstill.data.public import PublicData
from fedstill.data.tables import check_features
from fedstill.protocol.digests import digest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, build_node_side
from fedstill.protocol.payload_kinds import INPUTS, PayloadKind
from fedstill.protocol.queries import NodeSetting, Query
from fedstill.protocol.wire_format import WireConfig

FORMAT = 1


@dataclass(frozen=True)
class RunDescription:
    """What a run is, as JSON values: ``method`` with all options, ``spec``, ``wire``, ``public``, ``student``
    and ``min_nodes`` (which the server alone knows), ``secure_aggregation``,
    and by name of each query ``times``, ``rows``, ``leaves`` and ``bytes`` of one answer with its
    gradients, at most; 0 is no limit that follows from the plan."""

    table: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """The canonical text: the same for the same run, on every machine."""
        return json.dumps(self.table, sort_keys=True, separators=(",", ":"))

    @cached_property
    def sha256(self) -> str:
        """Its fingerprint, 64 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def queries(self) -> Mapping[str, Any]:
        """What may be asked, by name."""
        queries: Mapping[str, Any] = self.table["queries"]
        return queries

    @property
    def max_queries(self) -> int:
        """Queries that may be asked in all; 0: the plan sets no limit to one of them."""
        return _total([asked["times"] for asked in self.queries.values()])

    @property
    def max_bytes(self) -> int:
        """Bytes that may leave in all; 0: the plan sets no limit to one of the queries."""
        leaving = [asked for asked in self.queries.values() if asked["leaves"]]
        return _total([asked["times"] * asked["bytes"] for asked in leaving])


def describe(plan: RunPlan, public: PublicData | None) -> RunDescription:
    """The description of a plan, whose public data these are."""
    config = plan.config()
    setting = NodeSetting(
        plan.spec.make_task(), LocalConfig(), Compute(), public, secure_aggregation=plan.secure_aggregation
    )
    queries = build_node_side(config, setting).queries
    table = {
        "format": FORMAT,
        "method": as_table(config),
        "spec": plan.spec.to_dict(),
        "wire": as_table(plan.wire),
        "public": {
            "fingerprint": plan.public,
            "name": plan.public_note[0],
            "inputs": 0 if public is None else len(public),
        },
        "student": plan.student,
        "min_nodes": plan.min_nodes,
        "secure_aggregation": plan.secure_aggregation,
        "queries": {name: _asked(query, plan) for name, query in queries.items()},
    }
    return RunDescription(json.loads(json.dumps(table)))


def _asked(query: Query, plan: RunPlan) -> dict[str, Any]:
    most = [_bytes(query, name, kind, plan.spec) for name, kind in query.released_kinds().items()]
    return {
        "times": query.times,
        "rows": query.rows,
        "leaves": {name: str(kind) for name, kind in query.released_kinds().items()},
        "bytes": _total(most),
    }


def _bytes(query: Query, name: str, kind: PayloadKind, spec: InputSpec) -> int:
    """Bytes of one tensor of an answer, at most; 0: they follow from more than the plan."""
    if kind.package or name in query.unstacked:  # nobody here knows its shape
        return 0
    each = 8 if query.sums else 4  # bytes of a number
    if kind.category == "counts":
        return 16 * (len(spec.classes) + 1)  # of either form
    if (
        kind.category == "moments"
    ):  # of each column of numbers how many there are, their sum and that of squares
        return 4 * (1 + 3 * len(spec.schema.features))
    if kind.category == "scores":
        return each * query.rows * math.prod(spec.output_shape)
    of_inputs = kind.category == "gradients" and query.sends.get(name.removeprefix("d/d")) == INPUTS
    if of_inputs or kind.category == "critic":  # of which a value stands for several pixels
        return each * query.rows * math.prod(spec.shape)
    return 0


def _total(each: list[int]) -> int:
    return sum(each) if all(each) else 0


PROTOCOL = 7  # of the messages between a server and a node
PLAN_FILE = "plan.json"  # in a run's folder at a node: what it was begun with


@dataclass(frozen=True)
class RunPlan:
    """A run as its nodes get to know it. It names no data, no model and no policy: those are the nodes'.

    Args:
        run: names the run; the same again is the same run, which goes on.
        method: its ``name`` and options.
        wire: in which form tensors travel.
        public: fingerprint of the public data, ``""`` without any.
        public_note: the public data's name and what else is known of them.
        student: what the server's model is called, ``""`` where that is chosen later; nothing at a node
            follows from it.
        min_nodes: without how many nodes the run stops, as the server says; 0: it does not say.
        secure_aggregation: the server is to see sums of the nodes' answers only.

    Raises:
        ArgumentError: the run's name is no name, the method is not known or has other options.
    """

    run: str
    method: Mapping[str, Any]
    spec: InputSpec
    wire: WireConfig = field(default_factory=WireConfig)
    public: str = ""
    public_note: tuple[str, str] = ("", "")
    student: str = ""
    min_nodes: int = 0
    secure_aggregation: bool = False

    def __post_init__(self) -> None:
        check_run_name(self.run)
        if self.public and not re.fullmatch(r"[0-9a-f]{32}", self.public):
            raise ArgumentError("public", self.public, "a fingerprint of 32 hexadecimal digits")
        if self.secure_aggregation and self.wire.gradients != "float32":
            raise ArgumentError("wire.gradients", self.wire.gradients, "float32 with secure_aggregation")
        if not re.fullmatch(r"[ -~]{0,200}", self.student):
            raise ArgumentError("student", self.student, "up to 200 plain letters")
        self.config()

    def config(self) -> Any:
        """The method's config, read and checked."""
        name = self.method.get("name")
        if not isinstance(name, str):
            raise ArgumentError("method.name", name, "a text")
        options = {key: value for key, value in self.method.items() if key != "name"}
        for key, value in options.items():
            if isinstance(value, int) and abs(value) > 2**53:  # which no size, and no count, is
                raise ArgumentError(f"method.{key}", value, "a number up to 2**53")
        return read_table(METHODS[name], options, "method.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives the same plan back."""
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
        }

    @classmethod
    def from_dict(cls, table: Any, methods: Collection[str] = (), tasks: Collection[str] = ()) -> RunPlan:
        """The plan that JSON values describe.

        Args:
            table: the values, as somebody sent them.
            methods, tasks: names that may be looked up beside the package's own. Nothing is imported for any
                other.

        Raises:
            ArgumentError: they do not describe one, or are of another version of the protocol.
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
            raise ArgumentError("min_nodes", table["min_nodes"], "a whole number from 0")
        if type(table["secure_aggregation"]) is not bool:
            raise ArgumentError("secure_aggregation", table["secure_aggregation"], "true or false")
        METHODS.require(table["method"].get("name"), methods, "method.name", "policy.methods")
        if not isinstance(table["wire"], Mapping):
            raise ArgumentError("wire", type(table["wire"]).__name__, "a table")
        wire = read_table(WireConfig, table["wire"], "wire.")
        spec = InputSpec.from_dict(table["spec"], tasks)
        told = table["student"], table["min_nodes"], table["secure_aggregation"]
        return cls(table["run"], table["method"], spec, wire, table["public"], (note[0], note[1]), *told)


def fingerprint(public: PublicData | None) -> str:
    """What public data are told apart by; ``""`` is none."""
    if public is None:
        return ""
    return digest("public", public_tensors(public))


def read_public(plan: RunPlan, tensors: Mapping[str, Any], most: int) -> PublicData | None:
    """The public data of a plan from tensors that came; ``most`` inputs are taken, 0 is no limit.

    Raises:
        DataError: they are not those of the plan, or such as no sound server sends.
    """
    public = None
    if "inputs" in tensors:
        name, note = plan.public_note
        public = PublicData(name, tensors["inputs"], tensors.get("labels"), note)
        check_public(public, plan.spec, most)
    if fingerprint(public) != plan.public:
        raise DataError("the public data that came are not those of the plan")
    return public


def check_public(public: PublicData, spec: InputSpec, most: int) -> None:
    """Refuse public data that no sound server sends; ``most`` inputs are taken, 0 is no limit.

    Raises:
        DataError: other inputs than the spec's, too many, NaN, or labels that the task has none of.
    """
    found = public.inputs
    if tuple(found.shape[1:]) != spec.shape or not len(found):
        shape = f"(N, {', '.join(map(str, spec.shape))})"
        raise DataError(f"public inputs are of shape {tuple(found.shape)} (expected {shape})")
    if most and len(found) > most:
        raise DataError(f"public data have {len(found)} inputs (expected {most}, by policy max_rows)")
    task = spec.make_task()
    labels = task.empty_targets(len(found), spec.shape) if public.labels is None else public.labels
    task.check(TensorData(found, labels), "public data")
    if spec.schema:
        check_features(found, spec.schema, "public data")
    if spec.vocabulary and int(found.max()) >= spec.vocabulary:
        raise DataError(f"public data hold token {int(found.max())} (expected below {spec.vocabulary})")


def public_tensors(public: PublicData) -> dict[str, Any]:
    """Public data as named tensors: ``inputs``, and ``labels`` where there are some."""
    labels = {} if public.labels is None else {"labels": public.labels}
    return {"inputs": public.inputs, **labels}
