"""What nodes upload, as one, and how a server distils local generators and heads into the global ones.

Symbols and equation numbers are those of FedMD-CG, see :mod:`fedstill.methods._generators`.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedstill.models.vector import load_vector
from fedstill.node.group import Bench


def uploaded(like: nn.Module, vectors: torch.Tensor) -> Bench:
    """Networks like one, with the parameters that K nodes uploaded, ``(K, P)``: as used, never trained."""
    bench = Bench([copy.deepcopy(like) for _ in vectors])
    bench.train(False)
    for module, vector in zip(bench.modules, vectors, strict=True):
        load_vector(module, vector)
    return bench


class Uploads:
    """The generators and heads that K nodes uploaded, evaluated as one: ``(K, B, ...)``.

    Args:
        G, D: networks of the architectures that nodes have.
        generators, heads: the nodes' parameters, ``(K, P)`` each.
    """

    def __init__(self, G: nn.Module, D: nn.Module, generators: torch.Tensor, heads: torch.Tensor) -> None:
        self.generators, self.heads = uploaded(G, generators), uploaded(D, heads)

    def features(self, c: torch.Tensor) -> torch.Tensor:
        """G_i(z, y): ``c = [z; y]`` (B, q + C) to ``(K, B, p)``."""
        return self.generators(c.expand(len(self.generators.modules), *c.shape))

    def judged(self, f: torch.Tensor) -> torch.Tensor:
        """D_i of features ``(K, B, p)``: ``(K, B, C)``."""
        return self.heads(f)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``KL(softmax(p) || softmax(q))`` of logits ``(..., C)``: ``(...)``, in nats.

    >>> round(kl(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])).item(), 4)
    0.1201
    """
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)  # small values have many digits
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def crossed(uploads: Uploads, G: nn.Module, D: nn.Module, c: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Eq. 10 and 11: L_kl,1, L_kl,2 and L_kl,3, means over a batch: ``(3,)``.

    Gradients flow to G and D alone. In L_kl,2 only D learns, in L_kl,3 only G.

    Args:
        uploads: local generators G_i and heads D_i.
        G, D: the global ones.
        c: ``[z; y]`` (B, q + C).
        tau: tau_{i, y} for each example's label, ``(K, B)``.
    """
    with torch.no_grad():
        f_i = uploads.features(c)  # G_i(z, y)  (K, B, p)
        d_i = uploads.judged(f_i)  # D_i(G_i(z, y))  (K, B, C)
    f = G(c)  # G(z, y)  (B, p)
    d_g = D(f).expand_as(d_i)  # D(G(z, y))
    d_ig = D(f_i.flatten(0, 1)).view_as(d_i)  # D(G_i(z, y))
    d_gi = uploads.judged(f.expand_as(f_i))  # D_i(G(z, y))
    return torch.stack([(tau * kl(d, d_i)).sum(0).mean() for d in (d_g, d_ig, d_gi)])


def ensembled(
    uploads: Uploads, G: nn.Module, D: nn.Module, c: torch.Tensor, pi: torch.Tensor
) -> torch.Tensor:
    """FedCG's server loss: KL from the weighted mean of rho(D_i(G_i)) to rho(D(G)), a mean over a batch.

    Args:
        uploads: local generators G_i and heads D_i.
        G, D: the global ones, to which gradients flow.
        c: ``[z; y]`` (B, q + C).
        pi: the nodes' weights ``(K,)``, summing to 1.
    """
    with torch.no_grad():
        d_i = uploads.judged(uploads.features(c))  # (K, B, C)
        teacher = torch.tensordot(pi, d_i.softmax(-1), 1)  # (B, C)
        log_teacher = teacher.clamp_min(torch.finfo(teacher.dtype).tiny).log()
    return kl(log_teacher, D(G(c))).mean()
