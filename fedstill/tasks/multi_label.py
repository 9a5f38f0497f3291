"""Labels that do not exclude each other: findings of an image, each of them there, absent or unknown.

Gong et al., "Preserving Privacy in Federated Learning with Ensemble Cross-Domain Knowledge Distillation"
(FedKD), AAAI 2022, "Extension to Other Tasks": sigmoids in the softmax's place, targets in {-1, 0, 1} for
unknown, absent and there, and a node's weight for a label by how many examples have it.

Each label is a query of its own, with two answers. So FedIOD's formulas are taken label by label, of
Bernoulli distributions, and averaged over labels; and a logit is the log-odds of the label being there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.tasks import formulas
from fedstill.tasks.classification import Floats, areas_under_curve, mean_over_classes
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.task import Metric, TargetKind, Task

UNKNOWN = -1
MIN_WEIGHT = 1e-30  # stands for a weight of nothing where a logarithm is taken


class MultiLabel(Task):
    """Multi-label classification of images: outputs are log-odds ``(B, C)``, targets ``(B, C)`` int64.

    A target is 1 (there), 0 (absent) or -1 (unknown): nothing is learned or measured of what is unknown. A
    node that does not know a label holds no example of it, and weighs nothing there.
    """

    name = "multi-label"
    metrics: tuple[Metric, ...] = (Metric("auc", "AUC"),)
    kind: ClassVar[TargetKind] = "labels"
    min_classes = 1

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.count_sensitivity = classes  # a record may have every label

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Binary cross-entropy of G models on G batches: ``(G, B, C)`` twice to ``(G,)``.

        Each example costs the mean over its known labels, and nothing where it has none. ``smoothing`` is the
        share of a label's target that is spread evenly over its two answers, as classes are smoothed.
        """
        known = targets != UNKNOWN
        wanted = (1 - smoothing) * targets.clamp_min(0).to(outputs.dtype) + smoothing / 2
        each = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
        each = torch.where(known, each, 0.0)
        return (each.sum(2) / known.sum(2).clamp_min(1)).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """N_k^c, how many examples have each label: ``(C,)`` float32; an example adds from 0 to C."""
        return (data.targets == 1).sum(0).float()

    # --- FedIOD: answers of K nodes ---

    def confidence_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_conf, FedIOD Eq. 3, with the mean over labels of each one's entropy: from 0 to log 2."""
        return pi @ bernoulli_entropy(responses).flatten(1).mean(1)

    def uniqueness_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_unique, FedIOD Eq. 5: minus the Jensen-Shannon divergence of each label, averaged over labels."""
        p = torch.tensordot(pi, responses.sigmoid(), dims=([0], [0]))  # (B, C)
        return self.confidence_loss(responses, pi) - _bernoulli_entropy_from_probs(p).mean()

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Lowest where each label is there in half of a batch, so that inputs show all of them."""
        return -_bernoulli_entropy_from_probs(ensembled.sigmoid().mean(0)).mean()

    def mix_outputs(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Log-odds of the weighted mean probability.

        Log-odds themselves have no offset that could be taken away. And the consensus is this mixture: it
        asks how much nodes know of the classes that an input shows, and of one label's two answers a node's
        weight is the same, so ``share_k = pi_k (p + 1 - p)`` whatever p is.
        """
        log_weights = weights.clamp_min(MIN_WEIGHT).log()
        there = (log_weights + F.logsigmoid(responses)).logsumexp(0)
        absent = (log_weights + F.logsigmoid(-responses)).logsumexp(0)
        return there - absent

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The importance weights, averaged over labels as likely as the ensemble takes them to be there."""
        q = F.logsigmoid(ensembled).softmax(1)  # p^c over their sum (B, C)
        share = (weights * q).sum(2)  # (K, B)
        return share / share.sum(0, keepdim=True).clamp_min(MIN_WEIGHT)

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """FedKD Eq. 5-7: ``(B, C)`` twice to ``(B,)``, the mean over labels.

        For finite tau, ``tau^2 KL(p_tau(target) || p_tau(student))`` of each label's two answers. For
        infinite tau its limit, an eighth of the squared difference of log-odds (softmax over the two logits
        z and 0 has the same). No mean is taken away: a sigmoid sees it.
        """
        if math.isinf(tau):
            return (student - target).square().mean(1) / 8
        precision = torch.float64 if tau > 10 else student.dtype  # as functional.distance
        s, t = student.to(precision) / tau, target.to(precision) / tau
        there = t.sigmoid() * (F.logsigmoid(t) - F.logsigmoid(s))
        absent = (-t).sigmoid() * (F.logsigmoid(-t) - F.logsigmoid(-s))
        return (tau**2 * (there + absent).mean(1)).to(student.dtype)

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """AUC in percent, the mean over labels that are known to be there and known to be absent somewhere.

        NaN where there is no such label, or where an output is NaN.
        """
        known = [one for one, sayable in zip(*_auc_per_label(outputs, targets), strict=True) if sayable]
        return {"auc": sum(known) / len(known) if known else math.nan}

    def bootstrap_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None, weights: Floats
    ) -> Floats:
        """See :meth:`Task.bootstrap_metric`."""
        p, truth = outputs.detach().double().cpu().numpy(), targets.cpu().numpy()
        if np.isnan(p[truth != UNKNOWN]).any():
            return np.full(len(weights), math.nan)
        each = [
            areas_under_curve("auc", p[rows, label][None], truth[rows, label][None] == 1, weights[:, rows])
            for label, rows in enumerate((truth != UNKNOWN).T)
        ]
        return 100.0 * mean_over_classes(np.stack(each, 1))

    def measurable_targets(self, targets: torch.Tensor, data: TensorData) -> torch.Tensor:
        """Test targets ``(N, C)`` with -1 for each label of which ``data`` know no example, there or absent:
        the output for it was never trained, and guesses."""
        known = (data.targets != UNKNOWN).any(0)  # (C,)
        return targets.where(known.to(targets.device), UNKNOWN)

    def per_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float] | None:
        """AUC of each label in percent; NaN where it is never known to be there, or never to be absent."""
        return _auc_per_label(outputs, targets)[0]


