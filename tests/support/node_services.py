"""One node as a service, and a mechanism that records the gate's calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fedstill.data.data_spec import DataSpec
from fedstill.methods import NodeSetting, NodeView, Tensors, payload_kinds
from fedstill.methods.fediod import FedIOD
from fedstill.methods.fedkd import FedKD
from fedstill.models.module_utils import to_vector
from fedstill.node import session as at
from fedstill.node.audit_entries import ReceivedQuery
from fedstill.node.gate import Gate, hand_over
from fedstill.node.node import Node
from fedstill.node.node_service import NodeService
from fedstill.node.release_ledger import TRAINED, Release
from fedstill.privacy.config import NoPrivacy
from fedstill.privacy.events import CostBreakdown, Event, PrivacyCost
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import RunPlan
from fedstill.protocol.wire_format import pack, unpack
from fedstill.tasks.classification import ClassificationConfig
from tests.support.audit_logs import entries, releases
from tests.support.small_world import SETTING

JUDGING = "tests.support.node_services:Judging"
JUDGING_POLICY = f'plugins = ["{JUDGING}"]\n'


@dataclass(frozen=True, kw_only=True)
class Judging(FedIOD):
    """FedIOD whose critics can also be queried alone, as for label maps."""

    title: ClassVar[str] = "Judging"

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield from super().queries(setting)
        yield Query(
            self.score_with_critic,
            sends={"x": payload_kinds.INPUTS},
            releases={"critic": payload_kinds.CRITIC},
            differentiable=("x",),
            times=40,
            rows=self.batch,
            depends_on_records=(),
            trains=("critic",),
            stackable=True,
        )

    def score_with_critic(self, node: NodeView, x: torch.Tensor) -> Tensors:
        return self.train_critic(node, x, None)


FURTHER_NETWORK = "tests.support.node_services:FurtherNetwork"


@dataclass(frozen=True, kw_only=True)
class FurtherNetwork(FedKD):
    """FedKD whose nodes have a network of 100 parameters in addition to their model."""

    title: ClassVar[str] = "FedKD with a further network"

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        node.add_module("critic", nn.Linear(9, 10), lambda critic: torch.optim.SGD(critic.parameters(), 0.1))


SHAPE, CLASSES, B = (1, 8, 8), 10, 4
MAP = (2, 2)  # shape of a critic's output for one input
SPEC = DataSpec(ClassificationConfig(), tuple("0123456789"), SHAPE, (0.5,), (0.5,))
FEDIOD = {
    "name": "fediod",
    "steps": 6,
    "batch": B,
    "student": {"memory": 64},
    "critic": {"width": 4},
}
PLAN = RunPlan("one", FEDIOD, SPEC)
NODE = """
name = "clinic"
seed = 3
[data]
path = "data.npz"
[model]
name = "mlp:8"
[local]
epochs = 4
batch = 8
[policy]
"""


class Clinic:
    """A node's folder, and a server that sends it messages."""

    def __init__(self, folder: Path, policy: str = "", plan: RunPlan = PLAN) -> None:
        self.folder, self.plan = folder, plan
        folder.mkdir(exist_ok=True)
        draw = np.random.default_rng(0)
        images = draw.uniform(0, 1, (40, *SHAPE)).astype(np.float32)
        np.savez(folder / "data.npz", images=images, labels=draw.integers(0, CLASSES, 40))
        (folder / "node.toml").write_text(NODE + policy)
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text("rehearsal 7\n")
        self.host = NodeService(folder)

    def again(self) -> None:
        """Serve the folder from a new process, as after the old one was killed."""
        if self.host.session is not None:
            self.host.session._open_resources.close()  # the system does this when a process ends
        self.host.events.close()
        self.host = NodeService(self.folder)

    def salted(self, salt: str = "") -> Clinic:
        """Give all runs one salt, as in a rehearsal; return the clinic."""
        (self.folder / "salt").write_text(salt)
        return self

    def say(self, do: str, tensors: Mapping[str, torch.Tensor] | None = None, **header: Any) -> Any:
        """Send a message; return the node's reply and its released tensors, or its error."""
        reply, released = unpack(
            self.host.serve(pack({"operation": do, "run": self.plan.run, **header}, tensors))
        )
        if "error" in reply:
            assert not released
            return reply["error"]
        return reply["body"], released

    def ready(self) -> Clinic:
        self.say("join", plan=self.plan.to_dict())
        reply, _ = self.say("train_locally", seconds=60)
        assert reply == {"percent": 100, "is_trained": True}
        return self

    def query(self, number: int, x: torch.Tensor | None = None, **header: Any) -> Any:
        header = {"query": "predict_logits", "differentiable": True, **header}
        return self.say("answer_query", {"x": image(number) if x is None else x}, number=number, **header)

    def pull(self, number: int, value: float = 1.0) -> Any:
        return self.say("compute_gradients", gradients(value), number=number)

    @property
    def session(self) -> at.Session:
        assert self.host.session is not None
        return self.host.session

    def critic(self) -> torch.Tensor:
        return to_vector(self.session.node.modules["critic"])

    def lines(self) -> list[dict[str, Any]]:
        """Return the releases and refusals."""
        return entries(self.folder, "response", "gradient", "refused")

    def rows(self) -> list[dict[str, Any]]:
        """Return the releases and charges."""
        return [entry for entry in entries(self.folder) if entry["part"] != "refused"]

    def charged_releases(self) -> list[tuple[int, str]]:
        return [(entry["number"], entry["part"]) for entry in releases(self.folder)]


