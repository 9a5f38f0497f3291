"""A run's description: what a server may ask in it, in one canonical text, and its SHA-256.

Server and node each compute it from the plan, by the method that is installed where they are: so both have
the same fingerprint, and what a server says of its own run is not taken on trust. An owner who has approved a
description has a node that answers nothing beyond it. What is the node's own (data, model, protection) is not
in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.config_tables import as_table
from fedstill.data.input_spec import InputSpec
from fedstill.data.public import Public
from fedstill.protocol.kinds import INPUTS, Kind
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import side_of
from fedstill.protocol.questions import NodeSetting, Question
from fedstill.protocol.run_plan import Plan

FORMAT = 1


@dataclass(frozen=True)
class Description:
    """What a run is, as JSON values: ``method`` with all options, ``spec``, ``wire``, ``public``, ``student``
    and ``least_nodes`` (which the server alone knows), ``sums`` (whether it sees sums only),
    and by name of each question ``times``, ``rows``, ``leaves`` and ``bytes`` of one answer with its
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
    def questions(self) -> Mapping[str, Any]:
        """What may be asked, by name."""
        questions: Mapping[str, Any] = self.table["questions"]
        return questions

    @property
    def most_questions(self) -> int:
        """Questions that may be asked in all; 0: the plan sets no limit to one of them."""
        return _total([asked["times"] for asked in self.questions.values()])

    @property
    def most_bytes(self) -> int:
        """Bytes that may leave in all; 0: the plan sets no limit to one of the questions."""
        leaving = [asked for asked in self.questions.values() if asked["leaves"]]
        return _total([asked["times"] * asked["bytes"] for asked in leaving])


def describe(plan: Plan, public: Public | None) -> Description:
    """The description of a plan, whose public data these are."""
    config = plan.config()
    setting = NodeSetting(plan.spec.make_task(), LocalConfig(), Compute(), public, sums=plan.sums)
    questions = side_of(config, setting).questions
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
        "least_nodes": plan.least_nodes,
        "sums": plan.sums,
        "questions": {name: _asked(question, plan) for name, question in questions.items()},
    }
    return Description(json.loads(json.dumps(table)))


def _asked(question: Question, plan: Plan) -> dict[str, Any]:
    most = [_bytes(question, name, kind, plan.spec) for name, kind in question.kinds().items()]
    return {
        "times": question.times,
        "rows": question.rows,
        "leaves": {name: str(kind) for name, kind in question.kinds().items()},
        "bytes": _total(most),
    }


def _bytes(question: Question, name: str, kind: Kind, spec: InputSpec) -> int:
    """Bytes of one tensor of an answer, at most; 0: they follow from more than the plan."""
    if kind.package or name in question.apart:  # nobody here knows its shape
        return 0
    each = 8 if question.sums else 4  # bytes of a number
    if kind.of == "counts":
        return 16 * (len(spec.classes) + 1)  # of either form
    if kind.of == "moments":  # of each column of numbers how many there are, their sum and that of squares
        return 4 * (1 + 3 * len(spec.schema.features))
    if kind.of == "scores":
        return each * question.rows * math.prod(spec.outputs)
    of_inputs = kind.of == "gradients" and question.sends.get(name.removeprefix("d/d")) == INPUTS
    if of_inputs or kind.of == "critic":  # of which a value stands for several pixels
        return each * question.rows * math.prod(spec.shape)
    return 0


def _total(each: list[int]) -> int:
    return sum(each) if all(each) else 0
