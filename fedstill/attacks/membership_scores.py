"""Who was in the training data: scores of records from a model's outputs, higher for likelier members.

Three attacks, by what they compare a target's output about a record with:

- :func:`loss`: nothing. Yeom, Giacomelli, Fredrikson, Jha, "Privacy Risk in Machine Learning: Analyzing the
  Connection to Overfitting", CSF 2018, Adversary 2.
- :func:`lira`, :func:`lira_offline`: the outputs of shadow models that learned, or did not learn, from the
  very record. Carlini, Chien, Nasr, Song, Terzis, Tramer, "Membership Inference Attacks From First
  Principles", IEEE S&P 2022, Algorithm 1.
- :func:`rmia`: the same, and other records of the population. Zarifzadeh, Liu, Shokri, "Low-Cost High-Power
  Membership Inference Attacks", ICML 2024, Section 3.

All are computed in float64: the outputs of an overfitted model differ where float32 says 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedstill.core.errors import ArgumentError

MANY = 64  # shadow models from which on each record has a Gaussian of its own altogether
LEAST = 1e-6  # standard deviation: shadows that all say the same are not infinitely sure


@dataclass(frozen=True, eq=False)
class Seen:
    """What an attacker has of some records: their labels, and what models say about them.

    Probabilities serve in place of logits as their logarithms: nothing here depends on what is added to all
    logits of an input.

    Args:
        target: logits of the model that is attacked, ``(N, classes)``.
        shadows: logits of the attacker's own models, ``(M, N, classes)``; M may be 0.
        inside: which shadow learned from which record, ``(M, N)`` bool.
        labels: the records' classes, ``(N,)`` int64.

    Raises:
        ArgumentError: a logit that is NaN or infinite.
    """

    target: torch.Tensor
    shadows: torch.Tensor
    inside: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        for name, logits in (("target", self.target), ("shadows", self.shadows)):
            if not bool(torch.isfinite(logits).all()):
                raise ArgumentError(name, "NaN or infinity", "finite logits")


def confidence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """phi(p) = log(p / (1 - p)) of the label's probability, Carlini et al. Section V-B: nearly Gaussian.

    Of logits ``(..., N, classes)`` as z_y - log sum_{c != y} exp(z_c), ``(..., N)`` float64, which loses
    nothing where p is nearly 1.

    >>> confidence(torch.tensor([[3.0, 1.0]]), torch.tensor([0]))  # of two classes: the difference
    tensor([2.], dtype=torch.float64)
    """
    logits = logits.double()
    own = F.one_hot(labels, logits.shape[-1]).bool().expand(logits.shape)
    others = logits.masked_fill(own, -torch.inf).logsumexp(-1)
    return _of_label(logits, labels) - others


def loss(seen: Seen) -> torch.Tensor:
    """Minus the target's cross-entropy, ``(N,)``: Yeom et al., who call a record of little loss a member."""
    return _of_label(seen.target.double().log_softmax(-1), seen.labels)


def lira(seen: Seen, own: bool | None = None) -> torch.Tensor:
    """LiRA online, Carlini et al. Algorithm 1: the logarithm of their likelihood ratio, ``(N,)``.

    A record's confidence phi is Gaussian over models that learned from it, and another Gaussian over models
    that did not: log N(phi; mu_in, sigma_in^2) - log N(phi; mu_out, sigma_out^2).

    Args:
        seen: with shadows inside and outside for each record.
        own: each record has two Gaussians of its own, as in the paper; None: from 64 shadows on. With fewer
            all records share one variance inside and one outside (their Section VI), and a record's two means
            are drawn to their average distance by as much as so few shadows leave it unknown (not in the
            paper; Efron and Morris, "Stein's Estimation Rule and Its Competitors", JASA 1973).

    Raises:
        ArgumentError: too few shadows: one inside and one outside for each record, and two where a variance
            is to be told.
    """
    shadows, own = confidence(seen.shadows, seen.labels), _own(own, seen)  # (M, N)
    here = confidence(seen.target, seen.labels)
    mu_in, sigma_in = _gaussian(shadows, seen.inside, "inside", own)
    mu_out, sigma_out = _gaussian(shadows, ~seen.inside, "outside", own)
    if not own:
        error = sigma_in.square() / seen.inside.sum(0) + sigma_out.square() / (~seen.inside).sum(0)
        apart, middle = _shrunk(mu_in - mu_out, error), (mu_in + mu_out) / 2
        mu_in, mu_out = middle + apart / 2, middle - apart / 2
    return _log_normal(here, mu_in, sigma_in) - _log_normal(here, mu_out, sigma_out)


