"""Malicious nodes of a simulation: they learn from poisoned data, or change what they respond.

An adversary is a frozen dataclass below :class:`Adversary`; its fields are its options. It controls some
nodes of a simulation, which act together and know the honest nodes' responses to the same query, as in the
Byzantine setting (:mod:`fedstill.federation.malicious_nodes`). What they respond does not pass their own
gates, as an owner can change the software. Robust ensembles in :mod:`fedstill.tasks.ensembles` limit their
influence.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch.nn.functional import one_hot

from fedstill.core.dataset import TensorData
from fedstill.core.options import PositiveInt
from fedstill.core.registry import Registrable, Registry
from fedstill.tasks import Task

CHANGED = frozenset({"scores", "rows", "critic", "model", "moments"})  # categories that garbage replaces
SINGLE_CLASS = ("class", "map")  # kinds of tasks whose outputs are logits of classes that exclude each other


@dataclass(frozen=True, kw_only=True)
class Adversary(Registrable, ABC):
    """Base class of adversaries that control some nodes of a simulation.

    A subclass overrides :meth:`poison`, :meth:`corrupt`, or both.

    Attributes:
        categories: categories of the payload kinds that :meth:`corrupt` changes; empty: none.
        task_kinds: kinds of tasks that it can attack; empty: all.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class Silence(Malicious):
            categories = frozenset({"scores"})

            def corrupt(self, z, honest, generator):
                return torch.zeros_like(z)
    """

    section: ClassVar[str] = "adversary"
    default: ClassVar[str | None] = "none"
    categories: ClassVar[frozenset[str]] = frozenset()
    task_kinds: ClassVar[tuple[str, ...]] = ()

    @property
    def count(self) -> int:
        """Number of malicious nodes."""
        return 0

    def poison(self, data: TensorData, task: Task) -> TensorData:
        """Return the data that a malicious node learns from, given its own."""
        return data

    def corrupt(self, z: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the tensor that a malicious node responds.

        Args:
            z: its honest tensor: for scores ``(B, C, ...)``, of an input each row. Gradients of
                differentiable queries flow back through it.
            honest: the honest nodes' tensors of the same shape, ``(H, B, C, ...)``. H may be 0.
            generator: source of random numbers, on the CPU; other for each query and node.
        """
        return z


@dataclass(frozen=True, kw_only=True)
class NoAdversary(Adversary):
    """All nodes are honest."""


@dataclass(frozen=True, kw_only=True)
class Malicious(Adversary):
    """Base class of adversaries with a number of malicious nodes."""

    nodes: PositiveInt = 1
    """Number of malicious nodes, sampled at random; fewer than all."""

    @property
    def count(self) -> int:
        return self.nodes


@dataclass(frozen=True, kw_only=True)
class LabelFlipping(Malicious):
    """Learn from wrong labels: class c becomes C - 1 - c, and a finding becomes its absence.

    Tolpegin, Truex, Gursoy, Liu: "Data Poisoning Attacks Against Federated Learning Systems", ESORICS 2020.
    """

    task_kinds: ClassVar[tuple[str, ...]] = ("class", "labels", "map")

    def poison(self, data: TensorData, task: Task) -> TensorData:
        last = 1 if task.kind == "labels" else task.classes - 1
        targets = data.targets
        known = targets >= 0  # unknown findings and pixels stay unknown
        return replace(data, targets=torch.where(known, last - targets, targets))


