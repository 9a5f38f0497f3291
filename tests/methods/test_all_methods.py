"""Checks of every method: equal metrics on both engines and after a resume, custom modules, releases.

The audit log must show only declared payload kinds, and methods must be refused before any training. Methods
that are added to ``METHODS`` are covered automatically; ``digits_world.TINY`` makes them fast.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstill
from fedstill.core.compute import EngineConfig, Workers
from fedstill.core.config_tables import to_table, unflatten
from fedstill.core.errors import ArgumentError, FedstillError, MethodRefused, QueryRefused
from fedstill.core.options import field_docs
from fedstill.core.run_writer import RunWriter
from fedstill.data.data_spec import DataSpec
from fedstill.federation.federation import Federation
from fedstill.models import build
from fedstill.models.module_utils import to_vector
from fedstill.node.audit_entries import ALL_RUNS
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, Method
from fedstill.protocol.run_plan import RunPlan, describe, public_fingerprint
from fedstill.runs.build import Setting
from fedstill.runs.simulation import Simulation
from fedstill.tasks.classification import ClassificationConfig
from tests.support import digits_world
from tests.support.audit_logs import releases
from tests.support.digits_world import CLASSES, LOCAL, SHAPE, config_of, public, some
from tests.support.runs import node_data, node_models

pytestmark = pytest.mark.usefixtures("steady_adam", "one_thread")

ALIKE = ("mlp:12",) * 3
MIXED = ("mlp:12", "small-cnn:4", "mlp:12")
NEAR = 1e-4  # tolerated difference of weights between the two engines
# Further options of a method that change its queries or the location of its parts.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"rounds": 4, "participation": 0.67}],
    "fediod": [{"importance": "realness", "student_inputs": "fresh"}],
    "fedkd": [
        {"predictions": 2},
        {"labeled": True, "levels": 0},
    ],
    "fedmd": [{"public_epochs": 1, "weights": "counts", "distance": "kl"}],
    "fedmd-cg": [{"aggregation": "ave*", "participation": 0.67}, {"aggregation": "kd", "diversity": "div0"}],
    "fedgen": [{"shares": "model"}],
    "fedcg": [{"aggregation": "kdc"}],
    "fl-mrcm": [{"target": "node-2", "participation": 0.67}],
    "fedad": [{"weights": "equal"}],
    "dense": [{"models": "uploaded", "weights": "counts"}],
    "fedhydra": [{"models": "uploaded"}],
    "dsfl": [{"cache_rounds": 1, "beta": 1.5, "weights": "counts"}],
    "fd": [{"rounds": 4, "participation": 0.67}],
    "fedproto": [{"rounds": 4, "participation": 0.67}],
    "fens": [{"aggregator": "weights", "server": "fedavg", "lr": 0.1, "held_out": 0.0, "local_steps": 3}],
}


# Methods for label maps, tables and feature vectors, which do not run on these data.
OTHERS = ("asyndgan", "fediod-maps", "column-sums", "fedcgs", "fedpft")
CASES = [
    pytest.param(name, options, id=" ".join([name, *(f"{key}={value}" for key, value in options.items())]))
    for name in METHODS
    if name not in OTHERS
    for options in ({}, *VARIANTS.get(name, []))
]
NAMES = [name for name in METHODS if name not in OTHERS]
ENGINES: tuple[Any, ...] = ("one-by-one", "stacked")


class Own(nn.Module):
    """Custom module that is no Sequential, with buffers and a norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Sequential(
            nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(27, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, 1, 8, 8)`` to ``(B, 10)``."""
        out: torch.Tensor = self.head(self.extractor(x))
        return out


def network(spec: str, *names: str | int) -> nn.Module:
    if spec == "own":
        torch.manual_seed(sum(map(ord, "".join(map(str, names)))))
        return Own()
    return build(spec, SHAPE, CLASSES, 0, *names)


def setting(name: str, options: dict[str, Any], specs: tuple[str, ...] = ALIKE, **changes: Any) -> Setting:
    networks = {
        "models": [network(spec, index) for index, spec in enumerate(specs)],
        "student": network(specs[0], "student"),
    }
    return digits_world.setting(name, options, **{**networks, **changes})


@dataclasses.dataclass
class Ran:
    """One run and its metrics, except those that differ between equal runs (seconds, engine)."""

    setting: Setting
    experiment: Simulation
    metrics: dict[str, Any]

    def networks(self) -> list[nn.Module]:
        return [self.experiment.setting.student, *(node.model for node in self.setting.nodes)]


def ran(one: Setting, out: Path | None = None) -> Ran:
    experiment = Simulation(one)
    metrics = experiment.run(out)
    return Ran(one, experiment, {key: metrics[key] for key in metrics if key not in ("seconds", "engine")})


def untrained(one: Setting) -> Ran:
    """Return a run that has not started, with its student, which some methods make."""
    return Ran(one, Simulation(one), {})


@cache
def unbroken(name: str, options: tuple[tuple[str, Any], ...], specs: tuple[str, ...] = ALIKE) -> Ran:
    """Return an uninterrupted run, one node after the other. It is shared between tests: do not change it."""
    return ran(setting(name, dict(options), specs))


def plain(name: str, options: dict[str, Any], specs: tuple[str, ...] = ALIKE) -> Ran:
    return unbroken(name, tuple(options.items()), specs)


def same_networks(one: Ran, other: Ran, rtol: float = 0.0, atol: float = 0.0) -> None:
    for mine, theirs in zip(one.networks(), other.networks(), strict=True):
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[key], value, rtol=rtol, atol=atol, msg=key)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, as parallel nodes do, so that runs are bit-identical."""
    here = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(here)


# --- equal metrics ---------------------------------------------------------------------------------


@pytest.mark.sample(22)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_passes_the_checks_for_custom_methods(name: str, options: dict[str, Any]) -> None:
    """Check declared times and rows, equal runs with one seed, stacked nodes, resumed runs, hidden labels."""
    fedstill.check_method(config_of(name, **options), partial(setting, name, options))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_parallel_nodes_give_the_metrics_of_sequential_nodes(name: str) -> None:
    """Bit-identical, with equal traffic and audit log. Use of the global RNG would raise an error."""
    one, alone = setting(name, {}), plain(name, {})
    experiment = Simulation(one)
    experiment.compute.workers = Workers(2)
    metrics = experiment.run()
    at_once = Ran(one, experiment, {key: metrics[key] for key in alone.metrics})
    assert at_once.metrics == alone.metrics
    same_networks(at_once, alone)
    assert experiment.audit.traffic_totals() == alone.experiment.audit.traffic_totals()


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_another_seed_gives_other_weights(name: str, options: dict[str, Any]) -> None:
    """Equal seeds give equal runs: see ``test_resumed_run_reaches_equal_metrics``."""
    first, other = plain(name, options), ran(setting(name, options, seed=1))
    moved = [
        (mine.state_dict()[key] != value).any()
        for mine, theirs in zip(other.networks(), first.networks(), strict=True)
        for key, value in theirs.state_dict().items()
    ]
    assert any(moved)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_evaluated_model_learns(name: str, options: dict[str, Any]) -> None:
    """Every evaluated network changes its weights; otherwise equal metrics would show nothing."""
    one = plain(name, options)
    fresh = untrained(setting(name, options))
    central = METHODS[name].evaluated_model
    pairs = list(zip(one.networks(), fresh.networks(), strict=True))
    evaluated = pairs[1:] if central in ("nodes", "ensemble") else pairs[:1]
    for mine, first in evaluated:
        assert any((mine.state_dict()[key] != value).any() for key, value in first.state_dict().items())
        assert all(value.isfinite().all() for value in mine.state_dict().values())


# --- interrupted runs ------------------------------------------------------------------------------


class Moments:
    """Records the responses and checkpoints of a run, and stops it after a number of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.last = math.inf
        self.counted = ""
        call, save = Federation.query, RunWriter.save

        def record_query(federation: Federation, query: str, **given: Any) -> Any:
            responses = call(federation, query, **given)
            self.happened(f"asked {query}")
            return responses

        def saved(records: RunWriter, state: Any, since: float | None = None) -> None:
            save(records, state, since)
            self.happened("saved")

        monkeypatch.setattr(RunWriter, "is_save_due", lambda records: True)
        monkeypatch.setattr(RunWriter, "save", saved)
        monkeypatch.setattr(Federation, "query", record_query)
        monkeypatch.setattr("fedstill.runs.group_training.CHUNK", 3)

    def happened(self, what: str) -> None:
        self.events.append(what)
        if sum(self.counted in one for one in self.events) >= self.last:
            raise KeyboardInterrupt

    def stop(self, after: float = math.inf, counted: str = "") -> None:
        """Stop after this number of further events whose name contains ``counted``."""
        self.events, self.last, self.counted = [], after, counted


def stopped(moments: Moments, after: int, one: Setting, out: Path) -> None:
    moments.stop(after)
    with pytest.raises(KeyboardInterrupt):
        Simulation(one).run(out)
    moments.stop()


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_resumed_run_reaches_equal_metrics(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop between two rounds, and within a round: after an unsaved query of the second half."""
    whole = plain(name, options)
    moments = Moments(monkeypatch)
    (tmp_path / "count").mkdir()
    counted = ran(setting(name, options), tmp_path / "count")
    assert counted.metrics == whole.metrics  # equal, as the seed is the same and saving changes nothing
    same_networks(counted, whole)
    events = list(moments.events)
    saves = [at for at, what in enumerate(events, 1) if what == "saved"]
    queries = [
        at for at, what in enumerate(events, 1) if what != "saved" and any(at > save for save in saves)
    ]
    ends = {saves[(len(saves) - 1) // 2]} | ({queries[3 * len(queries) // 4]} if queries else set())
    for end in sorted(ends):
        out = tmp_path / f"after {end}"
        out.mkdir()
        stopped(moments, end, setting(name, options), out)
        back = ran(setting(name, options), out)
        what = f"stopped after {events[end - 1]} ({end} of {len(events)})"
        assert back.metrics == whole.metrics, what
        same_networks(back, whole)
        assert len(releases(out)) == len(releases(tmp_path / "count")), what


# --- custom networks --------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_custom_modules_are_trained_in_place_on_both_engines(name: str) -> None:
    """Also checks batch norm statistics and batch counts, with a smaller last batch."""
    local = dataclasses.replace(LOCAL, optimizer="sgd", lr=0.05)
    alone, stacked = (
        setting(name, {}, ("own",) * 3, engine=EngineConfig(batching=engine), local=local)
        for engine in ENGINES
    )
    assert distilled_in_place(stacked)["bytes"] == distilled_in_place(alone)["bytes"]
    for mine, theirs in zip(
        [stacked.student, *node_models(stacked)], [alone.student, *node_models(alone)], strict=True
    ):
        for key, value in theirs.state_dict().items():
            assert value.isfinite().all()
            torch.testing.assert_close(mine.state_dict()[key], value, rtol=0.0, atol=5e-3, msg=key)
            assert not key.endswith("running_var") or (value > 0).all()
            assert not key.endswith("num_batches_tracked") or value >= 0


def distilled_in_place(one: Setting) -> dict[str, Any]:
    """Return the metrics of ``fedstill.distil``, which trains the given networks in place."""
    first = copy.deepcopy([one.student.state_dict(), *(model.state_dict() for model in node_models(one))])
    outcome = fedstill.distil(
        node_data(one),
        node_models(one),
        one.student,
        one.test,
        CLASSES,
        method=one.spec.method,
        local=one.spec.nodes.local,
        engine=one.spec.engine,
        policies=[node.policy for node in one.nodes],
        public=None if one.public is None else some(400, 37),
    )
    central = type(one.spec.method).evaluated_model
    makes_student = type(one.spec.method).make_student is not Method.make_student
    assert (outcome.student is one.student) == (central == "student" and not makes_student)
    assert (outcome.student is None) == (central != "student")
    networks = [one.student, *node_models(one)]
    moved = [
        any((network.state_dict()[key] != value).any() for key, value in old.items())
        for network, old in zip(networks, first, strict=True)
    ]
    assert any(moved)
    if central != "virtual":  # in virtual methods the server has at most a part of a student
        assert moved[0] == (central == "student" and not makes_student)
    for network in networks:
        assert type(network) is Own
        assert network(one.test.inputs[:2]).shape == (2, CLASSES)
    if outcome.student is not None:  # the returned student is the evaluated one
        right = outcome.student.eval()(one.test.inputs).argmax(1) == one.test.targets
        assert outcome.result["accuracy"] == pytest.approx(100 * right.double().mean().item(), abs=0.01)
    return outcome.result


@cache
def in_float32(name: str, local: LocalConfig) -> Ran:
    return ran(setting(name, {}, local=local))


@pytest.mark.sample(6)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_reaches_the_weights_of_float32(name: str, engine: Any) -> None:
    """Autocast caches cast weights: a node that trains while it responds must not use outdated ones.

    The distance to the float32 weights is small, compared with the distance from the initial weights.
    """
    local = LocalConfig(epochs=20, batch=16, optimizer="sgd", lr=0.02, lr_end=0.02)
    begun, full = untrained(setting(name, {})).networks(), in_float32(name, local)
    low = ran(setting(name, {}, local=local, engine=EngineConfig(batching=engine, precision="bfloat16")))
    for mine, theirs, start in zip(low.networks(), full.networks(), begun, strict=True):
        moved, difference = (to_vector(other) - to_vector(theirs) for other in (start, mine))
        assert difference.norm() <= 0.2 * moved.norm()
        assert all(value.dtype == torch.float32 for value in mine.parameters())


# --- releases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES)
def test_audit_log_holds_only_declared_kinds(name: str, options: dict[str, Any]) -> None:
    one = plain(name, options)
    side = one.experiment.side
    kinds = one.metrics["bytes"]["by_kind"]
    up = {kind for kind, size in kinds.items() if size["up"]}
    down = {kind for kind, size in kinds.items() if size["down"]}
    assert up <= set(side.released_kinds())
    assert down <= {kind for query in side.queries.values() for kind in query.sends.values()} | {"gradients"}
    assert one.metrics["releases"] == sorted(side.released_kinds())
    # A declared but unused kind would make policies refuse the method needlessly.
    queried = {name for name, times in one.metrics["queries_by_name"].items() if times}
    released = {kind for name in queried for kind in side.queries[name].releases.values()}
    assert released <= up


@pytest.mark.parametrize(("name", "options"), CASES)
def test_number_of_queries_equals_declaration(name: str, options: dict[str, Any]) -> None:
    """A node with a query limit uses this number to refuse a run in advance."""
    one = plain(name, options)
    declared = {query.name: query.times for query in one.experiment.side.queries.values() if query.times}
    sent_counts = one.metrics["queries_by_name"]
    assert set(sent_counts) <= set(declared)
    for node in one.experiment.nodes:
        assert one.experiment.audit.spending(node.name, ALL_RUNS).total_queries <= sum(declared.values())
    if "participation" not in options and name != "centralized":
        if name == "fedhydra" and "predict_class" in sent_counts:  # queries one node after the other
            sent_counts = {**sent_counts, "predict_class": sent_counts["predict_class"] // 3}
        assert sent_counts == declared
        # fl-mrcm queries its target differently
        for node in one.experiment.nodes if name != "fl-mrcm" else ():
            assert one.experiment.audit.spending(node.name, ALL_RUNS).total_queries == sum(declared.values())


@pytest.mark.parametrize(("name", "options"), CASES)
def test_no_response_is_larger_than_approved(name: str, options: dict[str, Any]) -> None:
    one = plain(name, options)
    given = one.setting.public
    plan = RunPlan(
        "run",
        to_table(one.setting.spec.method),
        DataSpec(ClassificationConfig(), tuple(map(str, range(CLASSES))), SHAPE, (0.5,), (0.5,)),
        public=public_fingerprint(given),
    )
    queries = describe(plan, given).queries
    sizes: Counter[tuple[str, int, str]] = Counter()
    for entry in one.experiment.audit.entries():
        sizes[entry["node"], entry["number"], entry["query"]] += sum(entry["up"].values())
    for (_, _, query), size in sizes.items():
        assert size <= (queries[query]["bytes"] or size)


def refused(one: Setting, kind: type[FedstillError]) -> FedstillError:
    """Return the error of a refusal at construction, before any network changes."""
    networks = [one.student, *node_models(one)]
    first = copy.deepcopy([network.state_dict() for network in networks])
    with pytest.raises(kind) as caught:
        Simulation(one)
    for network, old in zip(networks, first, strict=True):
        assert all(torch.equal(network.state_dict()[key], value) for key, value in old.items())
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.sample(15)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_outputs_only_gate_refuses_other_kinds_before_training(name: str, options: dict[str, Any]) -> None:
    leaves = plain(name, options).experiment.side.released_kinds()
    released = {kind for kind in leaves if not kind.is_output}
    policies = [PolicyConfig(outputs_only=False), PolicyConfig(outputs_only=True), PolicyConfig()]
    if not released:
        assert ran(setting(name, options, policies=policies)).metrics == plain(name, options).metrics
        return
    error = refused(setting(name, options, policies=policies), QueryRefused)
    assert isinstance(error, QueryRefused)
    assert error.node == "node-1"
    assert re.search("outputs_only: .* may not leave", error.rule)
    assert any(kind in error.rule for kind in released)


# --- requirements of methods ------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_mixed_architectures_run_or_are_refused_with_node_and_reason(
    name: str, options: dict[str, Any]
) -> None:
    method: Method = METHODS[name]
    one = setting(name, options, MIXED)
    if not one.spec.method.needs().same_architecture:
        outcome = ran(one)
        models = [node["model"] for node in outcome.metrics["nodes"]]
        assert models == ["MLP", "SmallCNN", "MLP"]  # also if the method splits them
        stacked = ran(setting(name, options, MIXED, engine=EngineConfig(batching="stacked")))
        for mine, theirs in zip(stacked.networks(), outcome.networks(), strict=True):
            outputs, expected = (model.eval()(one.test.inputs) for model in (mine, theirs))
            torch.testing.assert_close(outputs, expected, rtol=0.0, atol=NEAR)
        return
    error = refused(one, MethodRefused)
    assert isinstance(error, MethodRefused)
    assert (error.method, error.node) == (method.title, "node-1")
    assert "architecture" in error.reason
    assert all(part in str(error) for part in (method.title, "node-1", error.reason))


@pytest.mark.parametrize("name", NAMES)
def test_rejects_student_of_another_architecture_if_all_must_be_equal(name: str) -> None:
    one = setting(name, {}, student=network("mlp:9", "student"))
    needs = one.spec.method.needs()
    if needs.same_architecture or needs.student_architecture:
        refused(one, MethodRefused)
    else:
        Simulation(one)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_rejects_missing_public_data_or_labels_if_needed(name: str, options: dict[str, Any]) -> None:
    method = METHODS[name]
    needs = config_of(name, **options).needs()
    if needs.public or needs.public_labels:
        error = refused(setting(name, options, public=None), MethodRefused)
        assert method.title in str(error)
        assert "public" in str(error)
    else:
        Simulation(setting(name, options, public=None))
    unlabeled = setting(name, options, public=dataclasses.replace(public(), labels=None))
    if needs.public_labels:
        assert "labels" in str(refused(unlabeled, MethodRefused))
    else:
        Simulation(unlabeled)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", NAMES)
def test_rejects_unsplittable_network_if_models_must_be_split(name: str) -> None:
    class Whole(nn.Linear):
        """Model of a single layer."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Map ``(B, 1, 8, 8)`` to ``(B, 10)``."""
            return super().forward(x.flatten(1))

    whole = [Whole(math.prod(SHAPE), CLASSES) for _ in range(4)]
    one = setting(name, {}, models=whole[:3], student=whole[3])
    if one.spec.method.needs().split_models:
        assert "cannot be split" in str(refused(one, FedstillError))
    else:
        ran(one)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", NAMES)
def test_runs_with_a_single_node(name: str) -> None:
    one = setting(name, {})
    alone = dataclasses.replace(one, nodes=one.nodes[:1])
    assert len(ran(alone).metrics["nodes"]) == 1


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fedad", "attention", math.inf),
        ("fediod", "generator.width", 1),
        ("fediod", "steps", 0),
        ("fediod", "conf", math.inf),
        ("fediod", "tau", 0.0),
        ("fediod", "student.memory", 15),  # smaller than a batch
        ("fedkd", "levels", -1),
        ("fedkd", "gamma", 0.0),
        ("fedkd", "z_max", -1.0),
        ("fedkd", "predictions", 0),
        ("fedmd", "rounds", 0),
        ("fedmd", "initial_rounds", -1),
        ("fedmd", "distance", "l3"),
    ],
)
def test_error_names_the_invalid_option(name: str, option: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"invalid method\.{option} = .* \(expected ") as caught:
        config_of(name, **unflatten({option: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", METHODS.builtin)
def test_help_of_each_option_begins_with_a_word(name: str) -> None:
    """Help begins with words; the papers' symbols follow in parentheses."""
    symbolic = r"[A-Z][,:]|[A-Za-z]+_|(lambda|beta|pi|omega|q|S|N|P|D)\b"
    assert {key: text for key, text in field_docs(METHODS[name]).items() if re.match(symbolic, text)} == {}
