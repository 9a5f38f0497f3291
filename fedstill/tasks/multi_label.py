"""Multi-label classification: findings of an image, each present, absent or unknown.

Gong et al., "Preserving Privacy in Federated Learning with Ensemble Cross-Domain Knowledge Distillation"
(FedKD), AAAI 2022, "Extension to Other Tasks": sigmoids replace the softmax, targets are in {-1, 0, 1} for
unknown, absent and present, and a node's weight for a label is the number of its examples with that label.

Each label is a binary classification. FedIOD's formulas are applied to the Bernoulli distribution of each
label and averaged over labels. A logit is the log-odds of the label being present.
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
from fedstill.tasks import logit_formulas
from fedstill.tasks.classification import Floats, areas_under_curve, mean_over_classes
from fedstill.tasks.task import Metric, TargetKind, Task, TaskConfig

UNKNOWN = -1
MIN_WEIGHT = 1e-30  # lower bound of weights before a logarithm


class MultiLabel(Task):
    """Multi-label classification of images. Outputs are log-odds ``(B, C)``, targets ``(B, C)`` int64.

    A target is 1 (present), 0 (absent) or -1 (unknown). Unknown targets enter neither the loss nor the
    metrics. A node without examples of a label has weight 0 for it.

    Args:
        classes: C, the number of labels, 1 or more.
    """

    name = "multi-label"
    metrics: tuple[Metric, ...] = (Metric("auc", "AUC"),)
    kind: ClassVar[TargetKind] = "labels"
    min_classes = 1

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.count_sensitivity = classes  # a record may have all labels

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the binary cross-entropy of G models: ``(G, B, C)`` twice to ``(G,)``.

        The loss of an example is the mean over its known labels, and 0 if it has none.

        Args:
            outputs: log-odds, ``(G, B, C)``.
            targets: labels in {-1, 0, 1}, ``(G, B, C)``.
            smoothing: share of a target that is spread evenly over present and absent, from 0 to 1.
        """
        known = targets != UNKNOWN
        smoothed = (1 - smoothing) * targets.clamp_min(0).to(outputs.dtype) + smoothing / 2
        losses = F.binary_cross_entropy_with_logits(outputs, smoothed, reduction="none")
        losses = torch.where(known, losses, 0.0)
        return (losses.sum(2) / known.sum(2).clamp_min(1)).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """Return N_k^c, the number of examples with each label, ``(C,)`` float32. An example adds 0 to C in
        all.
        """
        return (data.targets == 1).sum(0).float()

    # --- FedIOD: responses of K nodes ---

    def confidence_loss(self, responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return L_conf, FedIOD Eq. 3, with the mean over labels of the entropy: from 0 to log 2."""
        return share @ bernoulli_entropy(responses).flatten(1).mean(1)

    def uniqueness_loss(self, responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return L_unique, FedIOD Eq. 5: minus the Jensen-Shannon divergence, averaged over labels."""
        p = torch.tensordot(share, responses.sigmoid(), dims=([0], [0]))  # (B, C)
        return self.confidence_loss(responses, share) - _bernoulli_entropy_from_probs(p).mean()

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Return a scalar that is lowest if each label is present in half of the batch."""
        return -_bernoulli_entropy_from_probs(ensembled.sigmoid().mean(0)).mean()

    def predictions(self, responses: torch.Tensor) -> torch.Tensor:
        """Return probabilities."""
        return responses.sigmoid()

    def mix_outputs(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the log-odds of the weighted mean probability.

        Log-odds have no arbitrary offset, so :meth:`normalize_outputs` keeps them. The consensus equals this
        mixture: a node's weight is the same for both values of a label, so ``share_k = pi_k (p + 1 - p)`` for
            every p.
        """
        log_weights = weights.clamp_min(MIN_WEIGHT).log()
        present = (log_weights + F.logsigmoid(responses)).logsumexp(0)
        absent = (log_weights + F.logsigmoid(-responses)).logsumexp(0)
        return present - absent

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the importance weights, averaged over labels by their predicted probability, ``(K, B)``."""
        q = F.logsigmoid(ensembled).softmax(1)  # p^c over their sum (B, C)
        share = (weights * q).sum(2)  # (K, B)
        return share / share.sum(0, keepdim=True).clamp_min(MIN_WEIGHT)

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """Return FedKD Eq. 5-7, averaged over labels: ``(B, C)`` twice to ``(B,)``.

        For finite tau it is ``tau^2 KL(p_tau(target) || p_tau(student))`` of each label. For infinite tau it
        is the limit, an eighth of the squared difference of log-odds. (The softmax of the logits z and 0 has
        the same limit.) Log-odds are not centered, since the sigmoid depends on their mean.
        """
        if math.isinf(tau):
            return (student - target).square().mean(1) / 8
        precision = torch.float64 if tau > 10 else student.dtype  # as logit_formulas.distillation_loss
        s, t = student.to(precision) / tau, target.to(precision) / tau
        present = t.sigmoid() * (F.logsigmoid(t) - F.logsigmoid(s))
        absent = (-t).sigmoid() * (F.logsigmoid(-t) - F.logsigmoid(-s))
        return (tau**2 * (present + absent).mean(1)).to(student.dtype)

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Return the AUC in percent, averaged over labels with known positive and known negative examples.

        It is NaN if there is no such label or if an output is NaN.
        """
        aucs = [auc for auc, defined in zip(*_auc_per_label(outputs, targets), strict=True) if defined]
        return {"auc": sum(aucs) / len(aucs) if aucs else math.nan}

    def bootstrap_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None, weights: Floats
    ) -> Floats:
        """See :meth:`Task.bootstrap_metric`."""
        p, truth = outputs.detach().double().cpu().numpy(), targets.cpu().numpy()
        if np.isnan(p[truth != UNKNOWN]).any():
            return np.full(len(weights), math.nan)
        areas = [
            areas_under_curve("auc", p[rows, label][None], truth[rows, label][None] == 1, weights[:, rows])
            for label, rows in enumerate((truth != UNKNOWN).T)
        ]
        return 100.0 * mean_over_classes(np.stack(areas, 1))

    def measurable_targets(self, targets: torch.Tensor, data: TensorData) -> torch.Tensor:
        """Return test targets ``(N, C)`` with -1 for each label that is unknown in all examples of ``data``.

        A model trained on ``data`` has an untrained output for such a label.
        """
        known = (data.targets != UNKNOWN).any(0)  # (C,)
        return targets.where(known.to(targets.device), UNKNOWN)

    def metric_per_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float] | None:
        """Return the AUC of each label in percent, NaN without known positive or known negative examples."""
        return _auc_per_label(outputs, targets)[0]


