"""Privacy budgets of a run and of the data, charged before anything is released."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, NodeDataError, QueryRefused
from fedstill.data.node_data import NodeDataConfig
from fedstill.methods.fedkd import LOGIT_RANGE
from fedstill.node.audit_entries import ALL_RUNS, ReceivedQuery
from fedstill.node.audit_log import AuditLog, Spending
from fedstill.node.folder_check import privacy_faults
from fedstill.node.gate import Gate
from fedstill.node.policy import PolicyConfig
from fedstill.node.run_budgets import RunBudgets
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.node.secure_aggregation import SumEncoder
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import DPTrainingConfig, NoPrivacy, PrivacyConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.events import Event, PrivacyCost, cost_from_dict, total_cost
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.privacy.pate import PATE, PateConfig
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.protocol.queries import Query, QueryDetails
from fedstill.tasks.classification import Classification
from tests.support.errors import raises_refused
from tests.support.node_services import release_now
from tests.support.small_world import SETTING

ROWS, EXAMPLES = 8, 100
X = {"x": torch.zeros(ROWS, 1, 4, 4)}
LOGITS = {"logits": torch.full((ROWS, 4), 2.5)}  # of 20 teachers, 5 vote for each class
# 20 steps of DP-SGD at rate 0.1
LOCAL = LocalConfig(epochs=2, batch=10)
PREDICT = Query(
    lambda node: {},
    sends={"x": "inputs"},
    releases={"logits": "logits"},
    rows=ROWS,
    depends_on_records=(),
    name="predict",
)
RANGE = Query(
    PREDICT.function,
    sends={"x": "inputs"},
    releases={"range": LOGIT_RANGE},
    depends_on_records=(),
    name="max_logit",
)
MAX_LOGIT = {"range": torch.ones(())}
VOTES = PATE(pate=PateConfig(teachers=20, noise=40.0))
ONE = Event("gaussian", 40 / 4)  # of a query with 8 inputs
TRAINED = DPSGD(training=DPTrainingConfig(noise=1.5))
STEP = Event("gaussian", 1.5, rate=0.1)
OUTPUTS = NoisyOutputs(outputs=OutputsConfig("gaussian", noise=80.0, bound=1.0))


class Node:
    """A node with one query, or two, its gate and its charges."""

    def __init__(
        self,
        config: PrivacyConfig = VOTES,
        audit: AuditLog | None = None,
        run: str = "one",
        *,
        two: bool = False,
        **change: Any,
    ) -> None:
        queries = (replace(PREDICT, **change), RANGE)
        self.query, self.run = queries[0], run
        self.audit = audit or AuditLog()
        self.side = NodeSide({query.name: query for query in queries[: 1 + two]}, SETTING)
        self.mechanism = PrivacyMechanism("clinic", config, self.side, LOCAL, EXAMPLES, Classification(4))
        self.mechanism.setup_hash = "data"
        self.gate = Gate("clinic", PolicyConfig(outputs_only=False), self.audit, run)
        self.gate.ledger.budgets = RunBudgets(self.mechanism, self.audit, run, "clinic")

    def send(self, number: int, query: Query | None = None, tensors: Any = None) -> Any:
        """Admit and release, as the request handler does."""
        received = ReceivedQuery(number, (query or self.query).name, f"c{number}", "", {})
        self.gate.admit(query or self.query, received, X)
        return release_now(self.gate, received, "response", tensors or LOGITS, query or self.query, X)

    def spent(self) -> Spending:
        return self.audit.spending("clinic", self.run)

    def count_answered(self, first: int = 0, most: int = 1000) -> int:
        """Return the number of queries before the first refusal."""
        for number in range(first, first + most):
            try:
                self.send(number)
            except QueryRefused:
                return number - first
        return most


def fit(event: Event, most: float, start: PrivacyCost | None = None) -> int:
    """Return how often an event fits into an epsilon, by counting."""
    times = 0
    while compute_epsilon(PrivacyCost({event: times + 1}) + (start or PrivacyCost()), 1e-5) <= most:
        times += 1
    return times


# --- budgets ------------------------------------------------------------------------------------------


def test_releases_never_exceed_budget() -> None:
    node = Node(replace(VOTES, epsilon=1.5))
    answered = node.count_answered()
    assert answered == fit(ONE, 1.5) > 2
    assert cost_from_dict(node.spent().run_events) == PrivacyCost({ONE: answered})
    one = {str(ONE): answered}
    counted = {"run_queries": answered, "total_queries": answered, "total_bytes": answered * 128}
    assert node.spent() == Spending(one, one, **counted)


def test_refused_query_is_not_computed_or_charged() -> None:
    node = Node(replace(VOTES, epsilon=1.5))
    answered = node.count_answered()
    spent = node.spent()
    received = ReceivedQuery(answered, "predict", "c", "", {})
    with pytest.raises(QueryRefused, match="privacy budget"):
        node.gate.admit(node.query, received, X)
    with pytest.raises(QueryRefused, match="privacy budget"):  # and again at the release
        release_now(node.gate, received, "response", LOGITS, node.query, X)
    assert node.spent() == spent
    assert node.gate.ledger.audit.spending("clinic", ALL_RUNS).total_queries == answered


def test_large_query_is_refused_for_its_cost() -> None:
    node = Node(replace(VOTES, epsilon=1.5))
    received = ReceivedQuery(0, "predict", "c", "", {})
    many = {"x": torch.zeros(2000, 1, 4, 4)}
    with pytest.raises(QueryRefused, match="privacy budget"):
        node.gate.admit(node.query, received, many)
    node.gate.admit(node.query, received, X)


def test_row_width_determines_cost_and_is_enforced() -> None:
    """Laplace noise is charged by numbers per row, which a custom method may choose."""
    config = NoisyOutputs(outputs=OutputsConfig("laplace", noise=700.0, bound=1.0))
    wide = {
        "releases": {"rows": PayloadKind("rows", category="rows")},
        "depends_on_records": ("rows",),
        "times": 3,
        "details": QueryDetails(width=16),
    }
    inputs = {"rows": torch.zeros(ROWS, 16)}
    node = Node(config, **wide)
    for number in range(3):
        node.send(number, tensors=inputs)
    assert cost_from_dict(node.spent().run_events) == total_cost(node.mechanism.run_costs())
    assert dict(node.spent().run_events) == {str(Event("laplace", 700 / (2 * 16))): 3 * ROWS}
    narrow = Node(config, **{**wide, "details": QueryDetails()})  # one number per class: 4
    with pytest.raises(NodeDataError, match=r"query predict .*\(8, 16\) .*4 numbers"):
        narrow.send(0, tensors=inputs)
    assert narrow.spent() == Spending({}, {})
    # a Gaussian charge depends on a row's norm, not on its width
    row = replace(config.outputs, distribution="gaussian")
    Node(replace(config, outputs=row), **{**wide, "details": QueryDetails()}).send(0, tensors=inputs)


def test_refusal_does_not_reveal_threshold_votes() -> None:
    """The actual cost of a release depends on the records; a refused one costs nothing."""
    pate = PateConfig(teachers=20, noise=40.0, threshold=5.0, threshold_noise=40.0)
    node = Node(replace(VOTES, pate=pate, epsilon=3.0))
    many = {"logits": LOGITS["logits"].repeat(1000, 1)}  # more than the query declares
    rules = set()
    for number in range(4):
        with pytest.raises(QueryRefused) as refused:
            node.send(number, tensors=many)
        rules.add(refused.value.rule)
    assert len(rules) == 1
    assert not node.spent().run_events
    node.send(5)


def test_total_budget_holds_over_runs() -> None:
    audit, config = AuditLog(), replace(VOTES, epsilon=1.5, total_epsilon=2.0)
    first = Node(config, audit, "one").count_answered()
    assert first == fit(ONE, 1.5), "the budget of a run is smaller than the total"
    second = Node(config, audit, "two")
    assert second.count_answered() == fit(ONE, 2.0) - first > 0
    assert second.spent().total_events == {str(ONE): fit(ONE, 2.0)}
    assert Node(config, audit, "three").count_answered() == 0
    with raises_refused("privacy budget", "epsilon 2 "):
        Node(config, audit, "three").send(0)


@pytest.mark.parametrize(("sizes", "holds"), [((1, 4), False), ((4, 1), False), ((4, 4), True)])
def test_charges_in_another_unit_block_budget(sizes: tuple[int, int], holds: bool) -> None:
    """Charges for a record do not protect a patient; no factor corrects this for all mechanisms."""
    audit = AuditLog()
    first, second = (replace(VOTES, group_size=size, epsilon=9.0, total_epsilon=9.0) for size in sizes)
    Node(first, audit, "one").send(0)
    reason = Node(second, audit, "two").gate.refusal_reason(PREDICT)
    assert (reason is None) == holds
    if not holds:
        assert "protect other units than privacy.group_size" in str(reason)
        with raises_refused("privacy budget", "other units"):
            Node(second, audit, "two").send(0)
    Node(replace(second, total_epsilon=math.inf), audit, "three").send(0)
    mixed = Node(replace(second, total_epsilon=math.inf), audit, "one").gate.refusal_reason(PREDICT)
    assert (mixed is None) == holds  # not in one run either


def test_run_without_guarantee_is_refused_at_first_query() -> None:
    node = Node(replace(VOTES, epsilon=3.0), two=True)
    assert str(node.gate.refusal_reason(PREDICT)).endswith(", in query max_logit")
    assert Node(replace(VOTES, epsilon=3.0)).gate.refusal_reason(PREDICT) is None


def test_resumed_run_is_not_counted_twice() -> None:
    audit, most = AuditLog(), fit(ONE, 1.5)
    config = replace(VOTES, epsilon=1.5, total_epsilon=1.5)
    first = Node(config, audit, times=most)
    assert first.count_answered(most=most - 1) == most - 1
    again = Node(config, audit, times=most)
    assert again.gate.refusal_reason(PREDICT) is None
    assert again.count_answered(most - 1) == 1
    other = Node(config, audit, run="two", times=1)
    assert "budget" in str(other.gate.refusal_reason(PREDICT))


# --- charges of the first release ---------------------------------------------------------------------


def test_training_is_charged_once_and_before_the_first_release() -> None:
    audit = AuditLog()
    node = Node(TRAINED, audit)
    assert node.spent().run_events == {}, "nothing has been released"
    for number in range(3):
        node.send(number)
    assert node.spent().run_events == {str(STEP): 20}
    rows = list(audit.entries())
    assert [(row["part"], row["number"]) for row in rows] == [
        ("training", -1),
        ("response", 0),
        ("response", 1),
        ("response", 2),
    ]
    assert rows[0]["cost"] == {str(STEP): 20}
    assert all(row["cost"] == {} and not row["no_guarantee"] for row in rows[1:])
    Node(TRAINED, audit).send(3)  # the same run after a restart
    assert node.spent().run_events == {str(STEP): 20}
    other = Node(TRAINED, audit, "two")
    other.send(0)
    assert (other.spent().run_events, other.spent().total_events) == ({str(STEP): 20}, {str(STEP): 40})
    assert (other.spent().run_queries, other.spent().total_queries) == (1, 5)


def test_unaffordable_training_blocks_releases() -> None:
    total = compute_epsilon(PrivacyCost({STEP: 20}), 1e-5)
    node = Node(replace(TRAINED, epsilon=total * 0.99))
    with pytest.raises(QueryRefused, match="privacy budget"):
        node.send(0)
    received = ReceivedQuery(0, "predict", "c0", "", {})
    with pytest.raises(QueryRefused, match="privacy budget"):
        release_now(node.gate, received, "response", LOGITS, node.query, X)
    assert node.spent() == Spending({}, {})
    audit, enough = AuditLog(), replace(TRAINED, epsilon=total * 1.01)
    assert Node(enough, audit).count_answered(most=3) == 3
    assert Node(enough, audit).count_answered(3, most=3) == 3, "training is not charged again after a resume"


# --- idempotence --------------------------------------------------------------------------------------


def test_repeated_release_is_allowed_after_spent_budget() -> None:
    audit = AuditLog()
    node = Node(replace(VOTES, epsilon=1.5), audit)
    first_releases = [node.send(number) for number in range(fit(ONE, 1.5))]
    # after a restart
    again = Node(replace(VOTES, epsilon=1.5), audit)
    received = ReceivedQuery(0, "predict", "c0", "", {})
    released = release_now(again.gate, received, "response", LOGITS, again.query, X)
    assert torch.equal(released["logits"], first_releases[0]["logits"])
    assert again.spent() == node.spent()


def test_equal_noised_release_of_another_value_is_charged() -> None:
    node, received, one = Node(OUTPUTS), ReceivedQuery(0, "predict", "c0", "", {}), torch.full((ROWS, 4), 0.1)
    close = one.clone()
    close[0, 0] = torch.nextafter(one[0, 0], torch.tensor(9.0))
    finish = QueryDetails(postprocess=lambda response, sent: {"logits": torch.zeros(1)})
    same = replace(node.query, details=finish)
    for z in (one, close, one):
        release_now(node.gate, received, "response", {"logits": z}, same, X)
    assert list(node.spent().run_events.values()) == [2]


# --- charges of training for a query ---------------------------------------------------------------

LEARNING = {"times": 3, "span": lambda sent: Span(0, 1, 4)}  # 5 of 20 steps
CRITIC = Event("gaussian", 2.0, rate=ROWS / EXAMPLES)


def test_equal_responses_have_different_hashes() -> None:
    """Under masks, equal hashes would show a server where a node's network is not linear."""
    node = Node(TRAINED)
    SumEncoder(node.gate)

    def release_hash_of(number: int, part: str = "response") -> str:
        received = ReceivedQuery(number, node.query.name, f"c{number}", "", {})
        release_now(node.gate, received, part, LOGITS, node.query, X)
        return str(node.gate.release_cost(number, part).release_hash)

    hashes = [
        release_hash_of(0),
        release_hash_of(1),
        release_hash_of(0, "gradient"),
        release_hash_of(1, "gradient"),
    ]
    assert len({*hashes}) == 4
    assert release_hash_of(1) == hashes[1], "an equal response has the same hash"


