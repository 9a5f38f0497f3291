"""Small real nodes under privacy mechanisms: releases, charges, and sensitivity to one record."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from unittest.mock import ANY

import pytest
import torch
from torch import nn

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.public import PublicData
from fedstill.federation.inprocess import InProcess
from fedstill.methods import Method, NodeView, Query, Tensors
from fedstill.methods._discriminators import Discriminators
from fedstill.methods.fediod import FedIOD
from fedstill.models import build
from fedstill.models.module_check import DPIncompatibleError
from fedstill.node import local_training, protection
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.policy import PolicyConfig
from fedstill.node.protection import (
    group_privacy_notes,
    needs_mechanism,
    protect,
    require_unchanged_data,
    run_uncharged_preparation,
)
from fedstill.node.request_handler import RequestHandler
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.config import DPTrainingConfig, GradientsConfig, NoPrivacy, PrivacyConfig
from fedstill.privacy.events import Event, PrivacyCost, cost_to_dict, total_cost
from fedstill.privacy.noisy_outputs import OutputsConfig
from fedstill.privacy.pate import PateConfig, TeacherEnsemble
from fedstill.privacy.statement import PER_RECORD_ONLY
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.method import build_node_side
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.payload_kinds import CRITIC, INPUTS, LOGITS
from fedstill.runs.simulation import group_nodes
from fedstill.tasks.classification import Classification
from fedstill.tasks.instances import Instances
from fedstill.tasks.segmentation import Segmentation
from tests.support.errors import raises_invalid
from tests.support.privacy import make_mechanism
from tests.support.request_handlers import respond

SHAPE, CLASSES, ROWS, M = (1, 8, 8), 3, 6, 4
TASK, COMPUTE, LOCAL = Classification(CLASSES), Compute(), LocalConfig(epochs=3, batch=8, lr=0.02)
METHOD = FedIOD(steps=3, batch=ROWS, critic=Discriminators(width=4))
CONFIG: dict[str, Any] = {
    "training": DPTrainingConfig(noise=0.7),
    "critic": DPTrainingConfig(noise=1.0),
    "pate": PateConfig(teachers=M, noise=5.0, sharpness=8.0),
    "gradients": GradientsConfig(noise=2.0),
    "outputs": OutputsConfig(noise=10.0, bound=3.0),
    "counts_noise": 5.0,
}
MECHANISMS: tuple[Any, ...] = ("dp-sgd", "pate", "noisy-outputs")
X = torch.randn(ROWS, *SHAPE, generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True, kw_only=True)
class Claims(PrivacyConfig):
    """A custom mechanism that claims to train the model with DP-SGD, so that its outputs are free."""

    about: ClassVar[str] = "its model learns with noise"
    dp_trained: ClassVar[Mapping[str, str]] = {"model": "steps"}
    steps: DPTrainingConfig = field(default_factory=DPTrainingConfig)


@dataclass(frozen=True, kw_only=True)
class Parts(PrivacyConfig):
    """A custom mechanism whose votes are of models with one part of the data each."""

    about: ClassVar[str] = "votes"

    def shard_indices(self, data: TensorData) -> list[torch.Tensor]:
        return [torch.arange(len(data))]


@pytest.mark.parametrize("config", [Claims(steps=DPTrainingConfig(noise=1.0)), Parts()])
def test_frozen_model_rejects_training_mechanisms(config: PrivacyConfig) -> None:
    network = build("mlp:4", SHAPE, CLASSES, 0).requires_grad_(False)
    node = Node("n", records(), network, Gate("n", PolicyConfig(), AuditLog()), 0)
    with raises_invalid("privacy.mechanism of n", ANY, "frozen"):
        protect(
            node,
            config,
            build_node_side(METHOD, NodeSetting(TASK, LOCAL, COMPUTE)),
            METHOD,
            NodeSetting(TASK, LOCAL, COMPUTE),
            secret=1,
        )


def records(count: int = 24, groups: torch.Tensor | None = None, distance: float = 1.0) -> TensorData:
    draw = torch.Generator().manual_seed(1)
    targets = torch.randint(CLASSES, (count,), generator=draw)
    inputs = torch.randn(count, *SHAPE, generator=draw) + distance * targets.view(-1, 1, 1, 1)
    return TensorData(inputs, targets, groups)


def without(data: TensorData, record: int) -> TensorData:
    return data.subset(torch.tensor([index for index in range(len(data)) if index != record]))


@dataclass
class World:
    """One node with a trained model, and a federation that queries it."""

    node: Node
    federation: InProcess
    audit: AuditLog

    @property
    def mechanism(self) -> PrivacyMechanism:
        assert self.node.gate.budgets is not None
        return self.node.gate.budgets.mechanism

    def query(self, x: torch.Tensor = X, number: int | None = None, query: str = "predict_logits") -> Any:
        sent = {"x": x} if query == "predict_logits" else {}
        responses = self.federation.query(query, number=number, **sent)
        return {name: responses[name][0].detach() for name in responses.tensors}

    def clean(self, x: torch.Tensor = X) -> torch.Tensor:
        """Return the outputs of the node's model, bounded as by the gate."""
        with torch.no_grad():
            z = self.node.model.eval()(x)
        return self.mechanism.rule(self.federation.queries["predict_logits"], "logits").bound(z)

    def pulled(self, x: torch.Tensor = X) -> torch.Tensor:
        """Return an input gradient as bounded by the gate, before noise: ``(B, C, H, W)``."""
        x = x.clone().requires_grad_()
        upstream = torch.linspace(-1, 1, ROWS * CLASSES).view(ROWS, CLASSES)
        (gradient,) = torch.autograd.grad(self.node.model.eval()(x), x, upstream)
        return self.mechanism.rule(self.federation.queries["predict_logits"], "d/dx").bound(gradient)

    def spent(self) -> Mapping[str, int]:
        return self.audit.spending("clinic", "run").run_events