@dataclass(frozen=True, kw_only=True)
class MultiLabelConfig(TaskConfig):
    """Multi-label classification of images."""

    task_class = MultiLabel


def bernoulli_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of the Bernoulli distribution of each log-odds.

    >>> round(bernoulli_entropy(torch.zeros(1)).item(), 4)  # a fair coin: log 2
    0.6931
    """
    return -(logits.sigmoid() * F.logsigmoid(logits) + (-logits).sigmoid() * F.logsigmoid(-logits))


def _bernoulli_entropy_from_probs(p: torch.Tensor) -> torch.Tensor:
    return logit_formulas.entropy_from_probs(torch.stack([p, 1 - p]), 0)


def _auc_per_label(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], list[bool]]:
    """Return the AUC of each label in percent, and whether its targets define it."""
    from sklearn.metrics import roc_auc_score

    logits = outputs.detach().double().cpu()
    logits = torch.where(logits.isinf(), logits.sign() * 1e300, logits)  # sklearn refuses infinity
    scores = logits.numpy()
    aucs, defined = [], []
    for label, truth in enumerate(targets.cpu().T.numpy()):
        rows = truth != UNKNOWN
        known, score = truth[rows], scores[rows, label]
        defined.append(bool(len(known)) and bool(known.min() == 0) and bool(known.max() == 1))
        valid = defined[-1] and not bool((score != score).any())
        aucs.append(100.0 * float(roc_auc_score(known, score)) if valid else math.nan)
    return aucs, defined