def gradients(value: float) -> dict[str, torch.Tensor]:
    """Return output gradients that fit a response of FedIOD."""
    return {"logits": torch.full((B, CLASSES), value), "critic": torch.full((B, *MAP), value)}


def image(seed: int) -> torch.Tensor:
    return torch.randn(B, *SHAPE, generator=torch.Generator().manual_seed(seed))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


PRIVATELY = {
    "dp-sgd": '[privacy]\nmechanism = "dp-sgd"\nepsilon = 8.0\n',
    "pate": '[privacy]\nmechanism = "pate"\nepsilon = 8.0\n[privacy.pate]\nteachers = 4\n',
}


def labels_of(clinic: Clinic) -> torch.Tensor:
    """Return noisy counts of its labels, which only depend on its data and the noise."""
    _, reply = clinic.say("answer_query", query="count_labels", number=0, differentiable=False)
    counts: torch.Tensor = reply["counts"]
    return counts


WIDE = PRIVATELY["pate"].replace("epsilon = 8.0", "counts_noise = 1000.0") + "noise = 8.0\n"


QUERY = Query(
    lambda node: {},
    sends={"x": "inputs"},
    releases={"logits": "logits", "critic": "critic"},
    differentiable=("x",),
    name="predict_logits",
)


def release_now(
    gate: Gate,
    received: ReceivedQuery,
    part: str,
    tensors: Mapping[str, torch.Tensor],
    query: Query,
    sent: Mapping[str, torch.Tensor],
) -> Mapping[str, torch.Tensor]:
    """Release tensors that are already computed."""
    release = Release(query, part, received, TRAINED)
    hand_over([gate.prepare(release, tensors, sent)])
    return release.tensors


class Journal:
    """A mechanism that records its calls in order."""

    node, name, text, setup_hash, salt = "clinic", "journal", "written down", "b", ""
    pays, training, unit = "logits", "training", "a record"
    noise_levels: Mapping[str, float] = {}
    config = NoPrivacy()

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.before: CostBreakdown = {"training": PrivacyCost()}
        self.learned: CostBreakdown = {}
        self.side = NodeSide({"predict_logits": QUERY}, SETTING)

    def rule(self, query: Query, name: str) -> Any:
        return self

    def keyed_hash(self, text: str) -> str:
        return text

    def describe_rule(self, *given: Any) -> str:
        return self.text

    def noise_sampler(self, *names: str | int) -> Any:
        return None

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("bound")
        return tensor.clamp(max=0.5)

    def noise(self, tensor: torch.Tensor, draws: Any) -> torch.Tensor:
        self.calls.append("noise")
        return tensor + 1

    def require_declared_width(self, *given: Any) -> None:
        pass

    def release_costs(self, *given: Any) -> CostBreakdown:
        self.calls.append("price")
        return {"logits": PrivacyCost({Event("laplace", 4.0): 2})}

    def charged_steps_by_role(self, *given: Any) -> dict[str, Any]:
        return {}

    def expected_shapes(self, *given: Any) -> dict[str, Any]:
        return {"response": {}}

    def query_costs(self, *given: Any) -> CostBreakdown:
        return {}

    def training_costs(self, *given: Any) -> CostBreakdown:
        return self.learned

    def initial_training_costs(self) -> CostBreakdown:
        return self.before

    def run_costs(self) -> CostBreakdown:
        return {}