def made(
    config: PrivacyConfig,
    data: TensorData | None = None,
    *,
    method: FedIOD = METHOD,
    model: str = "mlp:8",
    secret: int = 0,
    seed: int = 3,
    train: bool = True,
) -> World:
    audit = AuditLog()
    gate = Gate("clinic", PolicyConfig(), audit)
    node = Node("clinic", data or records(), build(model, SHAPE, CLASSES, 0, "clinic"), gate, seed)
    setting = NodeSetting(TASK, LOCAL, COMPUTE)
    side = method.node_side(setting)
    about = (side, method, setting)
    protect(node, config, *about, secret=secret)
    side.prepare(node)
    require_unchanged_data(node)
    local_training.attach_optimizers(node.self_or_teachers, LOCAL)
    for group in group_nodes(node.self_or_teachers, True) if train else ():
        local_training.train(group, TASK, LOCAL, COMPUTE)
    return World(node, InProcess([node], [[node]], side, COMPUTE), audit)


def under(mechanism: Any, **change: Any) -> PrivacyConfig:
    return make_mechanism(mechanism, **{**CONFIG, **change})


# --- releases -----------------------------------------------------------------------------------------


def test_dp_sgd_charges_training_not_responses() -> None:
    one = made(under("dp-sgd"))
    released = one.query()
    torch.testing.assert_close(released["logits"], one.node.model(X).detach())
    torch.testing.assert_close(released["critic"], one.node.modules["critic"](X).detach())
    steps, critic = Event("gaussian", 0.7, rate=8 / 24), Event("gaussian", 1.0, rate=ROWS / 24)
    assert one.spent() == cost_to_dict({steps: 9, critic: 1})
    one.query()
    assert one.spent() == cost_to_dict({steps: 9, critic: 2})
    norms = {type(module).__name__ for module in one.node.modules["critic"].modules()}
    assert "BatchNorm2d" not in norms
    assert "GroupNorm" in norms


def test_pate_releases_noisy_votes() -> None:
    one = made(under("pate"))
    assert isinstance(one.node.model, TeacherEnsemble)
    assert [learner.name for learner in one.node.self_or_teachers] == [
        f"clinic/teacher-{index}" for index in range(M) if one.node.model.voting[index]
    ]
    assert sum(len(learner.data) for learner in one.node.self_or_teachers) == 24
    logits = torch.cat([one.query()["logits"] - one.clean() for _ in range(40)])
    noise = logits * M / 8  # in votes
    assert noise.std().item() == pytest.approx(5.0, rel=0.1)
    assert abs(noise.mean().item()) < 1
    votes = one.clean() * M / 8
    torch.testing.assert_close(votes, votes.round())


def test_noisy_outputs_adds_noise_to_bounded_outputs() -> None:
    one = made(under("noisy-outputs"))
    noise = torch.cat([one.query()["logits"] - one.clean() for _ in range(40)])
    assert noise.abs().mean().item() == pytest.approx(10.0, rel=0.15)  # Laplace
    assert one.clean().abs().max() <= 3
    assert one.node.model(20 * X).abs().max() > 3, "outputs exceed the bound"


