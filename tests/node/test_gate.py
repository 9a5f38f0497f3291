"""Tensors leave a node only through its gate: policy first, then bound, noise, charge, release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.errors import DataError, QueryRefused
from fedstill.node.admission import SIMULATION_RULES, TENSOR_RULES, TensorFacts, first_reason
from fedstill.node.audit_entries import ALL_RUNS, ReceivedQuery
from fedstill.node.audit_log import FILE, AuditLog, Charge
from fedstill.node.gate import Gate
from fedstill.node.policy import PolicyConfig
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.release_ledger import Release, ReleaseLedger
from fedstill.node.replies import ReleaseCost
from fedstill.node.run_budgets import RunBudgets
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.config import GradientsConfig
from fedstill.privacy.events import CostBreakdown, Event, PrivacyCost
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import GENERATOR_PARAMETERS, GRADIENTS, INPUTS, LABEL_MAPS, PARAMETERS
from fedstill.protocol.queries import Query, QueryDetails
from fedstill.protocol.run_plan import RunDescription
from fedstill.protocol.wire_format import Tensors
from fedstill.tasks.classification import Classification
from tests.support.audit_logs import entries, total_charged
from tests.support.errors import raises_invalid, raises_refused
from tests.support.node_services import QUERY, Journal, release_now
from tests.support.small_world import SETTING

UPLOAD = Query(lambda node: {}, releases={"logits": "logits", "weights": PARAMETERS}, name="upload")
ANSWER = {"logits": torch.ones(2, 3), "critic": torch.ones(4, dtype=torch.float64)}  # 24 and 32 bytes


def gate(audit: AuditLog | None = None, **policy: Any) -> Gate:
    return Gate("clinic", PolicyConfig(**policy), audit or AuditLog())


def received_query(number: int = 0, content: str = "c0", query: str = "predict_logits") -> ReceivedQuery:
    return ReceivedQuery(number, query, content, "", {"inputs": 10})


def response(number: int = 0) -> Release:
    """Return an admitted response."""
    return Release(QUERY, "response", received_query(number))


def release(
    door: Gate,
    what: ReceivedQuery | None = None,
    part: str = "response",
    tensors: Mapping[str, torch.Tensor] = ANSWER,
    query: Query = QUERY,
    sent: Mapping[str, torch.Tensor] | None = None,
) -> Mapping[str, torch.Tensor]:
    return release_now(door, what or received_query(), part, tensors, query, sent or {})


class Watched(AuditLog):
    """A log that records charges, and the last entry."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def charge_all(self, charges: Sequence[Charge]) -> list[int]:
        numbers = super().charge_all(charges)
        self.calls += [f"charge {charge.entry.part}" for charge in charges]
        self.last = charges[-1].entry
        return numbers


# --- policy --------------------------------------------------------------------------------------


def test_approved_rows_limit_response() -> None:
    """Public rows may be a range of two numbers, so the size of the response must be checked, too."""
    requires_approval = {"predict": {"times": 9, "rows": 3, "releases": {}, "bytes": 0}}
    door, query = (
        gate(),
        Query(QUERY.function, sends={"rows": "indices"}, releases={"logits": "logits"}, name="predict"),
    )
    door.ledger.approved = RunDescription({"queries": requires_approval})
    about = received_query(query="predict")
    assert release(door, about, tensors={"logits": torch.zeros(3, 5)}, query=query)
    with raises_refused("approved: 3", "has 4"):
        release(door, about, tensors={"logits": torch.zeros(4, 5)}, query=query)


@pytest.mark.parametrize(
    ("queries", "rule"),
    [
        (("*",), None),
        (("predict_logits",), None),
        (("count_labels", "predict_logits"), None),
        (("count_labels",), "queries: count_labels"),
        ((), "queries: none"),
        (("exam",), "queries: exam"),
    ],
)
def test_only_listed_queries_are_allowed(queries: tuple[str, ...], rule: str | None) -> None:
    door = gate(queries=queries)
    assert door.refusal_reason(QUERY) == rule
    if rule is None:
        door.admit(QUERY, received_query(), {})
    else:
        with pytest.raises(QueryRefused) as caught:
            door.admit(QUERY, received_query(), {})
        assert (caught.value.node, caught.value.query, caught.value.rule) == (
            "clinic",
            "predict_logits",
            rule,
        )


