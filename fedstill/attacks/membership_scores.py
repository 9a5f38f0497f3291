"""Membership scores of records, shadow models, and the metrics of an attack.

Scores are computed from a model's outputs, and are higher for likelier members. The attacks differ in what
they compare a target's output with:

- :func:`loss_attack`: nothing. Yeom, Giacomelli, Fredrikson, Jha, "Privacy Risk in Machine Learning:
  Analyzing the Connection to Overfitting", CSF 2018, Adversary 2.
- :func:`lira_attack`, :func:`lira_offline_attack`: outputs of shadow models that learned, or did not learn,
  from the same record. Carlini, Chien, Nasr, Song, Terzis, Tramer, "Membership Inference Attacks From First
  Principles", IEEE S&P 2022, Algorithm 1.
- :func:`coop_lira_attack`: outputs of other nodes' models, none of which learned from the record. Shi,
  Ouyang, Wang, "Unveiling Client Privacy Leakage from Public Dataset Usage in Federated Distillation",
  PoPETs 2025.
- :func:`rmia_attack`: these, and other records of the population. Zarifzadeh, Liu, Shokri, "Low-Cost
  High-Power Membership Inference Attacks", ICML 2024, Section 3.

All are computed in float64, as outputs of an overfitted model differ where float32 rounds to 1.

Shadow models are trained as the target was, on random halves of a pool of records. They come in pairs that
share the pool between them, so that each record is in half of them and all learn from as many.
:func:`train_shadows` trains them all at once by the project's own local training; shadow federations are in
:mod:`fedstill.attacks.membership_inference`. An adversary with queries and responses of a node, and without
further queries, distills a *proxy* of its model from them and attacks that (:func:`train_proxies`), as in
Tramer, Zhang, Juels, Reiter, Ristenpart, "Stealing Machine Learning Models via Prediction APIs", USENIX
Security 2016. Proxies of shadows are distilled from as many pairs.

The confidence intervals of the metrics are over the sampled records, for the one attacked model. They do
not cover the variation between trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.cuda_graphs import uses_global_rng
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import derive, torch_generator
from fedstill.models.inference import predict
from fedstill.node import local_training
from fedstill.node.architectures import stacking_key
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup, TrainStep
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.epsilon_lower_bounds import CONFIDENCE, clopper_pearson_upper
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.simulation import group_nodes, should_stack
from fedstill.tasks import Task
from fedstill.tasks.logit_formulas import distillation_loss

LOW_RATES = (0.01, 0.001)  # false positive rates at which members are counted
MIN_SHADOWS_PER_RECORD = 64  # from which each record has separate variances
MIN_OTHER_NODES = 2  # to estimate a variance from nodes' models in place of shadows
MIN_DEVIATION = 1e-6  # avoids infinite confidence if all shadows agree
ModelFactory = Callable[[int], nn.Module]  # an untrained model, from a seed
Record = dict[str, Any]  # as JSON has them; an interval is a value with its low and high end
PROXY_TRAINING = LocalConfig(epochs=40, batch=64, smoothing=0.0)
"""Training of a proxy, longer than that of a node, as responses contain more than labels."""


# --- scores ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RecordLogits:
    """Labels of some records, and the logits of models for them.

    Logarithms of probabilities may replace logits, as a constant added to all logits of an input changes
    nothing.

    Args:
        target: logits of the attacked model, ``(N, classes)``.
        shadows: logits of the shadow models, ``(M, N, classes)``; M may be 0.
        inside: which shadow learned from which record, ``(M, N)`` bool.
        labels: classes of the records, ``(N,)`` int64.

    Raises:
        ArgumentError: a logit is NaN or infinite.
    """

    target: torch.Tensor
    shadows: torch.Tensor
    inside: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        for name, logits in (("target", self.target), ("shadows", self.shadows)):
            if not bool(torch.isfinite(logits).all()):
                raise ArgumentError(name, "NaN or infinity", "finite logits")


def logit_confidence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """phi(p) = log(p / (1 - p)) of the label's probability, Carlini et al. Section V-B, which is nearly
    Gaussian.

    It maps logits ``(..., N, classes)`` to z_y - log sum_{c != y} exp(z_c), ``(..., N)`` float64, which is
    exact for p near 1.

    >>> logit_confidence(torch.tensor([[3.0, 1.0]]), torch.tensor([0]))  # of two classes: the difference
    tensor([2.], dtype=torch.float64)
    """
    logits = logits.double()
    is_label = F.one_hot(labels, logits.shape[-1]).bool().expand(logits.shape)
    others = logits.masked_fill(is_label, -torch.inf).logsumexp(-1)
    return _label_entry(logits, labels) - others


def loss_attack(records: RecordLogits) -> torch.Tensor:
    """Negative cross-entropy of the target, ``(N,)``: Yeom et al., who classify records with small loss as
    members.
    """
    return _label_entry(records.target.double().log_softmax(-1), records.labels)


def lira_attack(records: RecordLogits, per_record: bool | None = None) -> torch.Tensor:
    """LiRA online, Carlini et al. Algorithm 1: the log likelihood ratio, ``(N,)``.

    A record's confidence phi is Gaussian over models that learned from it, and another Gaussian over models
    that did not: log N(phi; mu_in, sigma_in^2) - log N(phi; mu_out, sigma_out^2).

    Args:
        records: with shadows inside and outside for each record.
        per_record: separate variances for each record, as in the paper; None: from 64 shadows on. With
            fewer, all records share one variance inside and one outside (their Section VI), and the
            difference of a record's two means is shrunk towards the average difference by the uncertainty
            of so few shadows (not in the paper; Efron and Morris, "Stein's Estimation Rule and Its
            Competitors", JASA 1973).

    Raises:
        ArgumentError: too few shadows: one inside and one outside for each record, and two where a variance
            is needed.
    """
    shadows, per_record = (
        logit_confidence(records.shadows, records.labels),
        _per_record(per_record, records),
    )  # (M, N)
    target_confidence = logit_confidence(records.target, records.labels)
    mu_in, sigma_in = _fit_gaussian(shadows, records.inside, "inside", per_record)
    mu_out, sigma_out = _fit_gaussian(shadows, ~records.inside, "outside", per_record)
    if not per_record:
        error = sigma_in.square() / records.inside.sum(0) + sigma_out.square() / (~records.inside).sum(0)
        difference, center = _shrink(mu_in - mu_out, error), (mu_in + mu_out) / 2
        mu_in, mu_out = center + difference / 2, center - difference / 2
    return _log_normal(target_confidence, mu_in, sigma_in) - _log_normal(target_confidence, mu_out, sigma_out)


def lira_offline_attack(records: RecordLogits, per_record: bool | None = None) -> torch.Tensor:
    """LiRA offline: confidence of a record compared with that of models that did not learn from it, ``(N,)``.

    Carlini et al. Eq. 4: Pr[Z <= phi], Z from N(mu_out, sigma_out^2), which increases with the returned
    score, (phi - mu_out) / sigma_out. Shadows inside are not used; ``per_record`` is that of
    :func:`lira_attack`.

    Raises:
        ArgumentError: too few shadows outside.
    """
    shadows = logit_confidence(records.shadows, records.labels)
    mean, deviation = _fit_gaussian(shadows, ~records.inside, "outside", _per_record(per_record, records))
    return (logit_confidence(records.target, records.labels) - mean) / deviation


def coop_lira_attack(target: torch.Tensor, nodes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Co-op LiRA: LiRA offline, with the other nodes' models in place of shadow models, ``(N,)``.

    Shi, Ouyang, Wang, PoPETs 2025. A record of one node is in no other node's data, so the other nodes'
    models are models that did not learn from it: no shadow model is trained. As in their published code
    (``mia.py``), the score increases with Pr[Z <= phi], Z from N(mu, sigma^2) of the other nodes'
    confidences. That code evaluates the nodes' models, with separate variances for each record, over nine
    other nodes; here they may be copies that the server distilled, and fewer than 64 nodes share one
    variance, as in :func:`lira_offline_attack`.

    Args:
        target: logits of the attacked node's model, ``(N, classes)``.
        nodes: logits of the other nodes' models, ``(K - 1, N, classes)``, K - 1 from 2 up.
        labels: classes of the records, ``(N,)`` int64.

    Raises:
        ArgumentError: fewer than two other nodes, as variance is unknown; a logit is NaN or infinite.

    >>> logits = torch.tensor([[[3.0, 0.0]], [[0.0, 0.0]], [[2.0, 0.0]]])  # confidences 3; 0 and 2
    >>> coop_lira_attack(logits[0], logits[1:], torch.tensor([0]))  # (3 - 1) / sqrt(2)
    tensor([1.4142], dtype=torch.float64)
    """
    if len(nodes) < MIN_OTHER_NODES:
        raise ArgumentError("nodes", len(nodes), f"{MIN_OTHER_NODES} or more, as variance is unknown")
    never_inside = torch.zeros(nodes.shape[:2], dtype=torch.bool)
    return lira_offline_attack(RecordLogits(target, nodes, never_inside, labels))


def rmia_attack(
    records: RecordLogits,
    population: RecordLogits,
    *,
    gamma: float = 2.0,
    alpha: float = 0.3,
    temperature: float = 2.0,
) -> torch.Tensor:
    """RMIA: share of the population over which a record is much likelier to be a member, ``(N,)`` 0 .. 1.

    With r(x) = Pr(x | theta) / Pr(x), the target's probability of the label over that of a random model,
    the score is Pr_z[r(x) / r(z) >= gamma] over records z of the population. Pr(x) is the mean over as many
    shadows that learned from x as that did not. No model learned from z, so that Pr(z) is corrected to ((1
    + alpha) Pr_out(z) + 1 - alpha) / 2, as Pr_in(z) is about alpha Pr_out(z) + 1 - alpha.

    Equal scores are ordered by r(x), by less than one record of the population.

    Args:
        records: with shadows inside and outside for each record; one of each suffices.
        population: further records, in no model's training data, with logits of the same models.
        gamma: likelihood ratio, above 0.
        alpha: 0 .. 1, near 1 if models hardly gain from a record.
        temperature: divides logits, above 0; above 1, overfitted models differ more.

    Raises:
        ArgumentError: too few shadows.
    """
    record_probabilities, population_probabilities = (
        _label_probability(view.shadows, view, temperature) for view in (records, population)
    )  # (M, N), (M, Z)
    record_marginal = (
        _masked_mean(record_probabilities, records.inside, "inside")
        + _masked_mean(record_probabilities, ~records.inside, "outside")
    ) / 2
    population_marginal = (
        (1 + alpha) * _masked_mean(population_probabilities, ~population.inside, "outside") + 1 - alpha
    ) / 2
    ratio = _log_likelihood_ratio(records, record_marginal, temperature)  # (N,)
    population_ratios = (
        _log_likelihood_ratio(population, population_marginal, temperature).sort().values
    )  # (Z,)
    exceeded = torch.searchsorted(population_ratios, ratio - torch.tensor(gamma).double().log(), right=True)
    return (exceeded + ratio.sigmoid()) / (len(population_ratios) + 1)


def _label_probability(logits: torch.Tensor, records: RecordLogits, temperature: float) -> torch.Tensor:
    """Probability of each record's label, ``(..., N)``."""
    return _label_entry((logits.double() / temperature).log_softmax(-1), records.labels).exp()


def _log_likelihood_ratio(records: RecordLogits, marginal: torch.Tensor, temperature: float) -> torch.Tensor:
    """log r(x) = log(Pr(x | theta) / Pr(x)), ``(N,)``."""
    log_probability = _label_entry((records.target.double() / temperature).log_softmax(-1), records.labels)
    return log_probability - marginal.clamp(min=torch.finfo(torch.float64).tiny).log()


def _label_entry(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Select the entry of each record's label: ``(..., N, classes)`` to ``(..., N)``."""
    index = labels.expand(values.shape[:-1]).unsqueeze(-1)
    return values.gather(-1, index).squeeze(-1)


def _per_record(per_record: bool | None, records: RecordLogits) -> bool:
    return len(records.shadows) >= MIN_SHADOWS_PER_RECORD if per_record is None else per_record


def _masked_mean(values: torch.Tensor, mask: torch.Tensor, side: str, min_count: int = 1) -> torch.Tensor:
    """Mean of each record over the masked shadows, ``(M, N)`` and ``(M, N)`` to ``(N,)``."""
    counts = mask.sum(0)
    smallest_count = int(counts.min()) if counts.numel() else min_count
    if smallest_count < min_count:
        raise ArgumentError(f"shadows {side}", smallest_count, f"{min_count} or more for each record")
    return values.where(mask, 0.0).sum(0) / counts


def _fit_gaussian(
    values: torch.Tensor, mask: torch.Tensor, side: str, per_record: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each record over the masked shadows: ``(N,)`` each."""
    mean = _masked_mean(values, mask, side, 2 if per_record else 1)
    squares = (values - mean).square().where(mask, 0.0).sum(0)  # (N,)
    degrees_of_freedom = mask.sum(0) - 1
    if not per_record:
        squares, degrees_of_freedom = squares.sum(), degrees_of_freedom.sum()
        if int(degrees_of_freedom) == 0:
            raise ArgumentError(f"shadows {side}", 1, "2 or more for some record, as variance is unknown")
    return mean, (squares / degrees_of_freedom).sqrt().clamp(min=MIN_DEVIATION).expand(mean.shape)


def _shrink(estimates: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Shrink estimates ``(N,)`` of known variance to their mean; less if they vary more than their errors."""
    centered = estimates - estimates.mean()
    spread = (centered.square().mean() - error.mean()).clamp(min=0)
    return estimates.mean() + spread / (spread + error) * centered


def _log_normal(x: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Log density of a Gaussian, up to a constant."""
    return -((x - mean) / deviation).square() / 2 - deviation.log()


# --- shadow models ---------------------------------------------------------------------------------


def shadow_halves(records: int, models: int, seed: int) -> torch.Tensor:
    """Assign records to shadow models: ``(models, records)`` bool, each record in half of the models.

    Models 2i and 2i + 1 share the records at random; for an odd number, the second has one more.

    >>> inside = shadow_halves(6, 4, 0)
    >>> inside.sum(0).tolist(), inside.sum(1).tolist()
    ([2, 2, 2, 2, 2, 2], [3, 3, 3, 3])
    """
    inside = torch.zeros(models, records, dtype=torch.bool)
    for pair in range(models // 2):
        order = torch.randperm(records, generator=torch_generator(seed, "shadow halves", pair))
        inside[2 * pair, order[: records // 2]] = True
        inside[2 * pair + 1] = ~inside[2 * pair]
    return inside


def train_shadows(
    make: ModelFactory,
    pool: TensorData | Sequence[TensorData],
    inside: torch.Tensor,
    task: Task,
    local: LocalConfig,
    seed: int,
    *,
    compute: Compute | None = None,
    work: TrainStep | None = None,
) -> list[nn.Module]:
    """Train all shadow models at once, by the local training of a node.

    Each model has separate initial weights, batches and augmentation, which follow from the seed.

    Args:
        make: creates an untrained model from a seed; all of one architecture.
        pool: the records; or one pool per model, of equal sizes, if models learn different targets of them.
        inside: which model learns from which record, ``(M, N)`` bool.
        task: of the target.
        local: training options of the target, as far as the attacker knows them.
        seed: of all random numbers.
        compute: device and precision.
        work: one training step; None: a step on the task's loss.

    Raises:
        ArgumentError: a model without a record.
    """
    if len(inside) and not bool(inside.any(1).all()):
        raise ArgumentError("inside", "a model without a record", "one record or more for each model")
    compute = compute or Compute()
    pools = [pool] * len(inside) if isinstance(pool, TensorData) else pool
    nodes = []
    for model, (data, row) in enumerate(zip(pools, inside, strict=True)):
        name = f"shadow-{model}"
        network = compute.to_device(make(derive(seed, "shadow", model)))
        records = data.subset(row.nonzero().flatten().to(data.inputs.device)).to(compute.device)
        nodes.append(Node(name, records, network, Gate(name, PolicyConfig(), AuditLog()), seed))
    local_training.attach_optimizers(nodes, local)
    groups = group_nodes(nodes, should_stack(compute, nodes))

    def learn(group: Sequence[Node]) -> None:
        local_training.train(group, task, local, compute, train_step=work)

    kinds = [("shadow", work is None, stacking_key(group[0].model)) for group in groups]
    compute.workers.map(learn, groups, kinds, [uses_global_rng(group[0].model) for group in groups])
    return [node.model for node in nodes]


def train_proxies(
    make: ModelFactory,
    inputs: torch.Tensor,
    responses: torch.Tensor,
    shadows: Sequence[nn.Module],
    task: Task,
    seed: int,
    *,
    others: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    local: LocalConfig = PROXY_TRAINING,
    compute: Compute | None = None,
) -> list[nn.Module]:
    """Distill a proxy of the node from its responses, one of each shadow from its outputs for the same
    inputs, and one of each other node.

    The loss is half the mean squared difference of centered logits, the limit of distillation at high
    temperature, which also copies the outputs for unlikely classes.

    Args:
        make: creates an untrained proxy, of the node's architecture as far as that is known.
        inputs: queried inputs ``(Q, ...)``.
        responses: the node's logits ``(Q, classes)``.
        shadows: the attacker's own models.
        task: of the target.
        seed: of all random numbers.
        others: queried inputs and responses of each other node, as many as of the node.
        local: training options.
        compute: device and precision.

    Raises:
        ArgumentError: no queries, or a different number of responses.
    """
    for queries, outputs in ((inputs, responses), *others):
        if not len(queries) == len(outputs) == len(inputs) or not len(inputs):
            raise ArgumentError("responses", tuple(outputs.shape), f"({len(inputs)}, classes)")
    compute = compute or Compute()
    queried = inputs.to(compute.device)
    pairs = [(inputs, responses)]
    pairs += [(inputs, predict(shadow, queried, compute).cpu()) for shadow in shadows]
    pools = [TensorData(queries, outputs.float()) for queries, outputs in (*pairs, *others)]
    all_records = torch.ones(len(pools), len(inputs), dtype=torch.bool)

    def work(group: NodeGroup, step: int, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = group.module("model")(x)  # (G, B, classes)
        distances = distillation_loss(outputs.flatten(0, 1), targets.flatten(0, 1), math.inf)
        losses = distances.view(len(outputs), -1).mean(1)
        group.step("model", losses)
        return losses

    return train_shadows(make, pools, all_records, task, local, seed, compute=compute, work=work)


# --- metrics ---------------------------------------------------------------------------------------


def attack_metrics(scores: torch.Tensor, inside: torch.Tensor, confidence: float = CONFIDENCE) -> Record:
    """Return all metrics of an attack from scores ``(N,)``, higher for likelier members, and the mask of
    members ``(N,)``.

    ``auc`` is :func:`auc_with_interval`, ``at`` holds :func:`tpr_at_fpr` at low false positive rates.
    """
    members, others = scores[inside], scores[~inside]
    at_low_rates = [tpr_at_fpr(members, others, rate, confidence) for rate in LOW_RATES]
    return {"auc": auc_with_interval(members, others, confidence), "at": at_low_rates}


def auc_with_interval(members: torch.Tensor, others: torch.Tensor, confidence: float = CONFIDENCE) -> Record:
    """Area under the ROC curve, with DeLong's interval.

    It is the probability that a member's score exceeds another record's. DeLong, DeLong, Clarke-Pearson,
    Biometrics 1988: V10 of a member is the share of others below it, V01 of another record the share of
    members above it, with ties as half. The AUC is the mean of either, its variance var(V10) / n + var(V01)
    / n'. They are computed from ranks as in Sun and Xu, IEEE Signal Processing Letters 2014.

    The interval is computed on the scale of log(A / (1 - A)), so that it stays within 0 .. 1. If the
    variance is 0, it is the wide interval of Clopper and Pearson for min(n, n') pairs without common
    records.

    >>> auc_with_interval(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))["value"]  # pairs: 1, 1/2, 1, 1
    0.875
    """
    from scipy.stats import rankdata

    members, others = members.double(), others.double()
    n, m = len(members), len(others)
    ranks, member_ranks, other_ranks = (
        torch.from_numpy(rankdata(scores)) for scores in (torch.cat([members, others]), members, others)
    )
    v10 = (ranks[:n] - member_ranks) / m  # V10, (n,)
    v01 = 1 - (ranks[n:] - other_ranks) / n  # V01, (m,)
    area = float(v10.mean())
    variance = float(v10.var() / n + v01.var() / m) if min(n, m) > 1 else 0.0
    if not 0 < area < 1 or variance < 1e-15:
        pairs = min(n, m)
        return _interval(area, _clopper_pearson(area * pairs, pairs, confidence))
    from scipy.special import expit, logit, ndtri

    margin = float(ndtri((1 + confidence) / 2)) * math.sqrt(variance) / (area * (1 - area))
    return _interval(area, (float(expit(logit(area) - margin)), float(expit(logit(area) + margin))))


def tpr_at_fpr(
    members: torch.Tensor, others: torch.Tensor, rate: float, confidence: float = CONFIDENCE
) -> Record:
    """True positive rate at a false positive rate, without interpolation.

    A record is accused if its score exceeds the threshold. Of n' others, at most floor(rate n') are
    ``allowed`` to be accused, and so many are ``accused``, fewer where scores are equal. A rate of 0.1 %
    with fewer than 1000 others thus means none at all. ``true_positives`` is the rate of members ``found``,
    ``false_positives`` that of the accused, each with its Clopper-Pearson interval at the given threshold;
    the latter may exceed ``rate``.

    >>> at = tpr_at_fpr(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 1.5, 1.0]), 0.25)
    >>> at["allowed"], at["accused"], at["found"]  # above 1.5 are one other and two members
    (1, 1, 2)
    """
    members, others = members.double(), others.double()
    n, m = len(members), len(others)
    allowed = math.floor(rate * m + 1e-9)  # 0.29 * 100 is 28.999999999999996
    threshold = float(others.sort(descending=True).values[allowed]) if allowed < m else -math.inf
    accused, found = int((others > threshold).sum()), int((members > threshold).sum())
    if allowed == m:  # all records, also those with score -inf
        accused, found = m, n
    return {
        "rate": rate,
        "allowed": allowed,
        "accused": accused,
        "found": found,
        "members": n,
        "others": m,
        "true_positives": _interval(found / n, _clopper_pearson(found, n, confidence)),
        "false_positives": _interval(accused / m, _clopper_pearson(accused, m, confidence)),
    }


def _interval(value: float, ends: tuple[float, float]) -> Record:
    return {"value": value, "low": ends[0], "high": ends[1]}


def _clopper_pearson(k: float, n: int, confidence: float) -> tuple[float, float]:
    """Exact two-sided interval of a probability whose event occurred k times in n."""
    error = (1 - confidence) / 2
    return 1 - clopper_pearson_upper(n - math.floor(k), n, error), clopper_pearson_upper(
        math.ceil(k), n, error
    )
