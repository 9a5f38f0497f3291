"""Networks that map a text to class logits: token ids ``(B, L)``, 0 for padding, to ``(B, classes)``.

Plain products of matrices throughout, so that nodes can be stacked and gradients taken example by example
(``torch.nn.MultiheadAttention`` allows neither), and no dropout, so that nothing is drawn.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.models.extractor_head import Split

PADDING = 0
MASKED_SCORE = -1e9  # what padding weighs in a softmax; finite, as of padding alone all weigh the same
HEADS = 4
DEPTH = 2


class Tokens(nn.Module):
    """Learned vectors of token ids, ``(B, L)`` to ``(B, L, width)``."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        # Small first vectors: a rare word should hardly count before it has been learned.
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * 0.03)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids."""
        return F.embedding(ids, self.weight)


def masked_mean(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The mean over a text's own tokens: ``(B, L, D)`` and ``(B, L)`` in 0..1 to ``(B, D)``; none gives 0.

    >>> x = torch.tensor([[[1.0], [3.0], [100.0]]])
    >>> masked_mean(x, torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([[2.]])
    """
    return (x * seen.unsqueeze(2)).sum(1) / seen.sum(1, keepdim=True).clamp_min(1)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017) that padding has no part in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Linear(width, 3 * width)
        self.outside = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """``(B, L, D)``, of whose tokens ``seen`` ``(B, L)`` are 1, to ``(B, L, D)``."""
        count, length, width = x.shape
        parts = self.inside(x).view(count, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, L, D / H) each
        scores = query @ key.transpose(2, 3) / math.sqrt(width // HEADS)  # (B, H, L, L)
        weights = (scores + MASKED_SCORE * (1 - seen)[:, None, None]).softmax(3)
        mixed: torch.Tensor = self.outside((weights @ value).transpose(1, 2).reshape(count, length, width))
        return mixed


class Block(nn.Module):
    """Attention and a network of one hidden layer, each on normalized input and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.hidden, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """``(B, L, D)`` to ``(B, L, D)``."""
        x = x + self.attention(self.norm1(x), seen)
        changed: torch.Tensor = x + self.out(F.gelu(self.hidden(self.norm2(x))))
        return changed


class TextEncoder(nn.Module):
    """A text as one vector: tokens and positions, blocks, the mean over the text's own tokens."""

    def __init__(self, length: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = Tokens(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``(B, L)`` int64, L at most the length that it was made for, to ``(B, D)``."""
        seen = (ids != PADDING).float()
        x = self.tokens(ids) + self.positions[: ids.shape[1]]  # (B, L, D)
        for block in self.blocks:
            x = block(x, seen)
        return masked_mean(self.norm(x), seen)


class Transformer(Split):
    """A small transformer encoder, trained from scratch: 2 blocks with normalized inputs, 4 heads.

    Args:
        shape: ``(L,)``, tokens of a text at most.
        width: values of a token, a multiple of 4.
        vocabulary: how many token ids there are, padding among them.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int, width: int = 64) -> None:
        width = max(width // HEADS, 1) * HEADS
        super().__init__(TextEncoder(shape[0], vocabulary, width), nn.Linear(width, classes))


class BagEncoder(nn.Module):
    """A text as the mean of its tokens' vectors, whatever their order, and one hidden layer."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = Tokens(vocabulary, width)
        self.hidden = nn.Linear(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``(B, L)`` int64 to ``(B, D)``."""
        return torch.relu(self.hidden(masked_mean(self.tokens(ids), (ids != PADDING).float())))


class Bag(Split):
    """The mean of a text's word vectors, one hidden layer, one linear layer. Takes texts of any length."""

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int, width: int = 64) -> None:
        super().__init__(BagEncoder(vocabulary, width), nn.Linear(width, classes))