def test_query_with_more_declared_rows_is_refused_in_general() -> None:
    query = replace(QUERY, rows=8)
    assert gate(max_rows=8).refusal_reason(query) is None
    assert gate(max_rows=0).refusal_reason(query) is None
    assert gate(max_rows=7).refusal_reason(query) == "max_rows: 7, and it has 8"


def test_outputs_only_refuses_parameters_only() -> None:
    assert gate().refusal_reason(UPLOAD) == "outputs_only: parameters may not leave"
    assert gate(queries=("upload",)).refusal_reason(UPLOAD) == "outputs_only: parameters may not leave"
    assert gate(outputs_only=False).refusal_reason(UPLOAD) is None
    assert gate().refusal_reason(QUERY) is None
    with raises_refused("outputs_only", query="upload", node="clinic"):
        gate().admit(UPLOAD, received_query(query="upload"), {})


def test_max_queries_counts_queries_not_releases() -> None:
    door = gate(max_queries=2)
    for number in range(2):
        door.admit(QUERY, received_query(number), {})
        release(door, received_query(number))
        release(door, received_query(number), "gradient", {"d/dx": torch.ones(1)})
    door.admit(QUERY, received_query(1), {})  # a repetition of the second query
    with pytest.raises(QueryRefused, match="max_queries: 2"):
        door.admit(QUERY, received_query(2), {})


def test_nodes_with_shared_audit_have_own_limits() -> None:
    audit = AuditLog()
    first, second = (Gate(name, PolicyConfig(max_queries=1), audit) for name in ("a", "b"))
    release(first, received_query(0))
    second.admit(QUERY, received_query(1), {})
    with raises_refused("max_queries: 1", node="a"):
        first.admit(QUERY, received_query(1), {})


def test_no_query_is_admitted_after_max_bytes() -> None:
    door = gate(max_bytes=56)
    release(door, received_query(0))
    with pytest.raises(QueryRefused, match="max_bytes: 56"):
        door.admit(QUERY, received_query(1), {})


def test_rejects_too_small_max_memory() -> None:
    with raises_invalid("policy.max_memory", 1000, "0 (no limit)", "50000000 or more"):
        PolicyConfig(max_memory=1000)
    assert PolicyConfig(max_memory=0).max_memory == 0


# --- release -------------------------------------------------------------------------------------


def test_undeclared_tensor_is_refused() -> None:
    audit = AuditLog()
    with raises_refused("undeclared: diary, secret"):
        release(gate(audit), tensors={**ANSWER, "secret": torch.ones(1), "diary": torch.ones(1)})
    assert audit.traffic_totals() == AuditLog().traffic_totals()


def journaled(**bills: CostBreakdown) -> tuple[Gate, Journal, Watched]:
    journal = Journal()
    vars(journal).update(bills)
    audit = Watched(journal.calls)
    door = gate(audit)
    door.ledger.budgets = RunBudgets(journal, audit, "run", "clinic")  # type: ignore[arg-type]
    return door, journal, audit


PAID = {"laplace(4.0)": 2}


def test_release_steps_run_in_order() -> None:
    door, journal, audit = journaled()
    released = release(door)
    assert journal.calls == ["bound", "bound", "noise", "noise", "price", "price", "charge response"]
    assert door.release_cost(0, "response") == ReleaseCost(mechanism="journal", cost=PAID)
    assert all((tensor == 1.5).all() for tensor in released.values()), (
        "released tensors are bounded and noised"
    )
    assert set(released) == set(ANSWER)
    assert (audit.last.up, audit.last.cost, audit.last.no_guarantee) == (
        {"logits": 24, "critic": 32},
        PAID,
        0,
    )
    assert audit.last.rule == "logits: written down; critic: written down"