@dataclass(frozen=True, kw_only=True)
class MultiLabelConfig(TaskConfig):
    """Any number of findings an image."""

    task_class = MultiLabel


def bernoulli_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of the Bernoulli distribution of each log-odds, of their shape.

    >>> round(bernoulli_entropy(torch.zeros(1)).item(), 4)  # a fair coin: log 2
    0.6931
    """
    return -(logits.sigmoid() * F.logsigmoid(logits) + (-logits).sigmoid() * F.logsigmoid(-logits))


def _bernoulli_entropy_from_probs(p: torch.Tensor) -> torch.Tensor:
    """The same of probabilities; 0 log 0 is 0."""
    return formulas.entropy_from_probs(torch.stack([p, 1 - p]), 0)


def _auc_per_label(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], list[bool]]:
    """AUC of each label in percent, and whether its targets let it be said."""
    from sklearn.metrics import roc_auc_score

    found = outputs.detach().double().cpu()
    found = torch.where(found.isinf(), found.sign() * 1e300, found)  # sklearn takes no infinity
    scores = found.numpy()
    aucs, sayable = [], []
    for label, truth in enumerate(targets.cpu().T.numpy()):
        rows = truth != UNKNOWN
        seen, score = truth[rows], scores[rows, label]
        sayable.append(bool(len(seen)) and bool(seen.min() == 0) and bool(seen.max() == 1))
        sound = sayable[-1] and not bool((score != score).any())
        aucs.append(100.0 * float(roc_auc_score(seen, score)) if sound else math.nan)
    return aucs, sayable