def admitted(node: Node, number: int = 0, content_hash: str = "c0", history_hash: str = "") -> None:
    received = ReceivedQuery(number, "predict", content_hash, history_hash, {})
    release = node.gate.admit(node.query, received, X)
    node.gate.ledger.charge_training(release, X)


def charged(node: Node) -> list[tuple[str, str, int, dict[str, int]]]:
    return [(row["query"], row["part"], row["number"], row["cost"]) for row in node.audit.entries()]


def test_training_is_charged_at_admission() -> None:
    node = Node(replace(TRAINED, critic=DPTrainingConfig(noise=2.0)), trains=("critic",), **LEARNING)
    node.side = replace(node.side, initial_training=None)
    admitted(node)
    first, own = charged(node)
    assert first == ("training", "training", -1, {str(STEP): 20})
    assert own == ("predict", "training", 0, {str(STEP): 5, str(CRITIC): 1})
    assert node.gate.ledger.audit.traffic_totals() == AuditLog().traffic_totals(), "nothing has been released"
    for _ in range(3):  # regardless of the outcome
        admitted(node)
    assert len(charged(node)) == 2
    node.send(0)
    assert charged(node)[2:] == [("predict", "response", 0, {})], "the release has no further cost"
    node.send(0)
    assert len(charged(node)) == 3
    for other in ({"number": 1}, {"content_hash": "c1"}, {"history_hash": "c0"}):
        admitted(node, **other)  # type: ignore[arg-type]
    assert [row[3] for row in charged(node)[3:]] == [own[3]] * 3