def test_postprocessing_gets_noised_response_and_inputs() -> None:
    door, journal, audit = journaled()

    def finish(response: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> Any:
        journal.calls.append("finish")
        return {name: tensor.sum() * sent["z"] for name, tensor in response.items()}

    released = release(
        door, query=replace(QUERY, details=QueryDetails(postprocess=finish)), sent={"z": torch.tensor(2.0)}
    )
    assert journal.calls[-3:] == ["price", "finish", "charge response"]
    assert released == {"logits": torch.tensor(18.0), "critic": torch.tensor(12.0)}, "1.5 each, x 2"
    assert audit.last.up == {"logits": 4, "critic": 8}, "bytes after postprocessing"


def test_gradients_are_not_postprocessed() -> None:
    door, _, _ = journaled()
    finishing = replace(QUERY, details=QueryDetails(postprocess=lambda response, sent: {}))
    assert set(release(door, None, "gradient", {"d/dx": torch.ones(1)}, finishing)) == {"d/dx"}


def test_unaffordable_release_is_neither_logged_nor_released(monkeypatch: pytest.MonkeyPatch) -> None:
    door, journal, audit = journaled()

    monkeypatch.setattr(door.budgets, "budget_fault", lambda *given: "privacy budget: spent")
    with raises_refused("privacy budget: spent"):
        release(door)
    assert "charge response" not in journal.calls
    assert list(audit.entries()) == []


def test_first_release_reports_training_cost() -> None:
    door, journal, audit = journaled(before={"training": PrivacyCost({Event("gaussian", 2.0, rate=0.5): 30})})
    trained = {"gaussian(2.0, rate=0.5)": 30}
    release(door, received_query(0))
    assert journal.calls[-2:] == ["charge training", "charge response"]
    assert (audit.last.cost, door.release_cost(0, "response").cost) == (PAID, PAID | trained)
    release(door, received_query(1))
    assert door.release_cost(1, "response").cost == PAID
    release(door, received_query(0))
    assert door.release_cost(0, "response").cost == PAID | trained, "equal to the first reply"
    assert total_charged(audit, "clinic") == ({"laplace(4.0)": 4, **trained}, 0)


def test_training_without_guarantee_voids_run() -> None:
    door, _, audit = journaled(before={"training": None})
    release(door)
    assert door.release_cost(0, "response").cost is None
    assert total_charged(audit, "clinic") == (PAID, 1)


def test_release_reports_its_own_training_cost() -> None:
    door, journal, audit = journaled(learned={"critic": PrivacyCost({Event("gaussian", 3.0, rate=0.5): 1})})
    door.ledger.charge_training(response(0), {})
    release(door, received_query(0))
    assert door.release_cost(0, "response").cost == {**PAID, "gaussian(3.0, rate=0.5)": 1}
    assert audit.last.cost == PAID, "training has its own charge"
    release(door, received_query(0), "gradient", {"d/dx": torch.ones(1)})
    assert door.release_cost(0, "gradient").cost == PAID
    journal.learned = {"critic": None}
    door.ledger.charge_training(response(1), {})
    release(door, received_query(1))
    assert door.release_cost(1, "response").cost is None


def test_training_is_charged_once_at_admission() -> None:
    door, journal, _ = journaled(learned={"critic": PrivacyCost({Event("gaussian", 3.0, rate=0.5): 1})})
    for _ in range(2):  # trained again after a restart
        door.admit(QUERY, received_query(), {})
        assert "charge training" not in journal.calls[1:], "other nodes may still refuse"
        door.ledger.charge_training(response(), {})
    assert journal.calls == ["charge training"]
    door.ledger.policy = PolicyConfig(max_queries=1)
    release(door)
    journal.calls.clear()
    with raises_refused("max_queries: 1"):
        door.admit(QUERY, received_query(1), {})
    assert journal.calls == [], "refused queries are not charged"


def test_policy_refusals_come_before_budget_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    door, _, _ = journaled()
    monkeypatch.setattr(door.budgets, "refusal_reason", lambda query: "privacy: over budget")
    assert door.refusal_reason(QUERY) == "privacy: over budget"
    assert door.refusal_reason(UPLOAD) == "outputs_only: parameters may not leave"


def test_repeated_query_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    door, _, _ = journaled()
    given: list[Any] = []

    def expected_cost(*what: Any) -> PrivacyCost:
        given.append(what)
        return PrivacyCost()

    monkeypatch.setattr(door.ledger, "_expected_cost", expected_cost)
    sent = {"x": torch.ones(2)}
    door.admit(QUERY, received_query(), sent)
    assert [sent_ for _, _, sent_ in given] == [sent]
    release(door)
    door.admit(QUERY, received_query(), sent)
    assert len(given) == 1, "the cost is not computed again"


def test_charge_is_on_disk_before_release(tmp_path: Path) -> None:
    entry_counts = []

    class Watching(ReleaseLedger):
        def hand_over(self, release: Release, tensors: Tensors) -> Tensors:
            entry_counts.append(len(entries(tmp_path)))
            return super().hand_over(release, tensors)

    with closing(AuditLog(tmp_path / FILE)) as audit:
        door = gate(audit)
        door.ledger = Watching("clinic", door.policy, audit, "run", "clinic")
        release(door)
    assert entry_counts == [1]


def test_release_has_no_graph() -> None:
    released = release(gate(), tensors={"logits": torch.ones(2, requires_grad=True) * 2})
    assert not released["logits"].requires_grad


def noisy() -> Gate:
    """Return a gate that adds noise to responses."""
    side = NodeSide({"predict_logits": replace(QUERY, depends_on_records=())}, SETTING)
    outputs, gradients = OutputsConfig(noise=1.0, bound=3.0), GradientsConfig(noise=1.0)
    privacy = NoisyOutputs(outputs=outputs, gradients=gradients)
    mechanism = PrivacyMechanism("a", privacy, side, LocalConfig(), 10, Classification(3))
    mechanism.setup_hash = "b"
    door = Gate("a", PolicyConfig(), AuditLog())
    door.ledger.budgets = RunBudgets(mechanism, door.ledger.audit, "run", "a")
    return door


def examined(door: Gate, logits: torch.Tensor, part: str) -> torch.Tensor:
    """Return the release of some logits."""
    what, name = ReceivedQuery(0, "predict_logits", "c0", "", {}), "logits" if part == "response" else "d/dx"
    return release_now(door, what, part, {name: logits}, replace(QUERY, depends_on_records=()), {})[name]


def rows_of(door: Gate) -> int:
    return len(list(door.ledger.audit.entries()))


@pytest.mark.parametrize("part", ["response", "gradient"])
def test_response_with_another_last_digit_is_charged_again(part: str) -> None:
    door, one = noisy(), torch.ones(2, 3)
    other = one.clone()
    other[1, 2] = torch.nextafter(one[1, 2], torch.tensor(2.0))
    first, again = examined(door, one, part), examined(door, one, part)
    assert torch.equal(first, again)
    assert (rows_of(door), door.ledger.audit.spending("a", ALL_RUNS).total_bytes) == (1, 24), (
        "an equal response is free"
    )
    moved = examined(door, other, part)
    assert ((moved - first).abs() > 1e-3).all(), "all noise is new"
    assert (rows_of(door), door.ledger.audit.spending("a", ALL_RUNS).total_bytes) == (2, 48), (
        "the release is logged too"
    )
    assert torch.equal(examined(door, one, part), first)
    assert torch.equal(examined(door, other, part), moved)
    assert (rows_of(door), door.ledger.audit.spending("a", ALL_RUNS).total_bytes) == (2, 48)


# --- after a restart -----------------------------------------------------------------------------


def restarted(folder: Path, **policy: Any) -> Gate:
    """Return a gate on a log's file, as a new process opens it."""
    return gate(AuditLog(folder / FILE), **policy)


def test_old_query_number_does_not_bypass_limits(tmp_path: Path) -> None:
    for number in range(2):
        release(restarted(tmp_path), received_query(number))
    door = restarted(tmp_path, max_queries=2, max_bytes=2 * 56 + 55)
    door.admit(QUERY, received_query(1), {})  # a repeated query is allowed
    release(door, received_query(1))
    assert (door.ledger.audit.spending("clinic", ALL_RUNS).total_queries, len(entries(tmp_path))) == (2, 2)
    for number in (0, 1, 2):
        with pytest.raises(QueryRefused, match="max_queries: 2"):
            door.admit(QUERY, received_query(number, "another"), {})
    door.ledger.policy = PolicyConfig(max_bytes=2 * 56 + 55)
    with pytest.raises(QueryRefused, match="max_bytes: 167 bytes"):
        release(door, received_query(0, "another"))


# --- received tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        (torch.zeros(2, 1, 8, 8).double(), torch.float32),
        (torch.zeros(2, 1, 8, 8).long(), torch.int64),
        (torch.zeros(2, 1, 8, 8).char(), torch.float64),
        (torch.zeros(2, 1, 8, 8).cfloat(), torch.float32),
        (torch.full((2, 1, 8, 8), complex("nan")).cfloat(), torch.float32),
    ],
    ids=["float64", "int64", "a scale of float64", "complex", "complex NaN"],
)
def test_scaled_tensors_are_decompressed_to_float32(x: torch.Tensor, scale: torch.dtype) -> None:
    tensors = {"x": x, "x:scale": torch.ones(2, dtype=scale)}
    with pytest.raises(DataError, match=f"tensor x {x.dtype} came with scales {scale}"):
        gate().check_tensors(ReceivedTensors("q", tensors, {"x": INPUTS}), (1, 8, 8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_compressed_inputs_are_accepted(dtype: torch.dtype) -> None:
    tensors = {"x": torch.ones(2, 1, 8, 8).to(dtype), "x:scale": torch.ones(2)}
    gate().check_tensors(ReceivedTensors("q", tensors, {"x": INPUTS}), (1, 8, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e5m2])
def test_other_float_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(QueryRefused, match=f"the server sent parameters: {dtype}"):
        gate().check_tensors(
            ReceivedTensors("q", {"parameters": torch.zeros(3).to(dtype)}, {"parameters": PARAMETERS}), ()
        )


def test_complex_numbers_are_refused() -> None:
    with raises_refused("tensors", "logits", "complex64"):
        gate().check_tensors(
            ReceivedTensors("gradient", {"logits": torch.zeros(2, 3).cfloat()}, {"logits": GRADIENTS}), ()
        )


def test_unexpected_scales_are_refused() -> None:
    maps = {"maps": torch.zeros(2, 8, 8).byte(), "maps:scale": torch.ones(2)}
    with raises_refused("tensors: maps:scale"):
        gate().check_tensors(ReceivedTensors("q", maps, {"maps": LABEL_MAPS}), (1, 8, 8))


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (torch.zeros(5, 8, 8).byte(), "max_rows: 4, and maps has 5"),
        (torch.zeros(0, 8, 8).byte(), "max_rows: 4, and maps has 0"),
        (torch.zeros(4, 8, 8).int(), r"the server sent maps: torch.int32 .4, 8, 8. .expected uint8"),
        (torch.zeros(4, 8, 9).byte(), r"the server sent maps: torch.uint8 .4, 8, 9. .expected uint8"),
        (torch.tensor(1).byte(), r"the server sent maps: torch.uint8 .. .expected uint8"),
        (torch.zeros(4, 1, 8, 8).byte(), r"the server sent maps: torch.uint8 .4, 1, 8, 8. .expected uint8"),
    ],
    ids=["too many", "none", "int32", "another size", "a number", "channels"],
)
def test_label_maps_have_input_limits(maps: torch.Tensor, message: str) -> None:
    sends = {"maps": LABEL_MAPS}
    gate(max_rows=4).check_tensors(
        ReceivedTensors("q", {"maps": torch.zeros(4, 8, 8).byte()}, sends), (1, 8, 8)
    )
    with pytest.raises(QueryRefused, match=message):
        gate(max_rows=4).check_tensors(ReceivedTensors("q", {"maps": maps}, sends), (1, 8, 8))


