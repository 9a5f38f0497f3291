"""FedKD: one-shot distillation from quantised, noisy predictions on public, unlabelled data.

Gong, Sharma, Karanam, Wu, Chen, Doermann, Innanje: "Preserving Privacy in Federated Learning with
Ensemble Cross-Domain Knowledge Distillation", AAAI 2022. Symbols and equation numbers are the paper's:
public data D^0, nodes' logits z^k, class weights omega_k^c, quantiser Q with S levels, ensemble z_hat,
noise Lap(1 / gamma), the student's logits z_tilde.

The nodes' models are trained to completion first. Then each predicts every public example once (or a
given number of times, under augmentation), and the student learns from what was predicted: nobody is
asked again. Unless they must first agree on a bound of their logits, all questions are known beforehand and
can be carried by hand, as files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.core.choices import check_choices
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import derive, torch_generator
from fedstill.data.augment import shifted
from fedstill.data.public import Public
from fedstill.methods.counting import count_labels
from fedstill.methods.ensemble import look
from fedstill.methods.one_shot import OneShotServer
from fedstill.methods.parameters import finite
from fedstill.methods.public import AT_ONCE, Views, distil, known, logits, optimiser_of, passes
from fedstill.methods.server import ServerSetting
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.privacy.noise import dequantise, laplace, quantise
from fedstill.protocol.kinds import INDICES, LOGITS, SCHEDULE
from fedstill.protocol.method import Ask, Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide, Question
from fedstill.tasks import Ensemble

CHUNK = 2000  # public examples a question,
MOST = 2**24  # and numbers in them, as answers about large pictures are pictures
LOGIT_RANGE = "logit range"


@dataclass(frozen=True)
class FedKDConfig:
    """FedKD's options."""

    name: ClassVar[str] = "fedkd"

    levels: int = 200
    """S, the quantiser's levels (Eq. 4): up to 254 a logit is one byte. 0: none, logits leave as float32."""
    gamma: float = 10.0
    """Noise Lap(1 / gamma) that the server adds to each ensembled logit (Eq. 2), where it hides nothing from
    the server and carries no epsilon; inf is none. The paper's 1 wants many public examples (it has 50,000)
    or logits taught without label smoothing. For noise at the nodes see nodes.privacy."""
    z_max: float = 0.0
    """Bound of the logits, fixed beforehand; 0: the nodes tell their largest one, and all take the
    largest of these, as in the paper."""
    weights: Literal["counts", "equal"] = "counts"
    """omega_k^c: a node's share of the examples of class c (Eq. 1), or 1 / K."""
    ensemble: Ensemble = "logits"
    """How answers are ensembled: logits (Eq. 2), log_probs, probs, or consensus."""
    tau: float = math.inf
    """Temperature of the distillation (Eq. 5-6); inf is its l2 limit (Eq. 7)."""

    predictions: int = 1
    """How often a node predicts each public example (Table 2): the first time as it is, then under
    augmentation. The student learns on the same augmented images."""
    views: Literal["shift", "shift-flip"] = "shift"
    """That augmentation: shifts by up to an eighth of the image, and mirror images."""
    labelled: bool = False
    """Table 4: public labels are known, and public examples join every node's local training."""

    epochs: int = 200
    """Passes of the student over the public data."""
    batch: int = 64
    """Public examples a step of the student."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """Adam, or SGD with momentum 0.9."""
    lr: float = 1e-3
    """The student's learning rate, falling on a cosine to lr_end."""
    lr_end: float = 1e-3
    """Learning rate of the last pass; the paper's is constant."""
    weight_decay: float = 0.0
    """L2 penalty on the student."""
    student_augment: Literal["none", "shift"] = "none"
    """Further random shifts of what the student sees; its targets stay."""

    def __post_init__(self) -> None:
        check_choices(self, "method")
        for name in ("predictions", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"method.{name}", getattr(self, name), "1 or more")
        finite(self, "z_max", "lr", "lr_end", "weight_decay")
        if not 0 <= self.levels < 2**32 - 1:
            raise ArgumentError("method.levels", self.levels, "1 or more, up to 4294967294, or 0 (none)")
        for name in ("gamma", "tau"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"method.{name}", getattr(self, name), "above 0, or inf")

    @property
    def agreed(self) -> bool:
        """Whether the nodes must agree on a bound of their logits."""
        return self.levels > 0 and self.z_max == 0