def test_unaffordable_training_does_not_run() -> None:
    total = compute_epsilon(PrivacyCost({STEP: 20 + 2 * 5}), 1e-5)
    node = Node(replace(TRAINED, epsilon=1.01 * total), **{**LEARNING, "times": 0})
    for number in range(2):
        admitted(node, number)
    rows = charged(node)
    with pytest.raises(QueryRefused, match="privacy budget"):
        admitted(node, 2)
    assert charged(node) == rows


def test_query_without_training_charges_initial_training_only() -> None:
    """Even a failure reveals something about the training."""
    for config, rows in (
        (VOTES, []),
        (TRAINED, [("training", "training", -1, {str(STEP): 20})]),
        (OUTPUTS, []),
    ):
        node = Node(config)
        admitted(node)
        assert charged(node) == rows


# --- releases without a guarantee ---------------------------------------------------------------------


def test_release_without_guarantee_is_counted_and_refused_under_budget() -> None:
    node = Node(VOTES)
    node.send(0, RANGE, MAX_LOGIT)
    assert node.spent() == Spending({}, {}, 1, 1, 1, 1, 4)
    for budget in ("epsilon", "total_epsilon"):
        strict = Node(replace(VOTES, **{budget: 1.5}))
        with raises_refused("privacy", "logit range"):
            strict.send(0, RANGE, MAX_LOGIT)
        with raises_refused("privacy budget", "any guarantee"):
            release_now(
                strict.gate, ReceivedQuery(0, "max_logit", "c", "", {}), "response", MAX_LOGIT, RANGE, X
            )
        assert strict.spent() == Spending({}, {})


