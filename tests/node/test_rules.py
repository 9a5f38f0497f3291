"""Every rule of an owner in every layer that enforces it: one table, with numbers computed by hand.

The layers are a node of a simulation, a node behind messages whose server sends its queries although it knows
that they will be refused, and a node that responds to a file of queries. The run is the same everywhere:
FedKD queries label counts once and the logits of eight public images twice, three queries in total.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

import fedstill
from fedstill.core.config_tables import to_table
from fedstill.core.errors import FedstillError, QueryRefused
from fedstill.data.public import PublicData
from fedstill.federation.offline_files import Queries, answer_queries, write_queries
from fedstill.federation.signed_files import load_or_create_key
from fedstill.models import build
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.protocol.run_plan import public_fingerprint, public_tensors
from tests.support.audit_logs import releases, security_events
from tests.support.node_services import CLASSES, FURTHER_NETWORK, PLAN, SHAPE, Clinic, FurtherNetwork

pytest.importorskip("cryptography")

RECORDS, ROWS = 40, 8
PUBLIC = PublicData("ours", torch.linspace(-1, 1, ROWS * 64).view(ROWS, *SHAPE), None, "")
COUNTS = 4 * (CLASSES + 1)  # bytes: float32 of the classes and their sum
LOGITS = ROWS * CLASSES  # bytes: quantized, one per logit
SERVER, OTHER = "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20", "0" * 32


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Args:
        refuses, allows: options of the policy, or a privacy mechanism, just beyond and just at the limit.
        released: by layer, the number of releases before the refusal, and part of its reason.
        options: options of the method.
        method_class: class of the method.
    """

    refuses: dict[str, Any] | PrivacyConfig
    allows: dict[str, Any] | PrivacyConfig
    released: dict[str, tuple[int, str]]
    options: dict[str, Any] = field(default_factory=dict)
    method_class: type[fedstill.FedKD] = fedstill.FedKD

    @property
    def method(self) -> fedstill.FedKD:
        student = fedstill.StudentTraining(epochs=1, batch=ROWS)
        return self.method_class(student=student, predictions=2, z_max=4.0, **self.options)


def everywhere(rule: str, released: int = 0) -> dict[str, tuple[int, str]]:
    return dict.fromkeys(LAYERS, (released, rule))


def at_a_node(rule: str) -> dict[str, tuple[int, str]]:
    """Return the expected refusals of a rule that simulations do not enforce."""
    return dict.fromkeys(("messages", "files"), (0, rule))


def reason_of(error: FedstillError) -> str:
    """Return the rule of a refusal, or the fault of public data or a file that a node does not read."""
    return error.rule if isinstance(error, QueryRefused) else str(error)


# --- layers: the reason for refusing the run, or None ----------------------------------------------------


def run_simulation(folder: Path, rule: Rule, policy: dict[str, Any], privacy: PrivacyConfig) -> str | None:
    draw = np.random.default_rng(0)
    images = torch.from_numpy(draw.uniform(0, 1, (RECORDS, *SHAPE)).astype(np.float32))
    labels = torch.from_numpy(draw.integers(0, CLASSES, RECORDS))
    try:
        fedstill.distil(
            [(images, labels)],
            [build("mlp:8", SHAPE, CLASSES, 0)],
            build("mlp:8", SHAPE, CLASSES, 0),
            (images, labels),
            CLASSES,
            method=rule.method,
            public=PUBLIC.inputs,
            local=fedstill.LocalConfig(epochs=1),
            policies=[PolicyConfig(**policy)],
            privacies=[privacy],
            every=0,
            out=folder,
        )
    except FedstillError as error:
        return reason_of(error)
    return None


def node(folder: Path, rule: Rule, policy: dict[str, Any], privacy: PrivacyConfig) -> Clinic:
    own = tomli_w.dumps(policy)
    if privacy != NoPrivacy():
        own += tomli_w.dumps({"privacy": to_table(privacy)})
    public = replace(PLAN, public=public_fingerprint(PUBLIC), public_note=("ours", ""))
    return Clinic(folder, own, replace(public, method=to_table(rule.method)))


def say_messages(folder: Path, rule: Rule, policy: dict[str, Any], privacy: PrivacyConfig) -> str | None:
    clinic = node(folder, rule, policy, privacy)
    clinic.host.server_fingerprint = SERVER
    replies = [clinic.say("join", public_tensors(PUBLIC), plan=clinic.plan.to_dict())]
    if clinic.host.session is not None:
        clinic.say("train_locally", seconds=60)
        for number, call in enumerate(rule.method.planned_queries(PUBLIC, CLASSES)):
            header = {"query": call.query, "number": number, "differentiable": False}
            replies.append(clinic.say("answer_query", call.tensors, **header))
    return next((reply.get("rule", reply["text"]) for reply in replies if isinstance(reply, dict)), None)


def answer_file(folder: Path, rule: Rule, policy: dict[str, Any], privacy: PrivacyConfig) -> str | None:
    clinic = node(folder, rule, policy, privacy)
    clinic.host.close()
    file = folder / "node.toml"
    file.write_text(file.read_text().replace('name = "clinic"\n', 'name = "clinic"\nonline = false\n', 1))
    queries = Queries(clinic.plan, PUBLIC, tuple(rule.method.planned_queries(PUBLIC, CLASSES)))
    write_queries(folder / "queries", queries, load_or_create_key(folder / "server.key"))
    try:
        answer_queries(folder, folder / "queries", folder / "answers")
    except FedstillError as error:
        assert not (folder / "answers").exists()
        return reason_of(error)
    return None


