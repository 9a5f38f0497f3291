"""The losses of critics and of whoever fools them.

FedIOD Eq. 2; binary cross-entropy with the generator's non-saturating form.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F

from fedstill.federation.contract import Answers
from fedstill.tasks import Task

GANForm = Literal["eq2", "bce"]


class HasForm(Protocol):
    """A method that says which form L_gan has."""

    @property
    def gan_form(self) -> GANForm:
        """As printed in FedIOD Eq. 2, or binary cross-entropy."""
        ...


def critic_loss(real: torch.Tensor, fake: torch.Tensor, config: HasForm) -> torch.Tensor:
    """What each D_k descends: it learns to be low on its own data and high on generated inputs (Eq. 2).

    The weight pi_k of Eq. 2 is left to the generator's side: at the node it would need the other
    nodes' sizes, and scales only one of the two terms.

    Args:
        real, fake: the critics' values before the sigmoid, ``(G, B, h, w)``.
        config: which form.

    Returns:
        ``(G,)``, a mean over batch and patches.
    """
    return (on_real(real, config) + on_fake(fake, config)).flatten(1).mean(1)


def on_real(d: torch.Tensor, config: HasForm) -> torch.Tensor:
    """What D_k loses where it looks at real data, value by value."""
    return d.sigmoid() if config.gan_form == "eq2" else F.softplus(d)


def on_fake(d: torch.Tensor, config: HasForm) -> torch.Tensor:
    """What D_k loses where it looks at what was generated, value by value."""
    return 1 - d.sigmoid() if config.gan_form == "eq2" else F.softplus(-d)


def doubts(d: torch.Tensor, config: HasForm) -> torch.Tensor:
    """What G loses for each image at each critic: ``(K, B, h, w)`` to ``(K, B)``, summed over patches.

    Descending D, as ascending 1 - D in Eq. 2; of binary cross-entropy the form that does not saturate.
    """
    return (d.sigmoid() if config.gan_form == "eq2" else F.softplus(d)).flatten(2).sum(2)


def fooled(
    method: Any, task: Task, answers: Answers, pi: torch.Tensor, z_bar: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """L_gan as G descends it (Eq. 2): each critic's doubts, weighed over nodes as ``gan_weights`` says.

    Args:
        method: with its options ``gan_form`` and ``gan_weights``.
        task: knows who holds the classes that x shows.
        answers: of the nodes about x.
        pi: shares of the data ``(K,)``.
        z_bar: ensembled answers ``(B, classes, ...)``.
        weights: of the nodes in them, ``(K, B or 1, classes)``.
    """
    if not method.critical:
        return torch.zeros((), device=z_bar.device)
    each = doubts(answers["critic"], method)  # (K, B)
    if method.gan_weights == "expertise":
        return (task.expertise(z_bar.detach(), weights) * each).sum(0).mean()
    if method.gan_weights == "average":
        return each.mean()
    return pi @ each.mean(1)
