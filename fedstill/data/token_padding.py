"""Token ids of any tokenizer with the padding that fedstill's models expect: the id 0."""

from __future__ import annotations

from typing import Any

import torch

from fedstill.core.arrays import as_tensor
from fedstill.core.errors import DataError
from fedstill.models.hugging_face import PADDING, swapped

IDS, MASK = "input_ids", "attention_mask"


def zero_padded(ids: Any, mask: Any, what: str) -> torch.Tensor:
    """Token ids ``(N, L)`` in which exactly what an attention mask leaves out is 0.

    Args:
        ids: with a padding of any id, which is swapped with 0.
        mask: 1 for tokens, 0 for padding, ``(N, L)``; None: the padding is 0.
        what: they are, for errors.

    Raises:
        DataError: a mask of another shape; several ids of padding, or one that is a token, too; or no padding
            and a token 0, so that it is not known which id it is swapped with.

    >>> zero_padded([[0, 5, 2, 1, 1]], [[1, 1, 1, 0, 0]], "data")
    tensor([[1, 5, 2, 0, 0]])
    """
    if mask is None:
        return as_tensor(ids, f"{what}: {IDS!r}")
    tokens, seen = as_tensor(ids, f"{what}: {IDS!r}"), as_tensor(mask, f"{what}: {MASK!r}")
    if seen.shape != tokens.shape:
        shapes = f"{MASK} is {tuple(seen.shape)} and {IDS} {tuple(tokens.shape)}"
        raise DataError(f"{what}: {shapes} (expected one shape)")
    padding = sorted(set(tokens[seen == 0].tolist()))
    if len(padding) > 1:
        raise DataError(f"{what}: {MASK} leaves out the ids {padding[:8]} (expected one id, of the padding)")
    own = padding[0] if padding else PADDING
    if bool((tokens[seen != 0] == own).any()):
        hint = "" if padding else ", or a longer length, so that there is padding"
        raise DataError(f"{what}: {MASK} is 1 where {IDS} are {own} (expected an id of padding alone{hint})")
    return swapped(tokens, own)