def test_input_gradients_are_noised_and_charged() -> None:
    for mechanism, m in (("pate", M), ("noisy-outputs", 1)):
        one = made(under(mechanism))
        x = X.clone().requires_grad_()
        one.federation.query("predict_logits", x=x)["logits"].sum().backward()
        assert x.grad is not None
        assert x.grad.std().item() == pytest.approx(2.0, rel=0.2)  # noise of 2 clip
        assert f"gaussian({2 * m / (2 * math.sqrt(ROWS))!r})" in one.spent()
    one = made(under("dp-sgd"))
    before = dict(one.spent())
    x = X.clone().requires_grad_()
    one.federation.query("predict_logits", x=x)["logits"].sum().backward()
    assert not before
    assert len(one.spent()) == 2, "training and one critic step"


# --- noise --------------------------------------------------------------------------------------------


def noise_of(one: World, number: int | None = None, x: torch.Tensor = X) -> torch.Tensor:
    """Return the noise of a response; without a number, the next query number is used."""
    return one.query(x, number)["logits"] - one.clean(x)


@pytest.mark.parametrize("randomness", ["seeded", "secure"])
@pytest.mark.parametrize("mechanism", ["pate", "noisy-outputs"])
def test_noise_is_equal_only_for_equal_releases(mechanism: Any, randomness: Any) -> None:
    config = under(mechanism, randomness=randomness)
    one = made(config)
    first = noise_of(one, 0)
    assert torch.equal(noise_of(one, 0), first), "equal for a repeated query"
    torch.testing.assert_close(noise_of(made(config), 0), first)  # also after a restart
    others = {
        "another number": noise_of(made(config), 1),
        "what came before": noise_of(one, 1),
        "content": noise_of(made(config), 0, X + 1e-6),
        "a record less": noise_of(made(config, without(records(), 0)), 0),
        "secret": noise_of(made(config, secret=1), 0),
        "seed": noise_of(made(config, seed=4), 0),
        "method": noise_of(made(config, method=replace(METHOD, conf=0.5)), 0),
        "level": noise_of(made(replace(config, gradients=GradientsConfig(noise=3.0))), 0),
    }
    for name, noise in others.items():
        assert (noise - first).abs().max() > 1, name
    assert (others["another number"] - others["what came before"]).abs().max() > 1
    same = replace(config, epsilon=1e6, total_epsilon=1e6, delta=1e-6)
    torch.testing.assert_close(noise_of(made(same), 0), first)  # responses do not depend on the budget


def bound(secret: int = 0, keep: int = 0, salt: str = "", **change: Any) -> str:
    """Return the setup hash of a node with changed options; ``keep`` parameters are frozen."""
    engine = {part: change.pop(part) for part in ("device", "precision") if part in change}
    labels: torch.Tensor | None = change.pop("labels", torch.zeros(5, dtype=torch.int64))
    inputs = change.pop("inputs", torch.zeros(5, *SHAPE))
    model = build("mlp:8", SHAPE, CLASSES, 0, "clinic")
    for own in list(model.parameters())[:keep]:
        own.requires_grad_(False)
    node = Node("clinic", records(), model, Gate("clinic", PolicyConfig(), AuditLog()), 3)
    task, features = change.pop("task", TASK), change.pop("features", None)
    compute, public = Compute(EngineConfig(**engine)), PublicData("p", inputs, labels)
    setting = NodeSetting(task, LOCAL, compute, public, features)
    side, config = METHOD.node_side(setting), under(change.pop("mechanism", "noisy-outputs"), **change)
    about = (side, METHOD, setting)
    protect(node, config, *about, secret=secret, salt=salt)
    assert node.gate.budgets is not None
    assert node.gate.budgets.mechanism.salt == salt
    return node.gate.budgets.mechanism.setup_hash


def test_setup_hash_covers_everything_and_is_keyed() -> None:
    others = {
        "public labels": bound(labels=torch.ones(5, dtype=torch.int64)),
        "no public labels": bound(labels=None),
        "public inputs": bound(inputs=torch.ones(5, *SHAPE)),
        "what is frozen": bound(keep=1),
        "how much is frozen": bound(keep=2),
        "precision": bound(precision="bfloat16"),
        "the kind of device": bound(device="meta"),
        "the secret: nobody else can try out what the records are": bound(secret=1),
        "options": bound(counts_noise=6.0),
        "that it compares by features": bound(features=nn.Linear(1, 1).requires_grad_(False)),
        "by which features": bound(features=nn.Linear(2, 1).requires_grad_(False)),
    }
    assert bound() == bound(epsilon=1e6, total_epsilon=1e6, delta=1e-6, total_delta=1e-6)
    assert bound() == bound(salt="x"), "the hash is known before any run"
    assert bound() not in others.values()
    assert len(set(others.values())) == len(others)