LAYERS: dict[str, Callable[[Path, Rule, dict[str, Any], PrivacyConfig], str | None]] = {
    "simulation": run_simulation,
    "messages": say_messages,
    "files": answer_file,
}


# --- the table ------------------------------------------------------------------------------------------


def between(first: int, last: int) -> str:
    """Return a range of hours of the day, relative to now."""
    return "-".join(f"{datetime.now() + timedelta(hours=hours):%H:%M}" for hours in (first, last))


# A row of ten logits with a bound of 1 costs 2 * 1 * 10 / 3200 = 1 / 160. Two queries of eight rows cost 16 /
# 160 = 0.1, and hardly less at so small a delta.
NOISE = NoisyOutputs(outputs=OutputsConfig("laplace", noise=3200.0, bound=1.0), delta=1e-12)

RULES = {
    "queries": Rule(
        {"queries": ["count_labels"]},
        {"queries": ["count_labels", "predict"]},
        {**everywhere("queries: count_labels"), "messages": (1, "queries: count_labels")},
    ),
    "sums_only": Rule({"sums_only": True}, {"sums_only": False}, everywhere("sums_only")),
    "max_queries": Rule(
        {"max_queries": 2},
        {"max_queries": 3},
        {
            "simulation": (0, "max_queries: 2, and the run asks 3"),
            "messages": (2, "max_queries: 2"),
            "files": (0, "max_queries: 2, and the file asks 3"),
        },
    ),
    "max_bytes": Rule(
        {"max_bytes": COUNTS + 2 * LOGITS - 1},
        {"max_bytes": COUNTS + 2 * LOGITS},
        everywhere(f"max_bytes: {COUNTS + 2 * LOGITS - 1} bytes", 2),
    ),
    "max_rows": Rule(
        {"max_rows": ROWS - 1},
        {"max_rows": ROWS},
        {
            "simulation": (0, "invalid public inputs = 8 (expected up to 7, by max_rows of its policy)"),
            "messages": (0, "8 inputs (expected 7, by policy max_rows)"),
            "files": (0, "8 inputs (expected 7, by policy max_rows)"),
        },
    ),
    "max_parameters": Rule(
        {"max_parameters": 99, "plugins": [FURTHER_NETWORK]},
        {"max_parameters": 100, "plugins": [FURTHER_NETWORK]},
        everywhere("max_parameters: 99, and "),
        method_class=FurtherNetwork,
    ),
    "epsilon": Rule(
        replace(NOISE, epsilon=0.099),
        replace(NOISE, epsilon=0.1001),
        everywhere("privacy budget: the budget is epsilon 0.099"),
        {"weights": "equal"},
    ),
    "total_epsilon": Rule(
        replace(NOISE, total_epsilon=0.099, total_delta=1e-12),
        replace(NOISE, total_epsilon=0.1001, total_delta=1e-12),
        everywhere("privacy budget: the budget is epsilon 0.099"),
        {"weights": "equal"},
    ),
    "guarantee": Rule(NoPrivacy(epsilon=8.0), NoPrivacy(), everywhere("a budget is set without a mechanism")),
    "min_records": Rule(
        {"min_records": RECORDS + 1},
        {"min_records": RECORDS},
        at_a_node("min_records: 41, and this node has fewer"),
    ),
    "allowed_servers": Rule(
        {"allowed_servers": [OTHER]}, {"allowed_servers": []}, at_a_node("allowed_servers: not ")
    ),
    "hours": Rule({"hours": between(2, 3)}, {"hours": between(-1, 2)}, at_a_node("hours: ")),
    "approve": Rule({"approve": "each run"}, {"approve": "policy"}, at_a_node("approve: run ")),
    "max_header": Rule(
        {"max_header": 100},
        {"max_header": 10_000},
        {
            "messages": (0, "max_header: 100, and "),
            "files": (0, "(expected 100 (max_header))"),
        },
    ),
    "max_message": Rule({"max_message": 1000}, {"max_message": 100_000}, at_a_node("max_message: 1000")),
    "max_runs": Rule({"max_runs": 1}, {"max_runs": 2}, at_a_node("max_runs: 1, and 1 are in runs/")),
    "max_disk": Rule({"max_disk": 1}, {"max_disk": 10_000_000}, at_a_node("max_disk: 1")),
    "min_nodes": Rule(
        {"min_nodes": 3}, {"min_nodes": 0}, {"messages": (0, "min_nodes: 3, and ")}
    ),  # a file does not state the number of nodes
}


@pytest.mark.parametrize(
    ("name", "layer"), [(name, layer) for name, rule in RULES.items() for layer in rule.released]
)
def test_rule_allows_its_limit_and_refuses_beyond(tmp_path: Path, name: str, layer: str) -> None:
    rule = RULES[name]
    for folder, given in ((tmp_path / "refused", rule.refuses), (tmp_path / "allowed", rule.allows)):
        policy, privacy = (given, NoPrivacy()) if isinstance(given, dict) else ({}, given)
        if name == "max_runs":
            (folder / "runs" / "another").mkdir(parents=True)
        reason = LAYERS[layer](folder, rule, policy, privacy)
        planned = rule.method.planned_queries(PUBLIC, CLASSES)
        count, part = rule.released[layer] if given is rule.refuses else (len(planned), "")
        assert (reason is None) == (given is rule.allows), reason
        assert part in (reason or "")
        assert len(releases(folder)) == count
        # the owner can read the reason
        if reason is not None and layer != "simulation" and name != "max_disk":
            events = security_events(folder)
            assert reason in [event["reason"] for event in events if event["event"] == "refused"]