def lira_offline(seen: Seen, own: bool | None = None) -> torch.Tensor:
    """LiRA offline: how far a record's confidence lies above that of models that never saw it, ``(N,)``.

    Carlini et al. Eq. 4: Pr[Z <= phi], Z from N(mu_out, sigma_out^2), which rises with what is given here,
    (phi - mu_out) / sigma_out. Shadows inside are not looked at; ``own`` is that of :func:`lira`.

    Raises:
        ArgumentError: too few shadows outside.
    """
    shadows = confidence(seen.shadows, seen.labels)
    mean, deviation = _gaussian(shadows, ~seen.inside, "outside", _own(own, seen))
    return (confidence(seen.target, seen.labels) - mean) / deviation


def rmia(
    seen: Seen, population: Seen, *, gamma: float = 2.0, alpha: float = 0.3, temperature: float = 2.0
) -> torch.Tensor:
    """RMIA: than how many records of the population is this one far likelier to be a member? ``(N,)`` 0 .. 1.

    With r(x) = Pr(x | theta) / Pr(x), the target's probability of the label over that of a model at large,
    the score is Pr_z[r(x) / r(z) >= gamma] over records z of the population. Pr(x) is the mean over as many
    shadows that learned from x as that did not. No model has learned from z: what models say of it is put
    right, Pr(z) = ((1 + alpha) Pr_out(z) + 1 - alpha) / 2, as Pr_in(z) is about alpha Pr_out(z) + 1 - alpha.

    Equal scores are told apart by r(x), by less than one record of the population.

    Args:
        seen: the records; with shadows inside and outside for each. One each is enough.
        population: further records, in no model's training data, as the same models see them.
        gamma: how much likelier, above 0.
        alpha: 0 .. 1, near 1 where models hardly gain from a record.
        temperature: by which logits are divided, above 0; above 1, overfitted models differ more.

    Raises:
        ArgumentError: too few shadows.
    """
    told, apart = (_probability(of.shadows, of, temperature) for of in (seen, population))  # (M, N), (M, Z)
    at_large = (_mean(told, seen.inside, "inside") + _mean(told, ~seen.inside, "outside")) / 2
    beside = ((1 + alpha) * _mean(apart, ~population.inside, "outside") + 1 - alpha) / 2
    ratio = _relative(seen, at_large, temperature)  # (N,)
    others = _relative(population, beside, temperature).sort().values  # (Z,)
    beaten = torch.searchsorted(others, ratio - torch.tensor(gamma).double().log(), right=True)
    return (beaten + ratio.sigmoid()) / (len(others) + 1)


def _probability(logits: torch.Tensor, of: Seen, temperature: float) -> torch.Tensor:
    """Of each record's label, ``(..., N)``."""
    return _of_label((logits.double() / temperature).log_softmax(-1), of.labels).exp()


def _relative(of: Seen, at_large: torch.Tensor, temperature: float) -> torch.Tensor:
    """log r(x) = log(Pr(x | theta) / Pr(x)), ``(N,)``."""
    own = _of_label((of.target.double() / temperature).log_softmax(-1), of.labels)
    return own - at_large.clamp(min=torch.finfo(torch.float64).tiny).log()


def _of_label(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The entry of each record's label: ``(..., N, classes)`` to ``(..., N)``."""
    index = labels.expand(values.shape[:-1]).unsqueeze(-1)
    return values.gather(-1, index).squeeze(-1)


def _own(own: bool | None, seen: Seen) -> bool:
    return len(seen.shadows) >= MANY if own is None else own


def _mean(values: torch.Tensor, taken: torch.Tensor, where: str, least: int = 1) -> torch.Tensor:
    """Of each record over the shadows that are taken, ``(M, N)`` and ``(M, N)`` to ``(N,)``."""
    counts = taken.sum(0)
    fewest = int(counts.min()) if counts.numel() else least
    if fewest < least:
        raise ArgumentError(f"shadows {where}", fewest, f"{least} or more for each record")
    return values.where(taken, 0.0).sum(0) / counts


def _gaussian(
    values: torch.Tensor, taken: torch.Tensor, where: str, own: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each record over the shadows that are taken: ``(N,)`` each."""
    mean = _mean(values, taken, where, 2 if own else 1)
    squares = (values - mean).square().where(taken, 0.0).sum(0)  # (N,)
    freedom = taken.sum(0) - 1
    if not own:
        squares, freedom = squares.sum(), freedom.sum()
        if int(freedom) == 0:
            raise ArgumentError(f"shadows {where}", 1, "2 or more for some record, as variance is unknown")
    return mean, (squares / freedom).sqrt().clamp(min=LEAST).expand(mean.shape)


def _shrunk(apart: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Estimates ``(N,)`` of known variance, drawn to their mean; less where they differ beyond that error."""
    centred = apart - apart.mean()
    spread = (centred.square().mean() - error.mean()).clamp(min=0)
    return apart.mean() + spread / (spread + error) * centred


def _log_normal(x: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """The logarithm of a Gaussian's density, but for a constant."""
    return -((x - mean) / deviation).square() / 2 - deviation.log()
