"""FedMD: nodes of any architectures learn from each other by their class scores on public data.

Li, Wang: "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop,
arXiv:1910.03581, Algorithm 1. Symbols are the paper's: nodes' models f_k, public data D_0, a round's
subset d_j of it, the consensus f~.

Transfer learning (on labelled public data, then on the node's own) comes first. Then, in each round,
the nodes *communicate* their class scores on d_j, the server *aggregates* and *distributes* the
consensus, and each node *digests* it (learns to match it on d_j) and *revisits* its own data.

The paper has no central model. Here the server's student digests every consensus too, as a node
without data would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.choices import check_choices
from fedstill.core.compute import lay_out
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.federation.contract import Answers
from fedstill.methods.counting import Census, count_labels
from fedstill.methods.ensemble import look
from fedstill.methods.parameters import finite, round_span, train_round
from fedstill.methods.public import AT_ONCE, Distance, distil, known, logits, optimiser_of, passes
from fedstill.methods.server import Server, ServerSetting
from fedstill.node import training
from fedstill.node.group import Group, stack
from fedstill.protocol.kinds import INDICES, LOGITS, SCHEDULE
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide, Question
from fedstill.protocol.schedule import Span, cosine, set_lr
from fedstill.tasks import Task


@dataclass(frozen=True)
class FedMDConfig:
    """FedMD's options."""

    name: ClassVar[str] = "fedmd"

    public_epochs: int = 0
    """Transfer learning: passes of each node over labelled public data, before it sees its own; 0: none."""
    first: int = 10
    """Local training before the first round, in parts as long as a round's."""
    rounds: int = 10
    """P, rounds; the local training budget (nodes.local.epochs) is divided into first + rounds parts."""
    subset: int = 5000
    """Examples of d_j, drawn anew each round; at most all public ones."""
    weights: Literal["equal", "counts"] = "equal"
    """How nodes are weighed: equally, as in the paper, or by their share of the examples of each class."""

    distance: Literal["l1", "l2", "kl"] = "kl"
    """What digesting descends: absolute or squared differences of class scores, or the divergence of the
    distributions at temperature tau."""
    tau: float = 1.0
    """Temperature of kl."""
    digest_epochs: int = 1
    """Passes of each node over d_j."""
    digest_batch: int = 32
    """Public examples a step, of nodes and student."""
    digest_lr: float = 1e-3
    """Learning rate of the nodes' second optimiser, an Adam that starts anew each round."""

    student_epochs: int = 10
    """Passes of the student over d_j."""
    student_lr: float = 1e-3
    """Adam's learning rate for the student, falling over the rounds on a cosine to student_lr_end."""
    student_lr_end: float = 1e-4
    """The student's learning rate in the last round."""

    def __post_init__(self) -> None:
        check_choices(self, "method")
        for name, least in (
            ("public_epochs", 0),
            ("first", 0),
            ("rounds", 1),
            ("subset", 1),
            ("digest_epochs", 0),
            ("digest_batch", 1),
            ("student_epochs", 0),
        ):
            if getattr(self, name) < least:
                raise ArgumentError(f"method.{name}", getattr(self, name), f"{least} or more")
        finite(self, "digest_lr", "student_lr", "student_lr_end")
        if not self.tau > 0:
            raise ArgumentError("method.tau", self.tau, "above 0, or inf")

    @property
    def parts(self) -> int:
        """Into how many parts the local training is divided."""
        return self.first + self.rounds