def test_default_rounding_adds_nothing_to_setup_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is as it was before the option existed."""
    monkeypatch.setattr(protection, "keyed_digest", lambda secret, text: text)
    default, isolated = (
        ast.literal_eval(bound(isolate_rounding=value).partition(" ")[2]) for value in (False, True)
    )
    changed = [index for index in range(len(default)) if default[index] != isolated[index]]
    assert len(changed) == 1
    assert [value for value in isolated[changed[0]] if value is not True] == default[changed[0]]


def test_setup_hash_ignores_names_of_classes_and_modules() -> None:
    """Moving and renaming classes does not change the noise."""
    moved = type("Renamed", (Segmentation,), {"__module__": "elsewhere"})
    assert bound(task=moved(3), mechanism="dp-sgd") == bound(task=Segmentation(3), mechanism="dp-sgd")


def test_setup_hash_covers_task_options() -> None:
    tasks = [
        Segmentation(3),
        Segmentation(3, dice=0.5),
        Segmentation(3, class_weights=(1.0, 1.0, 2.0)),
        Segmentation(3, outline=False),
        Instances(3),
    ]
    hashes = [bound(task=task, mechanism="dp-sgd") for task in tasks]
    assert len(set(hashes)) == len(tasks)
    assert bound(task=Segmentation(3, (1.0, 1.0, 2.0)), mechanism="dp-sgd") == hashes[2]


def test_critic_noise_depends_on_query() -> None:
    def critic(x: torch.Tensor, number: int = 0) -> torch.Tensor:
        one = made(under("dp-sgd"), train=False)
        one.query(x, number)
        return torch.cat([own.detach().flatten() for own in one.node.modules["critic"].parameters()])

    base = critic(X)
    assert torch.equal(critic(X), base)
    # Nearly equal inputs: with equal noise, Adam's first step would also be nearly equal.
    moved = (critic(X + 1e-6) - base).abs()
    assert (moved > 1e-3).float().mean() > 0.3


# --- sensitivity to one record, on the real path --------------------------------------------------------


def test_vote_sensitivity_matches_charge() -> None:
    hard = records(16, distance=0.0)  # classes cannot be predicted from other records
    base, moved = made(under("pate"), hard), []
    sharp, many = 8.0, torch.randn(300, *SHAPE, generator=torch.Generator().manual_seed(6))
    for record in range(16):
        other = made(under("pate"), without(hard, record))
        votes = (base.clean(many) - other.clean(many)) * M / sharp
        assert votes.abs().max() <= 1, "a vote changes by at most 1"
        assert (votes.abs().sum(1) <= 2).all()
        moved.append(votes.norm().item())
        gradients = (base.pulled() - other.pulled()).flatten(1).norm(dim=1)
        assert (gradients <= 2 * 1.0 / M).all()
    assert max(moved) > 0, "some votes changed"
    (event,) = released(base, len(many))
    assert max(moved) <= 5.0 / event.noise + 1e-6, "within the charged sensitivity"


def released(one: World, rows: int = ROWS) -> PrivacyCost:
    """Return the cost of the responses to some inputs alone."""
    costs = one.mechanism.release_costs(one.federation.queries["predict_logits"], {"logits": (rows, CLASSES)})
    return total_cost(costs) or PrivacyCost()


# --- refusals -----------------------------------------------------------------------------------------


def test_group_size_needs_groups_and_limits_them() -> None:
    with pytest.raises(ArgumentError, match="group_size = 2"):
        made(under("pate", group_size=2), train=False)
    groups = torch.arange(24) // 6  # four groups of six
    one = made(under("pate", group_size=2), records(groups=groups), train=False)
    assert len(one.node.data) == 8
    assert one.mechanism.examples == 8
    for teacher in one.node.teachers:
        held = set(teacher.data.groups.tolist())  # type: ignore[union-attr]
        for other in one.node.teachers:
            assert other is teacher or not held & set(other.data.groups.tolist())  # type: ignore[union-attr]


def test_dp_sgd_refuses_layers_that_mix_examples() -> None:
    with pytest.raises(DPIncompatibleError, match="BatchNorm"):
        made(under("dp-sgd"), model="resnet8:4", train=False)
    made(under("noisy-outputs"), model="resnet8:4", train=False)


def test_changed_data_are_refused() -> None:
    one = made(under("pate"), train=False)
    require_unchanged_data(one.node)
    one.node.data = records(30)
    with raises_invalid("privacy.mechanism of clinic", "pate", "none", "public data"):
        require_unchanged_data(one.node)
    plain = made(NoPrivacy(epsilon=1e3), train=False)
    plain.node.data = records(30)
    require_unchanged_data(plain.node)  # without a mechanism, no charge depends on the data


def test_no_mechanism_changes_nothing() -> None:
    assert not needs_mechanism(NoPrivacy())
    assert all(needs_mechanism(make_mechanism(mechanism)) for mechanism in MECHANISMS)
    assert needs_mechanism(NoPrivacy(epsilon=3.0))
    assert needs_mechanism(NoPrivacy(total_epsilon=3.0))


def test_note_states_per_record_epsilon() -> None:
    patients = torch.arange(24) // 4
    assert PER_RECORD_ONLY in made(under("dp-sgd"), records(groups=patients)).mechanism.statement().assumes
    # One record must not decide about the note, which is reported before anything is charged.
    assert (
        PER_RECORD_ONLY
        in made(under("dp-sgd"), records(groups=torch.arange(24))).mechanism.statement().assumes
    )
    assert PER_RECORD_ONLY not in made(under("dp-sgd"), records()).mechanism.statement().assumes
    whole = made(under("dp-sgd", group_size=4), records(groups=patients)).mechanism.statement()
    assert PER_RECORD_ONLY not in whole.assumes

    parts = [records(groups=patients), records(groups=torch.arange(24) // 8), records()]
    (note,) = group_privacy_notes(parts, [under("dp-sgd")] * 3)
    assert note.startswith("epsilon holds for one record: a patient or slide has up to 8 at one node")
    assert "privacy.group_size = 8" in note
    (note,) = group_privacy_notes(parts, [under("dp-sgd"), NoPrivacy(), under("dp-sgd")])
    assert "up to 4 at" in note
    assert group_privacy_notes(parts, [under("dp-sgd", group_size=8)] * 3) == ()
    assert group_privacy_notes(parts[2:], [under("dp-sgd")]) == ()
    assert group_privacy_notes(parts, [NoPrivacy()] * 3) == ()


# --- trained steps and charged steps --------------------------------------------------------------------


ROUND = Span.part(0, 3)


@dataclass(frozen=True, kw_only=True)
class Greedy(Method):
    """A custom method whose queries train more than they declare."""

    title: ClassVar[str] = "Greedy"
    critic: ClassVar[Discriminators] = Discriminators(width=4)
    early: bool = False

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        self.critic.add_to(node, setting.task, self.total_steps)
        if self.early:
            NodeView(NodeGroup([node]), setting).train(ROUND)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        sends, logits, critic = {"x": INPUTS}, {"logits": LOGITS}, {"critic": CRITIC}
        yield Query(self.silent, sends=sends, releases=logits, depends_on_records=())
        yield Query(self.twice, sends=sends, releases=logits, depends_on_records=(), span=lambda sent: ROUND)
        trained: dict[str, Any] = {"depends_on_records": (), "trains": ("critic",)}
        yield Query(self.one_by_one, sends=sends, releases=critic, **trained)
        yield Query(self.five_steps, sends=sends, releases=critic, rows=ROWS, **trained)

    def silent(self, node: NodeView, x: torch.Tensor) -> Tensors:
        node.train(ROUND)  # without a declared span
        return {"logits": node.model(x)}

    def twice(self, node: NodeView, x: torch.Tensor) -> Tensors:
        node.train(ROUND)
        return self.silent(node, x)

    def one_by_one(self, node: NodeView, x: torch.Tensor) -> Tensors:
        self.critic.train_step(node, x, ROWS)  # on ROWS records, while the query declares no rows
        return {"critic": node.module("critic")(x)}

    def five_steps(self, node: NodeView, x: torch.Tensor) -> Tensors:
        return [self.one_by_one(node, x) for _ in range(5)][-1]


@pytest.mark.parametrize("query", ["silent", "twice", "one_by_one", "five_steps", "early"])
def test_uncharged_private_steps_are_refused(query: str) -> None:
    """Otherwise DP-SGD would train for free: without a span, or five critic steps for the cost of one."""
    at, method = NodeSetting(TASK, LOCAL, COMPUTE), Greedy(early=query == "early")
    network = build("mlp:4", SHAPE, CLASSES, 0)
    node = Node("n", records(), network, Gate("n", PolicyConfig(), AuditLog()), 0)
    side = build_node_side(method, at)
    protect(node, make_mechanism("dp-sgd", **CONFIG), side, method, at, secret=1)

    def attempt() -> None:
        run_uncharged_preparation(side, [node])
        respond(RequestHandler(NodeGroup([node]), side, COMPUTE), query, 0, {"x": X}, False)

    with pytest.raises(ArgumentError, match=r"steps of the \w+ of n = .more."):
        attempt()
    assert query == "early" or node.remaining_private_steps is None
