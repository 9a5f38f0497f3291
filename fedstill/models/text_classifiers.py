"""Networks for texts: token ids ``(B, L)``, padded with 0, to class logits ``(B, classes)``.

They consist of plain matrix products, so that nodes can be stacked and gradients computed per example
(``torch.nn.MultiheadAttention`` supports neither). There is no dropout, so nothing is random.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.models.extractor_head import Split

PADDING = 0
MASKED_SCORE = -1e9  # attention score of padding; finite, so that a text of padding only has no NaN
HEADS = 4
DEPTH = 2


class Tokens(nn.Module):
    """Embedding of token ids: ``(B, L)`` to ``(B, L, width)``."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        # Small initial vectors: an untrained rare word should have little influence.
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * 0.03)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors of token ids."""
        return F.embedding(ids, self.weight)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over a text's tokens without padding: ``(B, L, D)`` and mask ``(B, L)`` to ``(B, D)``.

    The mean of a text without tokens is 0.

    >>> x = torch.tensor([[[1.0], [3.0], [100.0]]])
    >>> masked_mean(x, torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([[2.]])
    """
    return (x * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017) that ignores padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Linear(width, 3 * width)
        self.outside = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Map ``(B, L, D)`` to ``(B, L, D)``; ``mask`` ``(B, L)`` is 1 for tokens and 0 for padding."""
        count, length, width = x.shape
        parts = self.inside(x).view(count, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, L, D / H) each
        scores = query @ key.transpose(2, 3) / math.sqrt(width // HEADS)  # (B, H, L, L)
        weights = (scores + MASKED_SCORE * (1 - mask)[:, None, None]).softmax(3)
        mixed: torch.Tensor = self.outside((weights @ value).transpose(1, 2).reshape(count, length, width))
        return mixed


class Block(nn.Module):
    """Pre-norm transformer block: attention and an MLP with one hidden layer, each with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.hidden, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Map ``(B, L, D)`` to ``(B, L, D)``."""
        x = x + self.attention(self.norm1(x), mask)
        y: torch.Tensor = x + self.out(F.gelu(self.hidden(self.norm2(x))))
        return y


class TextEncoder(nn.Module):
    """Encoder of a text as one vector: tokens and positions, blocks, and the mean over tokens."""

    def __init__(self, length: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = Tokens(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ``(B, L)`` int64 to ``(B, D)``; L is at most the length given at construction."""
        mask = (ids != PADDING).float()
        x = self.tokens(ids) + self.positions[: ids.shape[1]]  # (B, L, D)
        for block in self.blocks:
            x = block(x, mask)
        return masked_mean(self.norm(x), mask)


class Transformer(Split):
    """Small transformer encoder without pretraining: 2 pre-norm blocks with 4 heads.

    Args:
        shape: ``(L,)``, the maximum number of tokens.
        classes: number of logits.
        vocabulary: number of token ids, padding included.
        width: size of a token vector, rounded down to a multiple of 4.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int, width: int = 64) -> None:
        width = max(width // HEADS, 1) * HEADS
        super().__init__(TextEncoder(shape[0], vocabulary, width), nn.Linear(width, classes))


class BagEncoder(nn.Module):
    """Encoder of a text as the mean of its token vectors, in any order, followed by a hidden layer."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = Tokens(vocabulary, width)
        self.hidden = nn.Linear(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ``(B, L)`` int64 to ``(B, D)``."""
        return torch.relu(self.hidden(masked_mean(self.tokens(ids), (ids != PADDING).float())))


class Bag(Split):
    """Bag of words: the mean of a text's word vectors, one hidden layer, one linear layer. Texts may have any
    length.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int, width: int = 64) -> None:
        super().__init__(BagEncoder(vocabulary, width), nn.Linear(width, classes))