def test_release_without_guarantee_voids_budget() -> None:
    audit = AuditLog()
    for number, run in enumerate(("one", "one", "zero")):
        Node(VOTES, audit, run).send(number, RANGE, MAX_LOGIT)

    def refusal_rule(config: PrivacyConfig, run: str) -> str:
        with pytest.raises(QueryRefused) as refused:
            Node(config, audit, run).send(9)
        return refused.value.rule

    same = refusal_rule(replace(VOTES, epsilon=1.5), "one")
    assert same == (
        "privacy budget: the budget of epsilon 1.5 at delta 1e-05 cannot hold, as 2 releases left without "
        "any guarantee before it was set: start a new run, or set privacy.epsilon = inf"
    )
    # the total budget includes the other run
    for config in (replace(VOTES, total_epsilon=1.5), replace(VOTES, epsilon=1.5)):
        rule = refusal_rule(config, "two")
        assert "cannot hold, as releases left without any guarantee" in rule
        assert "fedstill audit show lists the runs" in rule
        assert "zero" not in rule  # the name of another server's run, which must not be revealed
    separate = replace(VOTES, epsilon=1.5, total_epsilon=math.inf)
    assert Node(separate, audit, "two").count_answered(most=1) == 1, "each run has its own budget"


# --- the budget of all runs -------------------------------------------------------------------------------