def distance(config: FedMDConfig, task: Task) -> Distance:
    """What digesting descends: class scores and consensus ``(B, C, ...)`` to ``(B,)``."""
    if config.distance == "l1":
        return lambda z, consensus: (z - consensus).abs().flatten(1).mean(1)
    tau = config.tau if config.distance == "kl" else math.inf
    return lambda z, consensus: task.distance(z, consensus, tau)


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: FedMDConfig, setting: NodeSetting) -> NodeSide:
    """What nodes are asked: class scores on public data, and to learn from their consensus."""
    task, compute = setting.task, setting.compute
    mismatch = distance(config, task)
    before = Span(0, config.first, config.parts)

    def transfer(group: Group, number: int) -> Mapping[str, torch.Tensor]:
        """Train f_k on the labelled public data, then on the first part of its own."""
        public = known(setting.public)
        if public.labels is None:
            raise ArgumentError("public.labels", None, "labels, for method.public_epochs")
        if learns(group):
            learn(group, public.inputs, public.labels, supervised, config.public_epochs, "transfer")
            if config.first:
                training.prepare(group.nodes, setting.local)
                training.train(group.nodes, task, setting.local, compute, span=before)
        return {}

    def communicate(group: Group, number: int, rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """f_k(x) for x in d_j, ``(G, B, C, ...)``."""
        group.bench("model").train(False)
        return {"logits": logits(group, known(setting.public).inputs[rows[0].long()])}

    def digest(
        group: Group, number: int, rows: torch.Tensor, consensus: torch.Tensor, round: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """Approach the consensus on d_j, then revisit the node's own data."""
        t = int(round[0])
        if learns(group):
            inputs = known(setting.public).inputs[rows[0].long()]
            learn(group, inputs, consensus[0], matched, config.digest_epochs, "digest", t)
            train_round(group, setting, config.first + t, config.parts)
        return {}

    def digest_and_communicate(
        group: Group,
        number: int,
        rows: torch.Tensor,
        consensus: torch.Tensor,
        round: torch.Tensor,
        rows_next: torch.Tensor,
    ) -> Mapping[str, torch.Tensor]:
        """Digest and revisit, then answer for the next round."""
        digest(group, number, rows, consensus, round)
        return communicate(group, number, rows_next)

    def matched(z: torch.Tensor, consensus: torch.Tensor) -> torch.Tensor:
        return mismatch(z.flatten(0, 1), consensus.flatten(0, 1)).view(len(z), -1).mean(1)  # (G,)

    def supervised(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return task.loss(z, labels, setting.local.smoothing)  # (G,)

    def learn(
        group: Group,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        losses: Distance,
        epochs: int,
        *purpose: str | int,
    ) -> None:
        """Train each node's model on the same public examples, each in its own order."""
        bench, first = group.bench("model"), group.nodes[0]
        bench.train(True)
        optimisers = [optimiser_of(node.model, config.digest_lr) for node in group.nodes]
        for epoch in range(epochs):
            orders = [
                passes(len(inputs), config.digest_batch, node.draw(*purpose, epoch)) for node in group.nodes
            ]
            for step, rows in enumerate(zip(*orders, strict=True)):
                chosen = stack(rows).to(inputs.device)  # (G, B)
                with torch.enable_grad(), compute.step(first.seed, first.name, *purpose, epoch, step):
                    bench.backward(losses(bench(inputs[chosen]), targets[chosen]))
                for optimiser in optimisers:
                    optimiser.step()
        bench.train(False)

    def rehearse(group: Group) -> None:
        """A pass over some public examples, for the engine to time."""
        public = known(setting.public)
        inputs = public.inputs[:AT_ONCE]
        shape = task.outputs(tuple(inputs.shape[1:]))
        target = torch.zeros(len(inputs), *shape, device=inputs.device)
        if learns(group):
            learn(group, inputs, target, matched, 1, "rehearse")

    def revisit(sent: Mapping[str, torch.Tensor]) -> Span:
        return round_span(sent, config.rounds, config.first)

    taken = {"rows": INDICES, "consensus": LOGITS, "round": SCHEDULE}
    scores = {"logits": LOGITS}
    rows = min(config.subset, config.subset if setting.public is None else len(setting.public))
    questions = [
        Question("communicate", communicate, {"rows": INDICES}, scores, times=1, rows=rows, reads=()),
        Question(
            "digest_and_communicate",
            digest_and_communicate,
            {**taken, "rows_next": INDICES},
            scores,
            times=config.rounds - 1,
            rows=rows,
            reads=(),
            span=revisit,
        ),
        Question("digest", digest, taken, times=1, reads=(), span=revisit),
    ]
    if config.public_epochs:
        questions.append(Question("transfer", transfer, times=1, reads=(), span=lambda sent: before))
    if config.weights == "counts":
        questions.append(count_labels(task))
    first = before if config.first and not config.public_epochs else None
    by_name = {question.name: question for question in questions}
    return NodeSide(by_name, rehearse=rehearse, look=look, first=first)


def learns(group: Group) -> bool:
    """Whether the owner left anything in the model to train; otherwise it only answers."""
    node = group.nodes[0]
    return any(name not in node.frozen["model"] for name, _ in node.model.named_parameters())


# --- at the server ----------------------------------------------------------------------------------


class FedMDServer(Server):
    """Rounds of aggregating what the nodes say, and of a student that listens too.

    Args:
        config: FedMD's options.
        setting: what the server is made of.
    """

    def __init__(self, config: FedMDConfig, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.config, self.total = config, config.rounds
        self.public = known(setting.public)
        self.optimiser = optimiser_of(self.student, config.student_lr)
        self.census: Census | None = None
        self.scores: Answers | None = None  # f_k on this round's d_j (K, B, C, ...)

    def step(self) -> Mapping[str, float]:
        """One round: aggregate, distribute, and have it digested everywhere."""
        config, federation, t = self.config, self.federation, self.done
        rows = self._subset(t)
        if self.scores is None or self.census is None:
            self.census = self._begin()
            self.scores = federation.ask("communicate", of=self.census.names, rows=rows)
        consensus = self._consensus(self.scores)  # f~ = sum_k w_k f_k (B, C, ...)
        spread = (self.scores["logits"] - consensus).abs().mean().item()
        question, sent = "digest", {"rows": rows, "consensus": consensus, "round": torch.tensor(t)}
        if t + 1 < self.total:
            question, sent["rows_next"] = "digest_and_communicate", self._subset(t + 1)
        answers = federation.ask(question, of=self.census.names, number=None, **sent)
        self.scores = answers if t + 1 < self.total else None
        set_lr(self.optimiser, cosine(t, self.total, config.student_lr, config.student_lr_end))
        self.student.train()
        mismatch = distance(config, self.task)
        batches = self._batches(t, rows, consensus)
        loss = distil(self.student, self.optimiser, batches, mismatch, self.compute, self.seed, "student", t)
        self.done += 1
        return {"disagreement": spread, "student": loss}

    def ensemble(self, answers: Answers) -> torch.Tensor | None:
        """The consensus on any inputs, ``(B, C, ...)``."""
        return None if self.census is None else self._consensus(answers)

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        return {
            **super().state(),
            "optimiser": self.optimiser.state_dict(),
            "census": None if self.census is None else self.census.state(),
            "scores": None if self.scores is None else (self.scores.nodes, self.scores["logits"]),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.optimiser.load_state_dict(state["optimiser"])
        lay_out(self.optimiser)
        device = self.compute.device
        self.census, self.scores = Census.load(state["census"], device), None
        if state["scores"] is not None:
            nodes, told = state["scores"]
            self.scores = Answers(-1, tuple(nodes), {"logits": told.to(device)})

    def _consensus(self, scores: Answers) -> torch.Tensor:
        """The nodes' logits as one, ``(B, C, ...)``."""
        if self.census is None:
            raise ArgumentError("census", None, "known once the nodes have been asked")
        weights = self.task.importance(self.census.of(scores.nodes).counts)  # (K, 1, C)
        return self.task.ensemble(scores["logits"], weights, "logits")

    def _begin(self) -> Census:
        """Transfer learning, where wanted; who holds what, which weighs the nodes."""
        if self.config.public_epochs:
            self.federation.ask("transfer")
        if self.config.weights == "counts":
            return Census.take(self.federation)
        return Census.even(self.federation.nodes, self.task.classes, self.compute.device)

    def _subset(self, t: int) -> torch.Tensor:
        """d_j, row numbers ``(B,)``."""
        order = torch.randperm(len(self.public), generator=torch_generator(self.seed, "subset", t))
        return order[: self.config.subset].int()

    def _batches(
        self, t: int, rows: torch.Tensor, consensus: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The student's passes over d_j."""
        x = self.public.inputs[rows.long().to(self.compute.device)]
        for epoch in range(self.config.student_epochs):
            draw = torch_generator(self.seed, "student's order", t, epoch)
            for part in passes(len(x), self.config.digest_batch, draw):
                chosen = part.to(x.device)
                yield x[chosen], consensus[chosen]


METHOD = Method(
    name="fedmd",
    title="FedMD",
    paper="Li and Wang, NeurIPS 2019 workshop",
    config=FedMDConfig,
    node_side=node_side,
    server=FedMDServer,
    needs=lambda config: Needs(public=True, public_labels=config.public_epochs > 0),
)
