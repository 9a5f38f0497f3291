"""Admission of runs by a node: servers, hours, number of nodes, data descriptions, and owner approval."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedstill.core.config_tables import flatten
from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data.data_spec import DataSpec
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.table_data import schema_text
from fedstill.node import admission, approvals, folder_check, session
from fedstill.node.admission import RunSizes, SizeFacts, token_ids
from fedstill.node.approvals import ApprovalRequest, describe_request
from fedstill.node.audit_database import AuditError
from fedstill.node.audit_log import FILE
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.method import build_node_side
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import RunPlan, describe
from fedstill.protocol.wire_format import WireConfig
from fedstill.tasks.classification import ClassificationConfig
from fedstill.tasks.regression import RegressionConfig
from tests.support.audit_logs import edit, entries, security_events
from tests.support.errors import raises_invalid
from tests.support.node_services import CLASSES, FEDIOD, NODE, PLAN, SHAPE, B, Clinic

EACH, LISTED = 'approve = "each run"\n', 'approve = "listed"\n'
KNOWN, OTHER = "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20", "0" * 32
Main = Callable[..., tuple[int, str, str]]


def refused(clinic: Clinic) -> str:
    """Return the rule by which the node refuses to join the run."""
    reply = clinic.say("join", plan=clinic.plan.to_dict())
    assert isinstance(reply, dict), reply
    assert reply["kind"] == "QueryRefused"
    return str(reply["rule"])


def joined(clinic: Clinic) -> bool:
    return isinstance(clinic.say("join", plan=clinic.plan.to_dict()), tuple)


def decide(clinic: Clinic, approved: bool = True, server: str | None = None) -> None:
    clinic.host.requests.decide(describe(clinic.plan, None).sha256, approved, server=server)


def events(clinic: Clinic) -> list[str]:
    return [line["event"] for line in security_events(clinic.folder)]


# --- servers, hours, number of nodes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hours", "at", "inside"),
    [
        ("", "03:00", True),
        ("08:00-18:00", "08:00", True),
        ("08:00-18:00", "17:59", True),
        ("08:00-18:00", "18:00", False),
        ("08:00-18:00", "07:59", False),
        ("20:00-06:00", "23:00", True),
        ("20:00-06:00", "05:59", True),
        ("20:00-06:00", "06:00", False),
        ("20:00-06:00", "12:00", False),
    ],
)
def test_hours_need_different_start_and_end(hours: str, at: str, inside: bool) -> None:
    facts = admission.RunFacts(PolicyConfig(hours=hours), now=datetime.strptime(at, "%H:%M"))
    reason = admission.first_reason(admission.SERVER_RULES, facts)
    assert reason == (None if inside else f"hours: {hours}, by the clock of the node")


@pytest.mark.parametrize(
    ("option", "value"),
    [("hours", "8-18"), ("hours", "08:00-24:00"), ("hours", "08:00-08:00"), ("allowed_servers", ("abc",))],
)
def test_rejects_invalid_rules(option: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"policy.{option}"):
        PolicyConfig(**{option: value})


def test_allowed_server_is_admitted_for_any_fingerprint_format(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", f'allowed_servers = ["{KNOWN.upper()}"]\n')
    clinic.host.server_fingerprint = KNOWN
    assert joined(clinic)
    assert events(clinic) == ["policy", "joined"]


def test_plan_of_unlisted_server_is_not_parsed(tmp_path: Path) -> None:
    """Parsing could take long."""
    clinic = Clinic(tmp_path / "clinic", f'allowed_servers = ["{KNOWN}"]\n')
    assert clinic.say("join", plan="none")["rule"].startswith("allowed_servers")


def test_unproven_server_is_refused(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", f'allowed_servers = ["{KNOWN}"]\n')
    assert "an unproven server" in refused(clinic)


def test_no_training_or_response_outside_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    soon, later = (f"{datetime.now() + timedelta(hours=hours):%H:%M}" for hours in (2, 3))
    monkeypatch.setattr(clinic.host.file.policy.__class__, "hours", f"{soon}-{later}")
    object.__setattr__(clinic.host.file.policy, "hours", f"{soon}-{later}")
    for do in ("train_locally", "answer_query", "compute_gradients"):
        reply = clinic.say(do, seconds=1, query="predict_logits", number=0, differentiable=True)
        assert reply["rule"].startswith(f"hours: {soon}-{later}")
    assert clinic.charged_releases() == []


# --- classes and values ---------------------------------------------------------------------------------


def test_refusal_does_not_reveal_classes(tmp_path: Path) -> None:
    """One record has the class "rare": a server that omits it could see whether the node cannot join."""
    own = 'classes = ["common", "rare"]\n'
    clinics = []
    for name, data in (("own", own), ("any", "")):
        clinic = Clinic(tmp_path / name)
        images = np.random.default_rng(0).uniform(0, 1, (3, *SHAPE)).astype(np.float32)
        np.savez(clinic.folder / "data.npz", images=images, labels=np.array(["common", "common", "rare"]))
        (clinic.folder / "node.toml").write_text(NODE.replace("[model]\n", f"{data}[model]\n"))
        clinic.again()
        clinics.append(clinic)
    named, unrestricted = clinics
    for each, classes in enumerate((("common", "other"), ("rare", "common"), ("common", "rare", "other"))):
        for each_clinic in clinics:
            each_clinic.plan = replace(PLAN, run=f"run-{each}", spec=replace(PLAN.spec, classes=classes))
        assert refused(named) == "classes: the run's classes differ from the owner's"
        assert joined(unrestricted) is ("rare" in classes), (
            "without declared classes, the refusal would reveal them"
        )
    (named.folder / "data.npz").unlink()
    assert refused(named) == "classes: the run's classes differ from the owner's"
    assert not list((named.folder / "runs").glob("*"))
    with raises_invalid("data.classes", ANY, "empty", "data.schema"):
        NodeDataConfig(source="csv", schema="ours.toml", classes=("a", "b"))


def test_run_with_owners_classes_is_admitted(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic")
    own = f"classes = {json.dumps(PLAN.spec.classes)}\n"
    (clinic.folder / "node.toml").write_text(NODE.replace("[model]\n", f"{own}[model]\n"))
    clinic.again()
    assert joined(clinic)
    *_, changed, _ = security_events(clinic.folder)
    assert changed["reason"].startswith('data.classes = ["0", "1"')


def test_declared_normalization_does_not_reveal_largest_value(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic")
    tensors = {"inputs": torch.full((3, *SHAPE), 0.4), "targets": torch.tensor([0, 1, 2])}
    save_file(tensors, clinic.folder / "own.safetensors")
    owned = NODE.replace('path = "data.npz"', 'source = "tensors"\npath = "own.safetensors"')
    (clinic.folder / "node.toml").write_text(owned)
    clinic.again()
    for each, (mean, std) in enumerate(((0.5, 0.5), (0.7, 1.0))):  # valid values up to 1, and up to 0.3
        spec = replace(PLAN.spec, mean=(mean,), std=(std,))
        clinic.plan = replace(PLAN, run=f"run-{each}", spec=spec)
        assert joined(clinic)
    report = folder_check.check_folder(clinic.folder, clinic.plan.spec)
    assert any("has values from 0.4 to 0.4 in channel 0" in fault for fault in report.faults)


def test_request_names_classes(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    (request,) = clinic.host.requests.list_all()
    assert describe_request(request)["classes"] == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"


def values(table: Any) -> list[Any]:
    """Return the values in nested lists and tables."""
    inner = table.values() if isinstance(table, dict) else table if isinstance(table, list) else None
    return [table] if inner is None else [value for each in inner for value in values(each)]


def long_image_plan() -> RunPlan:
    classes = tuple(f"finding {'of the lung ' * 30}{each}" for each in range(40))
    task = ClassificationConfig(metric="balanced_accuracy")
    spec = replace(PLAN.spec, task=task, classes=classes, mean=(0.1307,), std=(0.3081,))
    return replace(PLAN, spec=spec, wire=WireConfig(inputs="int8", gradients="float16"))


def long_table_plan() -> RunPlan:
    wards = tuple(f"{'ward ' * 80}{each}" for each in range(12))
    columns = (
        *(SchemaColumn(name=f"of {'column ' * 60}{each}", range=(0.0, 1.0)) for each in range(9)),
        SchemaColumn(name="cost", range=(0.0, 1234567.125), scale=(10.5, 90.25)),
        SchemaColumn(name="ward", type="category", categories=wards, missing=True),
        ILL,
    )
    return table_plan(TableSchema("ill", columns))


@pytest.mark.parametrize("make_plan", [long_image_plan, long_table_plan])
def test_request_shows_all_of_the_description(make_plan: Callable[[], RunPlan]) -> None:
    """The owner also approves the end of a long text."""
    public = {"public": "ab" * 16, "public_note": ("digits " * 70 + "ours", "")}
    table = json.loads(describe(replace(make_plan(), **public, student="resnet8"), None).text)
    table["method"] |= {"prompt": "x" * 3000 + "\u202eend", "last": {"gamma": 0.0625}}
    request = ApprovalRequest(json.dumps(table), "run-7", "", "2026-01-02 03:04", "rejected")
    texts = describe_request(request)
    shown = " ".join(text if isinstance(text, str) else " ".join(text) for text in texts.values())
    summed = json.dumps({**table, "secure_aggregation": True})
    for query in table["queries"].values():
        del query["bytes"]  # rounded in the text
    for column in table["spec"]["schema"]["columns"]:
        del column["type"]  # shown by its range or categories
    for value in values(table):
        if not isinstance(value, bool):
            as_written = (str(value), json.dumps(value), *([f"{value:g}"] if value in (0.0, 1.0) else []))
            assert any(text in shown for text in as_written), value
    for topic in ("method", "wire"):
        for option, value in flatten(table[topic]).items():
            assert option == "name" or f"{option} = {json.dumps(value)}" in texts[topic]
    assert (texts["state"], texts["run"]) == ("rejected", "run-7, requested 2026-01-02 03:04")
    assert f"{request.run_description.max_queries} queries" in texts["at most"]
    other = describe_request(replace(request, description=summed))
    assert [topic for topic in texts if texts[topic] != other[topic]] == ["server sees"]
    assert shown.isprintable()


def test_too_long_description_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    size = len(describe(PLAN, None).text)
    monkeypatch.setattr(approvals, "MAX_DESCRIPTION_BYTES", size - 1)
    assert f"up to {size - 1} bytes, and this one {size}" in refused(clinic)
    assert clinic.host.requests.list_all() == []
    monkeypatch.setattr(approvals, "MAX_DESCRIPTION_BYTES", size)
    assert "waits until its owner approves it" in refused(clinic)


# --- tables -------------------------------------------------------------------------------------------


AGE, ILL = SchemaColumn(name="age", range=(0.0, 120.0)), SchemaColumn(name="ill", range=(0.0, 1.0))
SCHEMA = TableSchema("ill", (AGE, ILL))


def ward(folder: Path, data: str = 'schema = "ours.toml"\n') -> Clinic:
    """Return a node with two patients, 30 and 60 years old, whose owner names a schema."""
    clinic = Clinic(folder, plan=table_plan(SCHEMA))
    (folder / "rows.csv").write_text("age,ill\n30,0\n60,1\n")
    (folder / "ours.toml").write_text(schema_text(SCHEMA))
    owned = NODE.replace('path = "data.npz"\n', f'source = "csv"\npath = "rows.csv"\n{data}')
    (folder / "node.toml").write_text(owned + "\n")
    clinic.again()
    return clinic


def table_plan(schema: TableSchema) -> RunPlan:
    return replace(PLAN, spec=DataSpec.from_schema(RegressionConfig(), schema))


def aged(*range: float) -> TableSchema:
    return replace(SCHEMA, columns=(replace(AGE, range=range), ILL))


OTHERS = [
    aged(0.0, 59.0),  # no run could have it, as one patient is 60
    aged(0.0, 60.0),
    replace(SCHEMA, target="age"),
    replace(SCHEMA, columns=(ILL, AGE)),
    replace(SCHEMA, columns=(replace(AGE, scale=(0.0, 60.0)), ILL)),
]


def test_refusal_does_not_reveal_column_ranges(tmp_path: Path) -> None:
    """The refusal does not depend on whether the schema fits the rows; it is the same without data."""
    clinic, unrestricted = ward(tmp_path / "own"), ward(tmp_path / "any", "")
    for each, schema in enumerate(OTHERS):
        for node in (clinic, unrestricted):
            node.plan = replace(table_plan(schema), run=f"run-{each}")
        assert refused(clinic) == "schema: the run's schema differs from the owner's"
        assert joined(unrestricted) is (schema != OTHERS[0]), (
            "without a declared schema, the refusal would reveal the ranges"
        )
    (clinic.folder / "rows.csv").unlink()
    assert refused(clinic) == "schema: the run's schema differs from the owner's"
    clinic.plan = PLAN  # a run on images; a csv could contain pixels
    assert refused(clinic) == "schema: the run's schema differs from the owner's"
    assert not list((clinic.folder / "runs").glob("*"))


def test_run_with_owners_schema_is_admitted_and_changes_are_logged(tmp_path: Path) -> None:
    clinic = ward(tmp_path / "clinic")
    assert joined(clinic)
    (clinic.folder / "ours.toml").write_text(schema_text(OTHERS[1]))
    clinic.again()
    assert "schema" in refused(clinic)
    *_, named, _, changed, _ = security_events(clinic.folder)
    assert [line["reason"].partition(" = ")[0] for line in (named, changed)] == ["data.schema"] * 2


def test_node_with_unreadable_schema_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"data\.schema .*none\.toml"):
        ward(tmp_path / "clinic", 'schema = "none.toml"\n')
    report = folder_check.check_folder(tmp_path / "clinic", quick=True)
    assert any("data.schema" in fault for fault in report.faults)
    with raises_invalid("data.schema", "ours.toml", "empty", "source npz"):
        NodeDataConfig(schema="ours.toml")


# --- approval -----------------------------------------------------------------------------------------


def test_run_waits_for_approval(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    sha256 = describe(PLAN, None).sha256
    assert refused(clinic).replace(" ", "").startswith(f"approve:run{sha256}waits")
    assert clinic.host.session is None
    decide(clinic)
    assert joined(clinic)
    clinic.again()
    assert joined(clinic)  # the same run resumes
    assert events(clinic) == ["policy", "waits", "refused", "approved", "joined", "joined"]


def test_approval_holds_for_one_run_or_one_description(tmp_path: Path) -> None:
    for name, policy, again in (("each", EACH, False), ("listed", LISTED, True)):
        clinic = Clinic(tmp_path / name, policy)
        refused(clinic)
        decide(clinic)
        assert joined(clinic)
        clinic.plan = replace(PLAN, run="two")
        assert joined(clinic) is again


def test_approval_of_one_run_does_not_admit_another(tmp_path: Path) -> None:
    for name, policy, again in (("each", EACH, False), ("listed", LISTED, True)):
        clinic = Clinic(tmp_path / name, policy)
        refused(clinic)
        decide(clinic)
        clinic.plan = replace(PLAN, run="two")  # before the run that the owner was asked to approve
        assert joined(clinic) is again


def test_approval_needs_more_digits_than_display(tmp_path: Path) -> None:
    """A server can find two descriptions whose hashes agree in 32 bits."""
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    sha256 = describe(PLAN, None).sha256
    with raises_invalid("HASH", ANY, "32 or more"):
        clinic.host.requests.decide(sha256[:31], True)
    assert not joined(clinic)
    clinic.host.requests.decide(sha256[:32], True)
    assert joined(clinic)
    assert clinic.host.requests.decide(sha256[:8], False).sha256 == sha256


def test_approved_run_without_folder_cannot_restart(tmp_path: Path) -> None:
    for name, policy, again in (("each", EACH, False), ("listed", LISTED, True)):
        clinic = Clinic(tmp_path / name, policy)
        refused(clinic)
        decide(clinic)
        clinic.ready()
        clinic.query(0)
        clinic.say("leave")
        (clinic.folder / "runs/one").rename(tmp_path / f"of {name}")
        if again:
            assert joined(clinic)
        else:
            assert "run 'one' was approved once, has released responses, and is no longer" in refused(clinic)


@pytest.mark.parametrize(
    "changed",
    [
        replace(PLAN, method={**FEDIOD, "steps": 7}),
        replace(PLAN, student="resnet8"),
        replace(PLAN, spec=replace(PLAN.spec, classes=tuple("abcdefghij"))),
    ],
)
def test_changed_run_needs_another_approval(tmp_path: Path, changed: Any) -> None:
    clinic = Clinic(tmp_path / "clinic", LISTED)
    refused(clinic)
    decide(clinic)
    clinic.plan = changed
    assert "waits until its owner approves it" in refused(clinic)


def test_approval_holds_for_one_server_and_protection(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", LISTED)
    refused(clinic)
    decide(clinic)
    clinic.host.server_fingerprint = KNOWN
    assert "waits" in refused(clinic)
    decide(clinic, server=KNOWN)
    assert joined(clinic)
    clinic.say("leave", message=99)
    (clinic.folder / "node.toml").write_text(NODE + LISTED + "[privacy]\ncounts_noise = 20.0\n")
    clinic.again()
    clinic.host.server_fingerprint = KNOWN
    assert "waits" in refused(clinic)


def test_repeated_request_does_not_gain_another_servers_approval(tmp_path: Path) -> None:
    """A request of another server does not end the approved run either."""
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    decide(clinic)
    assert joined(clinic)
    clinic.say("leave", message=99)
    clinic.again()
    clinic.host.server_fingerprint = KNOWN
    for _ in range(3):
        assert "waits" in refused(clinic)
    clinic.host.server_fingerprint = ""
    assert joined(clinic)
    clinic.host.server_fingerprint = KNOWN
    assert "waits" in refused(clinic)


def test_approval_of_another_server_does_not_cover_changed_protection(
    tmp_path: Path,
) -> None:
    """Both servers request the same run; the owner weakens the protection and approves the second only."""
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    decide(clinic)
    assert joined(clinic)
    clinic.say("leave", message=99)
    (clinic.folder / "node.toml").write_text(NODE + EACH + "[privacy]\ncounts_noise = 20.0\n")
    clinic.again()
    assert "waits" in refused(clinic)
    clinic.host.server_fingerprint, clinic.plan = KNOWN, replace(PLAN, run="two")
    assert "waits" in refused(clinic)
    decide(clinic, server=KNOWN)
    assert joined(clinic)
    clinic.say("leave", message=99)
    clinic.plan = PLAN
    clinic.again()
    assert "waits" in refused(clinic)
    decide(clinic, server="")
    assert joined(clinic)


@pytest.mark.parametrize(("first", "second"), [(KNOWN, OTHER), (KNOWN, ""), ("", KNOWN)])
@pytest.mark.parametrize("policy", [EACH, LISTED])
def test_approval_for_one_server_survives_the_same_request_of_another(
    first: str, second: str, policy: str, tmp_path: Path
) -> None:
    """The second server knows description and run name, and sends its request before the run starts."""
    clinic = Clinic(tmp_path / "clinic", policy)
    clinic.host.server_fingerprint = first
    refused(clinic)
    decide(clinic, server=first)
    clinic.host.server_fingerprint = second
    for run in ("one", "two", "one"):
        clinic.plan = replace(PLAN, run=run)
        assert "waits" in refused(clinic)
    states = {request.server: request.state for request in clinic.host.requests.list_all()}
    assert states == {first: "approved", second: "waits"}
    clinic.plan, clinic.host.server_fingerprint = PLAN, first
    assert joined(clinic)
    clinic.host.server_fingerprint = second
    assert "waits" in refused(clinic)


def test_decision_on_one_request_leaves_others_unchanged(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    for clinic.host.server_fingerprint in (KNOWN, OTHER):
        refused(clinic)
    decide(clinic, server=OTHER)
    clinic.host.server_fingerprint = KNOWN
    assert "waits" in refused(clinic)
    decide(clinic, server=KNOWN)
    decide(clinic, approved=False, server=OTHER)
    assert joined(clinic)
    clinic.host.server_fingerprint = OTHER
    assert refused(clinic).endswith("is rejected by its owner")


def test_approval_needs_server_if_several_request(tmp_path: Path, command: Main) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    sha256 = describe(PLAN, None).sha256
    for clinic.host.server_fingerprint in (KNOWN, OTHER, ""):
        refused(clinic)
    for word, given in (("approve", []), ("reject", []), ("approve", ["--server", KNOWN[:-1]])):
        code, _, err = command("node", word, clinic.folder, sha256, *given)
        assert code == 2
        assert "--server" in err
        assert KNOWN in err
        assert OTHER in err
    assert {request.state for request in clinic.host.requests.list_all()} == {"waits"}
    shown = " ".join(command("node", "requests", clinic.folder)[1].split())
    assert all(server in shown for server in (KNOWN, OTHER, "an unproven server"))
    listed = json.loads(command("node", "requests", clinic.folder, "--json")[1])
    assert {(each["sha256"], each["server"]) for each in listed} == {
        (sha256, server) for server in (KNOWN, OTHER, "")
    }
    code, out, _ = command("node", "approve", clinic.folder, sha256, "--server", KNOWN.upper())
    assert code == 0
    assert KNOWN in out
    assert command("node", "reject", clinic.folder, sha256, "--server", "none")[0] == 0
    states = {request.server: request.state for request in clinic.host.requests.list_all()}
    assert states == {KNOWN: "approved", OTHER: "waits", "": "rejected"}
    *_, approval, rejection = security_events(clinic.folder)
    assert (approval["server"], rejection["server"]) == (KNOWN, "an unproven server")
    assert KNOWN in " ".join(command("node", "log", clinic.folder)[1].split())


def test_request_limit_is_per_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approvals, "MAX_WAITING_PER_SERVER", 2)
    clinic = Clinic(tmp_path / "clinic", EACH)
    clinic.host.server_fingerprint = OTHER
    for steps in range(1, 5):
        clinic.plan = replace(PLAN, method={**FEDIOD, "steps": steps})
        refused(clinic)
    clinic.plan, clinic.host.server_fingerprint = PLAN, KNOWN
    assert "waits" in refused(clinic)
    decide(clinic)
    assert joined(clinic)


def test_requests_under_new_keys_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approvals, "MAX_WAITING", 3)
    clinic = Clinic(tmp_path / "clinic", EACH)
    clinic.host.server_fingerprint = KNOWN
    refused(clinic)
    decide(clinic)
    rules = []
    for key in range(5):
        clinic.host.server_fingerprint = f"{key:032x}"
        rules.append(refused(clinic))
    assert ["waits until" in rule for rule in rules] == [True, True, True, False, False]
    clinic.host.server_fingerprint = KNOWN
    assert joined(clinic)


def test_run_is_not_continued_by_another_server(tmp_path: Path) -> None:
    """Also if both servers have an approval: the run's state and query numbers belong to the first."""
    clinic = Clinic(tmp_path / "clinic", EACH)
    clinic.host.server_fingerprint = KNOWN
    refused(clinic)
    decide(clinic)
    clinic.ready()
    clinic.say("leave")
    clinic.again()
    clinic.host.server_fingerprint = OTHER
    refused(clinic)
    decide(clinic, server=OTHER)
    reply = clinic.say("join", plan=clinic.plan.to_dict())
    assert reply["kind"] == "NodeFault"
    assert "run 'one' exists here" in reply["text"]
    clinic.host.server_fingerprint = KNOWN
    assert joined(clinic)
    clinic.host.server_fingerprint = OTHER  # in the same process, during the run
    assert clinic.say("join", plan=clinic.plan.to_dict())["kind"] == "NodeFault"