def test_total_budget_defaults_to_run_budget() -> None:
    assert NoPrivacy(epsilon=3.0, delta=1e-6).total_budget == (3.0, 1e-6)
    assert NoPrivacy(epsilon=3.0, total_epsilon=8.0).total_budget == (8.0, 1e-5)
    assert NoPrivacy(epsilon=3.0, total_delta=1e-7).total_budget == (3.0, 1e-7)
    assert NoPrivacy(epsilon=3.0, total_epsilon=math.inf).total_budget == (math.inf, 1e-5)
    assert NoPrivacy().total_budget == (math.inf, 1e-5)


@pytest.mark.parametrize(
    ("name", "value"), [("total_epsilon", 0.0), ("total_epsilon", math.nan), ("total_delta", 1.0)]
)
def test_rejects_invalid_budgets(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"privacy.{name}"):
        NoPrivacy(**{"epsilon": 3.0, name: value})  # type: ignore[arg-type]


def test_renamed_run_gains_no_budget() -> None:
    """The server names runs: epsilon spent in one run is spent for all."""
    one, audit = replace(VOTES, epsilon=1.5), AuditLog()
    first = Node(one, audit, "one").count_answered()
    assert first > 0
    assert [Node(one, audit, run).count_answered() for run in ("two", "three")] == [0, 0]
    for most in (3.0, math.inf):
        audit, config = AuditLog(), replace(one, total_epsilon=most)
        assert Node(config, audit, "one").count_answered() == first
        second = Node(config, audit, "two").count_answered()
        assert second > 0
    assert second == first, "inf: each run may spend epsilon"