@pytest.mark.parametrize("rules", [TENSOR_RULES, SIMULATION_RULES], ids=["deployed", "simulation"])
def test_networks_of_the_server_have_parameter_limit(rules: Any) -> None:
    sent = {"generator": torch.zeros(60), "other": torch.zeros(41), "state": torch.zeros(9)}
    sends = {"generator": GENERATOR_PARAMETERS, "other": GENERATOR_PARAMETERS, "state": PARAMETERS}
    received = ReceivedTensors("train", sent, sends)

    def reason(limit: int) -> str | None:
        policy = PolicyConfig(max_parameters=limit)
        return first_reason(rules, TensorFacts(policy, received, 0, None, (1, 8, 8), torch.float32))

    assert (reason(101), reason(0)) == (None, None)
    assert reason(100) == "max_parameters: 100, and the sent networks have 101"


@pytest.mark.parametrize(
    ("scores", "message"),
    [(torch.ones(2, 4), r"\(2, 4\), for 3 classes"), (torch.ones(5, 3), r"\(5, 3\), for 2 inputs")],
)
def test_scores_of_another_shape_are_refused(scores: torch.Tensor, message: str) -> None:
    audit = AuditLog()
    door = gate(audit)
    door.output_shape = (3,)
    sent = {"x": torch.zeros(2, 5)}
    with pytest.raises(QueryRefused, match=rf"outputs: logits are {message}"):
        release(door, tensors={**ANSWER, "logits": scores}, sent=sent)
    assert not audit.totals.bytes
    assert set(release(door, tensors=ANSWER, sent=sent)) == set(ANSWER)