def test_withdrawn_approval_stops_running_run(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    decide(clinic)
    clinic.ready()
    assert isinstance(clinic.query(0), tuple)
    decide(clinic, False)
    assert clinic.query(1)["rule"].endswith("is rejected by its owner")
    assert refused(clinic).endswith("is rejected by its owner")
    assert clinic.charged_releases() == [(0, "response")]
    decide(clinic)
    assert isinstance(clinic.query(1), tuple)


def test_waiting_run_does_not_stop_current_run(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    decide(clinic)
    clinic.ready()
    other = clinic.say("join", plan=replace(PLAN, run="two").to_dict(), server="b")
    assert "waits" in other["rule"]
    assert isinstance(clinic.query(0), tuple)


def test_approved_run_is_limited_to_its_description(tmp_path: Path) -> None:
    """Six queries with four inputs each, also across a restart, and even if the policy allowed more."""
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    decide(clinic)
    clinic.ready()
    more = torch.zeros(B + 1, *SHAPE)
    assert clinic.query(0, more)["rule"] == f"approved: {B} inputs, and x has {B + 1}"
    for number in range(5):
        assert isinstance(clinic.query(number), tuple)
        assert isinstance(clinic.pull(number), tuple)
    clinic.again()
    clinic.ready()
    clinic.say("load_checkpoint", checkpoint=0, message=5)
    assert isinstance(clinic.query(0), tuple)  # the same query again is free
    assert isinstance(clinic.query(5), tuple)
    refusal = clinic.query(6)
    assert (refusal["kind"], refusal["query"], refusal["rule"]) == (
        "QueryRefused", "predict_logits", "approved: 6 times",
    )  # fmt: skip
    lines = entries(clinic.folder, "response", "gradient")
    limit = describe(PLAN, None).queries["predict_logits"]["bytes"]
    each = [sum(line["up"].values()) for line in lines]
    assert max(each) + min(each) <= limit


def test_approval_holds_for_the_described_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in may declare more when the node's own options or networks are known."""
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    decide(clinic)

    def build(method: Any, setting: Any) -> Any:
        side = build_node_side(method, setting)
        declared = side.queries["count_labels"]
        more = replace(declared, releases={**declared.releases, "more": LOGITS})
        return replace(side, queries={**side.queries, "count_labels": more})

    monkeypatch.setattr(session, "build_node_side", build)
    assert refused(clinic).startswith("approved: ")
    monkeypatch.undo()
    assert joined(clinic)


def test_approved_bytes_limit_releases(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    decide(clinic)
    clinic.ready()
    approved = clinic.session.node.gate.ledger.approved
    assert approved is not None
    approved.table["queries"]["predict_logits"]["bytes"] = 4 * B * CLASSES  # enough for the logits alone
    assert clinic.query(0)["rule"] == "approved: 160 bytes per response"
    assert clinic.charged_releases() == []


def test_server_cannot_fill_the_disk_with_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approvals, "MAX_WAITING_PER_SERVER", 2)
    clinic = Clinic(tmp_path / "clinic", EACH)
    for steps in (1, 2, 3):
        clinic.plan = replace(PLAN, method={**FEDIOD, "steps": steps})
        rule = refused(clinic)
    assert rule.startswith("approve: 2 requests of this server")
    assert len(list((clinic.folder / "requests").glob("*.json"))) == 2


def test_server_cannot_fill_the_disk_with_refused_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are recorded under their approval before other rules may refuse them."""
    monkeypatch.setattr(approvals, "MAX_RUNS", 2)
    clinic = Clinic(tmp_path / "clinic", LISTED + "max_runs = 1\n")
    refused(clinic)
    decide(clinic)
    assert joined(clinic)
    for run in "abc":
        clinic.plan = replace(PLAN, run=run)
        assert refused(clinic).startswith("max_runs")
    (request,) = clinic.host.requests.list_all()
    assert request.runs == ("b", "c")
    clinic.plan = PLAN
    assert joined(clinic)


def test_server_cannot_fill_log_with_waiting_runs(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    for number in range(6):
        clinic.plan = replace(PLAN, run="ab"[number % 2])
        refused(clinic)
    assert events(clinic).count("waits") == 2


def test_tampered_request_file_is_refused(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH)
    refused(clinic)
    decide(clinic)
    (path,) = (clinic.folder / "requests").glob("*.json")
    table = json.loads(path.read_text())
    table["description"] = table["description"].replace('"steps":6', '"steps":7')
    path.write_text(json.dumps(table))
    reply = clinic.say("join", plan=clinic.plan.to_dict())
    assert reply["kind"] == "NodeDataError"  # and without a path of this machine
    assert str(tmp_path) not in reply["text"]


# --- commands of the owner ------------------------------------------------------------------------------


def test_owner_reads_approves_and_lists_requests(tmp_path: Path, command: Main) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH, replace(PLAN, min_nodes=3, student="mlp:8"))
    description = describe(clinic.plan, None)
    assert command("node", "requests", clinic.folder)[1] == "No run has asked for approval.\n"
    refused(clinic)
    code, out, _ = command("node", "requests", clinic.folder)
    assert code == 0
    facts = ("predict_logits: 6 times, up to 4 inputs", "count_labels: 1 time;", "steps = 6", "7 queries")
    for text in (*facts, "student mlp:8; continues with 3 nodes or more"):
        assert text in " ".join(out.split())
    assert command("node", "requests", clinic.folder, description.sha256)[1] == description.text
    code, _, err = command("node", "approve", clinic.folder, description.sha256[:7])
    assert (code, "32 or more" in err) == (2, True)
    digits = " ".join(description.sha256[start : start + 4].upper() for start in range(0, 32, 4))
    code, out, _ = command("node", "approve", clinic.folder, digits, "--because", "board of 3 May")
    assert (code, "approved" in out, "refused" in out) == (0, True, False)
    assert joined(clinic)
    assert command("node", "reject", clinic.folder, description.sha256)[0] == 0
    [request] = json.loads(command("node", "requests", clinic.folder, "--json")[1])
    assert (request["sha256"], request["state"], request["description"]["student"]) == (
        description.sha256,
        "rejected",
        "mlp:8",
    )
    code, out, _ = command("node", "log", clinic.folder)
    assert code == 0
    assert "board of 3 May" in " ".join(out.split())
    log = json.loads(command("node", "log", clinic.folder, "--json")[1])
    assert log["fault"] is None
    assert log["events"][-1]["event"] == "rejected"
    assert "as they were written" in out


def test_approval_reports_and_logs_other_rules(
    tmp_path: Path, command: Main, caplog: pytest.LogCaptureFixture
) -> None:
    clinic = Clinic(tmp_path / "clinic", EACH + 'queries = ["count_labels"]\n')
    refused(clinic)
    code, out, _ = command("node", "approve", clinic.folder, describe(clinic.plan, None).sha256)
    assert code == 0
    assert "But predict_logits is refused all the same, as node.toml is: queries: count_labels." in out
    assert "count_labels is refused" not in out
    for _ in range(2):  # a server that joins again gets the same reply, and nothing is logged twice
        assert joined(clinic)
    *_, line = security_events(clinic.folder)
    assert (line["event"], line["query"], line["reason"]) == (
        "refused",
        "predict_logits",
        "queries: count_labels",
    )
    assert caplog.text.count("run one: predict_logits will be refused: queries: count_labels") == 1
    assert events(clinic).count("refused") == 2


def test_tampered_security_event_is_detected(tmp_path: Path, command: Main) -> None:
    clinic = Clinic(tmp_path / "clinic", "min_nodes = 4\n")
    refused(clinic)
    clinic.host.close()
    edit(clinic.folder / FILE, "UPDATE entries SET line = replace(line, 'min_nodes: 4', 'min_nodes: 3')")
    for verb, subcommand in (("node", "log"), ("node", "check"), ("audit", "verify")):
        code, _, err = command(verb, subcommand, clinic.folder)
        assert (code, "entry 2 is not as it was written" in err) == (2, True)
    with pytest.raises(AuditError, match="entry 2 "):
        clinic.again()


def test_restored_log_is_detected_by_noted_hash(tmp_path: Path, command: Main) -> None:
    """A file and its head restored together from a backup are consistent."""
    clinic = Clinic(tmp_path / "clinic", EACH)
    clinic.host.close()
    older = {path: path.read_bytes() for path in clinic.folder.glob("audit.sqlite*")}
    clinic.again()
    refused(clinic)
    code, out, _ = command("node", "log", clinic.folder)
    noted = out.split()[-1]
    assert (code, len(noted)) == (0, 64)
    decide(clinic)
    assert "Entry 3 has the hash that you noted" in command("node", "log", clinic.folder, noted)[1]
    clinic.host.close()
    for path in clinic.folder.glob("audit.sqlite*"):
        path.unlink()
    for path, content in older.items():
        path.write_bytes(content)
    assert command("node", "log", clinic.folder)[0] == 0
    code, _, err = command("node", "log", clinic.folder, noted)
    assert (code, "no entry has the hash that you noted" in err) == (2, True)


def test_security_events_hold_no_private_values(tmp_path: Path) -> None:
    """Excludes data values, numbers of records, errors of the owner's code, and secrets."""
    clinic = Clinic(tmp_path / "clinic", "min_records = 977\nmax_bytes = 400\n")
    (clinic.folder / "secret").write_text("rehearsal 31415926535\n")
    assert refused(clinic) == "min_records: 977, and this node has fewer"
    (clinic.folder / "node.toml").write_text(NODE.replace("data.npz", "patient-4711.npz"))
    np.savez(clinic.folder / "patient-4711.npz", images=np.full((40, 9, 9), 0.25), labels=np.zeros(40))
    clinic.again()
    assert clinic.say("join", plan=clinic.plan.to_dict())["kind"] == "NodeDataError"
    (clinic.folder / "node.toml").write_text(NODE + "max_bytes = 400\n")
    clinic.again()
    clinic.ready()
    clinic.query(0)
    assert "max_bytes" in clinic.query(1)["rule"]
    chance = ("at", "hash")  # times and hashes can contain any digits
    lines = [
        {name: line[name] for name in line if name not in chance} for line in security_events(clinic.folder)
    ]
    text = json.dumps(lines)
    assert {"refused", "joined", "policy"} <= set(events(clinic))
    for private in ("4711", "31415926535", "40 ", "0.25", str(tmp_path), "(40", "9, 9"):
        assert private not in text, private


# --- modules that refuse --------------------------------------------------------------------------------


def test_refusals_come_from_admission() -> None:
    """Other modules stop computations: limits, students that a node does not build, training without noise or
    with a term that has read records, messages of secure aggregation."""
    folder = Path(admission.__file__).parent
    raising = {path.stem for path in folder.glob("*.py") if "raise QueryRefused(" in path.read_text()}
    elsewhere = {"dp_training", "given_examples", "limits", "model_setup", "node_group", "run_mechanism"}
    assert raising == {"admission", "secure_aggregation"} | elsewhere


@pytest.mark.parametrize(
    ("token", "is_refused"), [(0, False), (49, False), (50, True), (-1, True), (10**9, True)]
)
def test_token_ids_are_of_the_vocabulary(token: int, is_refused: bool) -> None:
    tensors, sizes = {"x": torch.tensor([[1, token]])}, SimpleNamespace(spec=SimpleNamespace(vocabulary=50))
    query = Query(print, sends={"x": INPUTS}, times=1)
    facts: Any = SizeFacts(sizes, query, tensors)  # type: ignore[arg-type]
    assert (token_ids(facts) is not None) == is_refused


def test_memory_for_an_input_includes_that_of_the_critic_for_two() -> None:
    """A critic trains on as many inputs of the node. It may also see label maps, as two channels here."""
    images, rows = PLAN.spec, PLAN.spec.on_features(5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    for spec, modules, numbers in (
        (images, {"model": model}, 64 + CLASSES),  # inputs and outputs
        (images, {"model": model, "critic": nn.Conv2d(1, 2, 3)}, 64 + CLASSES + 2 * (64 + 2 * 6 * 6)),
        (images, {"model": model, "critic": nn.Conv2d(3, 2, 3)}, 64 + CLASSES + 2 * (3 * 64 + 2 * 6 * 6)),
        (rows, {"model": nn.Linear(5, CLASSES), "critic": nn.Linear(5, 7)}, 5 + CLASSES + 2 * (5 + 7)),
    ):
        assert RunSizes(modules, None, spec, 0).bytes_per_input == 4 * numbers