@pytest.mark.parametrize(
    ("run", "all_runs"),
    [
        ((math.inf, 1e-5), (2.0, 1e-6)),
        ((2.0, 1e-6), (math.inf, 1e-5)),
        ((4.0, 1e-5), (2.0, 1e-5)),
        ((2.0, 1e-5), (4.0, 1e-5)),
        ((2.0, 1e-4), (2.2, 1e-9)),  # the larger epsilon needs more noise, as its delta is so small
    ],
)
def test_noise_is_calibrated_to_both_budgets(run: tuple[float, float], all_runs: tuple[float, float]) -> None:
    """Little more noise than needed: one of the budgets is nearly used up."""
    config = PATE(epsilon=run[0], delta=run[1], total_epsilon=all_runs[0], total_delta=all_runs[1])
    cost = total_cost(Node(config, times=5).mechanism.run_costs())
    assert cost
    used = [compute_epsilon(cost, delta) / most for most, delta in (run, all_runs)]
    assert 0.97 < max(used) <= 1


def test_impossible_calibration_names_smaller_budget() -> None:
    count = Query(
        PREDICT.function,
        releases={"counts": "label counts"},
        times=1,
        depends_on_records=("counts",),
        name="count",
    )
    sides = NodeSide({"count": count, "predict": replace(PREDICT, times=5)}, SETTING)
    for name, change in (("epsilon", {"epsilon": 0.01}), ("total_epsilon", {"total_epsilon": 0.01})):
        config = PATE(**{"epsilon": 8.0, **change})
        with pytest.raises(ArgumentError, match=rf"privacy\.{name} = 0\.01"):
            PrivacyMechanism(
                "clinic", config, sides, LocalConfig(), 100, Classification(4)
            )  # the counts alone cost 0.1


def test_total_delta_above_one_record_is_a_fault() -> None:
    images = torch.zeros(60, 1, 4, 4)
    data = TensorData(images, torch.zeros(60, dtype=torch.long))
    one, other = PATE(epsilon=3.0, total_delta=0.02), PATE(epsilon=3.0)
    (fault,) = privacy_faults(one, data, None)
    assert fault.startswith("invalid privacy.total_delta = 0.02 (expected well below 1 / 60")
    assert privacy_faults(other, data, None) == []
    (fault,) = privacy_faults(replace(other, delta=0.02), data, None)  # reported once
    assert fault.startswith("invalid privacy.delta = 0.02")


def test_volume_slices_need_group_protection() -> None:
    """Removing a slice changes the scaling of the other slices of its volume."""
    images, none = torch.zeros(60, 1, 4, 4), torch.zeros(60, dtype=torch.long)
    by_patient = TensorData(images, none, torch.arange(60) // 6)
    by_height = replace(by_patient, groups=torch.arange(60) % 6)
    nifti = NodeDataConfig("nifti", "scans")
    for data, group, size in (
        (replace(by_patient, groups=None), "", 1),
        (by_patient, "patient", 1),
        (by_height, "slice", 10),
    ):
        own = replace(nifti, group=group)
        assert privacy_faults(PATE(epsilon=3.0, group_size=size), data, None) == []
        (fault,) = privacy_faults(PATE(epsilon=3.0, group_size=size), data, None, own)
        assert fault.startswith(f"invalid privacy.group_size = {size} (expected 2 or more, with data.group")
    own = replace(nifti, group="patient")
    assert privacy_faults(PATE(epsilon=3.0, group_size=6), by_patient, None, own) == []
    assert privacy_faults(PATE(epsilon=3.0), replace(by_patient, groups=torch.arange(60)), None, own) == []


def test_noise_is_calibrated_to_total_budget_alone() -> None:
    assert privacy_faults(PATE(total_epsilon=3.0), None, None) == []
    (fault,) = privacy_faults(PATE(), None, None)
    assert "privacy.epsilon = inf" in fault