@dataclass(frozen=True, kw_only=True)
class Garbage(Malicious):
    """Respond normally distributed numbers with the mean and deviation of the honest response.

    All kinds of responses are replaced except numbers of examples: scores, critics, parameters and sums.
    """

    categories: ClassVar[frozenset[str]] = CHANGED

    def corrupt(self, z: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = torch.randn(z.shape, generator=generator).to(z)
        with torch.no_grad():
            return z.mean() + z.std(correction=0) * noise


@dataclass(frozen=True, kw_only=True)
class WrongInputs(Malicious):
    """Respond the scores of other inputs of the same query: rows are permuted at random."""

    categories: ClassVar[frozenset[str]] = frozenset({"scores"})

    def corrupt(self, z: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return z[torch.randperm(len(z), generator=generator).to(z.device)]


@dataclass(frozen=True, kw_only=True)
class LogitFlipping(Malicious):
    """Respond -z: the likeliest class becomes the least likely."""

    categories: ClassVar[frozenset[str]] = frozenset({"scores"})

    def corrupt(self, z: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return -z


@dataclass(frozen=True, kw_only=True)
class LogitScaling(Malicious):
    """Respond the scores multiplied by a factor, so that they outweigh all others in a mean of logits."""

    categories: ClassVar[frozenset[str]] = frozenset({"scores"})

    factor: Annotated[float, Gt(0), "above 0"] = 20.0
    """The factor. Nodes whose scores are more than link.outlier times the median of others are excluded."""

    def corrupt(self, z: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self.factor * z


@dataclass(frozen=True, kw_only=True)
class FDLA(Malicious):
    """Move the scores by one rank: the likeliest class gets the lowest score, each other one that of the next
    likelier class, so that the second class wins with full confidence.

    Tang et al.: "Logits Poisoning Attack in Federated Distillation", KSEM 2024, arXiv:2401.03685.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"scores"})
    task_kinds: ClassVar[tuple[str, ...]] = SINGLE_CLASS

    def corrupt(self, z: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        order = z.argsort(1, descending=True)  # (B, C, ...), class of each rank
        return torch.zeros_like(z).scatter(1, order.roll(-1, 1), z.gather(1, order))


@dataclass(frozen=True, kw_only=True)
class LMA(Malicious):
    """Loss maximization attack: respond the class that the honest nodes find least likely.

    Roux, Zimmer, Pokutta: "On the Byzantine-Resilience of Distillation-Based Federated Learning", ICLR 2025.
    As the honest nodes respond logits here, the class gets the largest spread of their logits, which no bound
    on the size of logits can find.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"scores"})
    task_kinds: ClassVar[tuple[str, ...]] = SINGLE_CLASS

    def corrupt(self, z: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        p, spread = honest_prediction(z, honest)  # (B, C, ...)
        return one_class(p.argmin(1), z) * spread


@dataclass(frozen=True, kw_only=True)
class CPA(Malicious):
    """Class prior attack: respond the class that is least similar to the honest nodes' prediction.

    Roux, Zimmer, Pokutta: "On the Byzantine-Resilience of Distillation-Based Federated Learning", ICLR 2025.
    Two classes are similar by the covariance of their probabilities over inputs. The paper takes that of a
    trained model on public data; here it is that of the honest nodes' mean prediction on the query's inputs.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"scores"})
    task_kinds: ClassVar[tuple[str, ...]] = SINGLE_CLASS

    def corrupt(self, z: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        p, spread = honest_prediction(z, honest)  # (B, C, ...)
        S = torch.cov(p.transpose(0, 1).flatten(1), correction=0)  # (C, C)
        return one_class(S.argmin(1)[p.argmax(1)], z) * spread


def honest_prediction(z: torch.Tensor, honest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the honest nodes' mean probabilities ``(B, C, ...)``, and the largest spread of their logits.

    Without honest nodes they are those of the malicious node's own honest logits ``z``.
    """
    known = (honest if len(honest) else z.unsqueeze(0)).detach().float()  # (H, B, C, ...)
    spread = (known.amax(2) - known.amin(2)).max()
    return known.softmax(2).mean(0), spread.to(z.dtype)


def one_class(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return 1 for one class and 0 for all others: ``(B, ...)`` to ``(B, C, ...)``."""
    return one_hot(index, like.shape[1]).movedim(-1, 1).to(like.dtype)


ADVERSARIES: Registry[type[Adversary]] = Registry(
    "adversary",
    {
        "none": "fedstill.federation.adversaries:NoAdversary",
        "label-flipping": "fedstill.federation.adversaries:LabelFlipping",
        "garbage": "fedstill.federation.adversaries:Garbage",
        "wrong-inputs": "fedstill.federation.adversaries:WrongInputs",
        "logit-flipping": "fedstill.federation.adversaries:LogitFlipping",
        "logit-scaling": "fedstill.federation.adversaries:LogitScaling",
        "fdla": "fedstill.federation.adversaries:FDLA",
        "lma": "fedstill.federation.adversaries:LMA",
        "cpa": "fedstill.federation.adversaries:CPA",
    },
    base=Adversary,
)
Adversary.registry = ADVERSARIES