def chunk(public: Public) -> int:
    """How many public examples a question is about."""
    return max(1, min(CHUNK, MOST // public.inputs[0].numel()))


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: FedKDConfig, setting: NodeSetting) -> NodeSide:
    """What FedKD prepares at the nodes and the questions that they answer there.

    Raises:
        ArgumentError: an option by which texts, or images whose targets are pictures, would be shifted.
    """
    task = setting.task
    if config.predictions > 1 and (task.tokens or task.kind == "image"):
        why = "texts are never shifted" if task.tokens else "a shifted image was never measured"
        raise ArgumentError("method.predictions", config.predictions, f"1 for task {task.name}: {why}")
    if config.student_augment != "none" and (task.tokens or task.kind in ("map", "image")):
        allowed = f"none: task {task.name} has targets that move with the image, or no images"
        raise ArgumentError("method.student_augment", config.student_augment, allowed)
    views = Views(setting.public, flip=config.views == "shift-flip")
    # Models learn no more once the first question is asked: the last pass of each group is kept, since the
    # range and each chunk come from the same one.
    kept: dict[tuple[str, ...], tuple[int, torch.Tensor]] = {}

    def prepare(nodes: Sequence[Node]) -> None:
        """With labelled public data: they are part of what each node learns from."""
        if config.labelled:
            public = known(setting.public)
            if public.labels is None:
                raise ArgumentError("public.labels", None, "labels, for method.labelled")
            for node in nodes:
                inputs = torch.cat([node.data.inputs, public.inputs])
                node.data = TensorData(inputs, torch.cat([node.data.targets, public.labels]))

    def predicted(group: Group, view: int) -> torch.Tensor:
        """z^k of all public examples under one view, ``(G, N, C, ...)``."""
        names = tuple(node.name for node in group.nodes)
        if names not in kept or kept[names][0] != view:
            kept[names] = view, logits(group, views(view))
        return kept[names][1]

    def tell_range(group: Group, number: int, view: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """max over examples and classes of abs(z^k), ``(G,)``."""
        return {"largest": predicted(group, int(view[0])).abs().flatten(1).amax(1)}

    def predict(
        group: Group,
        number: int,
        rows: torch.Tensor,
        view: torch.Tensor,
        z_max: torch.Tensor | None = None,  # for the quantiser
    ) -> Mapping[str, torch.Tensor]:
        """z^k of the public examples from one row up to another, ``(G, B, C, ...)``."""
        first, last = rows[0].tolist()
        return {"logits": predicted(group, int(view[0]))[:, first:last]}

    def quantised(
        told: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Q(z^k; S) of what the gate lets out, ``(B, C, ...)``."""
        bound = float(sent["z_max"]) if "z_max" in sent else config.z_max
        return {"logits": quantise(told["logits"], config.levels, bound)}  # Eq. 4

    def rehearse(group: Group) -> None:
        """A part of a pass, for the engine to time."""
        logits(group, views(0)[:AT_ONCE])

    known_rows = 0 if setting.public is None else len(setting.public)
    at_once = CHUNK if setting.public is None else chunk(setting.public)
    sends = {"rows": INDICES, "view": SCHEDULE, **({"z_max": LOGIT_RANGE} if config.agreed else {})}
    questions = [
        Question(
            "predict",
            predict,
            sends,
            {"logits": LOGITS},
            times=config.predictions * math.ceil(known_rows / at_once),
            rows=min(known_rows, at_once),
            reads=(),
            finish=quantised if config.levels else None,
        ),
    ]
    if config.weights == "counts":
        questions.append(count_labels(task))
    if config.agreed:
        told = {"largest": LOGIT_RANGE}
        questions.append(
            Question("tell_range", tell_range, {"view": SCHEDULE}, told, times=config.predictions, reads=())
        )
    return NodeSide({question.name: question for question in questions}, prepare, rehearse, look)


# --- at the server ----------------------------------------------------------------------------------


def asks(
    config: FedKDConfig, public: Public | None, seed: int, agree: Callable[[], torch.Tensor]
) -> Iterator[Ask]:
    """All that the nodes are asked, in order.

    Args:
        config: FedKD's options.
        public: D^0.
        seed: of the run; views are drawn from it.
        agree: gives z_max once the label counts are told, called only where the nodes must agree on it.
    """
    if config.weights == "counts":
        yield Ask("count_labels")
    bound = {"z_max": agree()} if config.agreed else {}
    total, at_once = len(known(public)), chunk(known(public))
    for p in range(config.predictions):
        for first in range(0, total, at_once):
            rows = torch.tensor([first, min(first + at_once, total)])
            yield Ask("predict", {"rows": rows, "view": torch.tensor(view_seed(seed, p)), **bound})


def one_round(config: FedKDConfig, public: Public | None, seed: int) -> Sequence[Ask]:
    """All that the nodes are asked, where that is known beforehand.

    Raises:
        ArgumentError: the nodes must agree on a bound first, which takes a round of its own.
    """

    def agree() -> torch.Tensor:
        raise ArgumentError(
            "method.z_max",
            config.z_max,
            "a bound above 0 fixed beforehand, as method.z_max = 20 (or no quantiser: method.levels = 0), "
            "where nodes are asked once and cannot first agree on one",
        )

    return list(asks(config, public, seed, agree))


def view_seed(seed: int, p: int) -> int:
    """Of the p-th view; the first one is the public data as they are."""
    return derive(seed, "view", p) if p else 0


class FedKDServer(OneShotServer):
    """Algorithm 1, with ``omega`` as in Eq. 1.

    Args:
        config: FedKD's options.
        setting: what the server is made of.
    """

    def __init__(self, config: FedKDConfig, setting: ServerSetting) -> None:
        optimiser = optimiser_of(setting.student, config.lr, config.optimiser, config.weight_decay)
        super().__init__(config, setting, optimiser)
        self.config = config
        self.views = Views(setting.public, flip=config.views == "shift-flip")

    def gather(self) -> dict[str, torch.Tensor]:
        """Everything that the nodes are ever asked; z_hat of each prediction of each example."""
        config, parts = self.config, []
        for ask, answers in self.answered(asks(config, self.views.public, self.seed, self._agree)):
            z = answers["logits"]  # (K, B, C, ...), or of fewer nodes, whose weights make up for the others'
            if config.levels:
                z = dequantise(z, config.levels, float(ask.tensors.get("z_max", config.z_max)))
            parts.append(self.task.ensemble(z, self.omega(answers), config.ensemble))  # Eq. 2
        z_hat = torch.stack(torch.cat(parts).chunk(config.predictions))
        if not math.isinf(config.gamma):
            z_hat = z_hat + torch.stack([self._noise(p, z_hat[p]) for p in range(config.predictions)])
        return {"z_hat": z_hat}  # (P, N, C, ...)

    def learn(self, e: int) -> Mapping[str, float]:
        """One pass over D^0."""
        loss = distil(
            self.student,
            self.optimiser,
            self._batches(e, self.targets["z_hat"]),
            lambda z_tilde, z_hat: self.task.distance(z_tilde, z_hat, self.config.tau),  # Eq. 5-7
            self.compute,
            self.seed,
            "student",
            e,
        )
        return {"student": loss}

    def _agree(self) -> torch.Tensor:
        """z_max: the largest logit of all nodes under all views."""
        views = [torch.tensor(view_seed(self.seed, p)) for p in range(self.config.predictions)]
        told = [self.federation.ask("tell_range", view=view)["largest"].max() for view in views]
        return torch.stack(told).max().clamp_min(1e-6)

    def _noise(self, p: int, like: torch.Tensor) -> torch.Tensor:
        """Lap(1 / gamma) for the p-th prediction, ``(N, C, ...)``."""
        generator = torch_generator(self.seed, "laplace", p)
        return laplace(tuple(like.shape), 1 / self.config.gamma, generator).to(like.device)

    def _batches(self, e: int, targets: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Shuffled D^0, under the view whose turn it is, with its z_hat."""
        config, p = self.config, e % self.config.predictions
        x, z_hat = self.views(view_seed(self.seed, p)), targets[p]
        order = passes(len(x), config.batch, torch_generator(self.seed, "public", e))
        for number, rows in enumerate(order):
            chosen = rows.to(x.device)
            batch = x[chosen]
            if config.student_augment == "shift":
                batch = shifted(batch, torch_generator(self.seed, "augment", e, number), flip=False)
            yield batch, z_hat[chosen]


METHOD = Method(
    name="fedkd",
    title="FedKD",
    paper="Gong et al., AAAI 2022",
    config=FedKDConfig,
    node_side=node_side,
    server=FedKDServer,
    needs=lambda config: Needs(public=True, public_labels=config.labelled),
    one_round=one_round,
    later=(
        "ensemble",
        "tau",
        "epochs",
        "batch",
        "optimiser",
        "lr",
        "lr_end",
        "weight_decay",
        "student_augment",
    ),
)
