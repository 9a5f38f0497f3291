"""Hugging Face models, from a folder or from the hub: ``"hf:FOLDER"`` or ``"hf:distilbert-base-uncased"``.

Weights are read from safetensors files only, never from pickles, and no code that a model brings along is
run. A folder needs no network. ``import_transformers`` comes with the extra "text".
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.registry import first_line

PREFIX = "hf:"
PADDING = 0
LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError)  # what the library raises of what it cannot load


def import_transformers(spec: str) -> ModuleType:
    """The library.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ArgumentError(spec, "transformers is not installed", "pip install 'fedstill[text]'") from error


def _load_pretrained(auto: Any, where: str, **options: Any) -> Any:
    """What one of the library's classes makes of a folder, or of a name on the hub.

    What looks like a path is never asked for on the hub, and no code of the model's is run.
    """
    local = where[:1] in ("/", ".", "~") or "\\" in where or Path(where).is_dir()
    folder = str(Path(where).expanduser()) if local else where
    return auto.from_pretrained(folder, trust_remote_code=False, local_files_only=local, **options)


def swap_padding(ids: torch.Tensor, padding: int) -> torch.Tensor:
    """Token ids with a padding of 0 from ids with another one, and the other way round: the two are swapped.

    >>> swap_padding(torch.tensor([0, 5, 2, 1, 1]), 1)
    tensor([1, 5, 2, 0, 0])
    """
    if padding == PADDING:
        return ids
    zeros = torch.where(ids == padding, PADDING, ids)
    return torch.where(ids == PADDING, padding, zeros)


class HuggingFace(nn.Module):
    """A classifier of the library as inputs to logits ``(B, classes)``: of texts ``(B, L)`` int64, 0 for
    padding, or of images ``(B, C, H, W)``."""

    def __init__(self, model: nn.Module, padding: int) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    @property
    def labels(self) -> list[str]:
        """What its configuration calls its outputs, in their order."""
        named = getattr(self.model.config, "id2label", None) or {}
        return [str(named[place]) for place in sorted(named)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        if x.is_floating_point():
            scores: torch.Tensor = self.model(pixel_values=x, return_dict=True).logits
            return scores
        return self._of_texts(x)

    def _of_texts(self, ids: torch.Tensor) -> torch.Tensor:
        # One token is always attended to: a softmax over none has no value.
        seen = (ids != PADDING).index_fill(1, torch.zeros(1, dtype=torch.int64, device=ids.device), True)
        mask = seen.to(torch.int64)
        logits: torch.Tensor = self.model(
            input_ids=swap_padding(ids, self.padding), attention_mask=mask, return_dict=True
        ).logits
        return logits


def load_classifier(where: str, shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """A model with a classification head: its own where it has one of so many classes, else a new one.

    Args:
        where: a folder with ``config.json`` and ``model.safetensors``, or a name on the hub.
        shape: ``(L,)``, tokens of a text, or ``(C, H, W)`` of an image.
        vocabulary: how many token ids there are; the model must know them all. 0: inputs are images.

    Raises:
        ArgumentError: ``import_transformers`` is not installed.
        ModelError: no such model, weights in no safetensors file, or fewer tokens than the data have.
    """
    spec = PREFIX + where
    library = import_transformers(spec)
    try:
        # A head of other classes gives way to a new one.
        how = {"num_labels": classes, "ignore_mismatched_sizes": True, "use_safetensors": True}
        kind = "Sequence" if vocabulary else "Image"
        model = _load_pretrained(getattr(library, f"AutoModelFor{kind}Classification"), where, **how)
    except LOAD_ERRORS as error:
        raise ModelError(f"model {spec!r} cannot be loaded: {first_line(error)}") from error
    return adapt(model) if not vocabulary else _check_text_model(model, spec, shape[0], vocabulary)


def adapt(model: nn.Module) -> nn.Module:
    """A model of the library as one that gives logits alone; any other module as it is."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return model
    padding = getattr(model.config, "pad_token_id", None)
    return HuggingFace(model, PADDING if padding is None else int(padding))


def _check_text_model(model: nn.Module, spec: str, length: int, vocabulary: int) -> nn.Module:
    """The same for texts, if it takes them."""
    known = int(getattr(model.config, "vocab_size", 0) or 0)
    if known < vocabulary:
        raise ModelError(
            f"model {spec!r} knows {known} tokens and the data have {vocabulary}: "
            f"allowed is data.vocabulary = {spec!r}, its own tokens"
        )
    most = int(getattr(model.config, "max_position_embeddings", 0) or length) - _unused_positions(model)
    if most < length:
        raise ModelError(
            f"model {spec!r} takes {most} tokens and texts have {length} (expected data.length = {most})"
        )
    return adapt(model)


def _unused_positions(model: nn.Module) -> int:
    """Return the number of positions that no token has: RoBERTa's, up to the padding's id."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def tokenize(where: str, texts: Sequence[str], length: int) -> tuple[torch.Tensor, int]:
    """Texts as a model's own tokenizer has them.

    Args:
        where: a folder with the tokenizer's files, or a name on the hub.
        texts: N of them.
        length: L; what is longer is cut.

    Returns:
        Token ids ``(N, L)`` int64, 0 for padding, and how many ids there are.

    Raises:
        ArgumentError: no such tokenizer, one that cannot pad, or ``import_transformers`` is not installed.
    """
    spec = PREFIX + where
    library = import_transformers(spec)
    try:
        tokenizer = _load_pretrained(library.AutoTokenizer, where)
    except LOAD_ERRORS as error:
        allowed = f"a folder with a tokenizer, or its name on the hub ({first_line(error)})"
        raise ArgumentError("data.vocabulary", spec, allowed) from error
    if tokenizer.pad_token_id is None:
        raise ArgumentError("data.vocabulary", spec, "a tokenizer with a token for padding")
    found = tokenizer(list(texts), truncation=True, max_length=length, padding="max_length")["input_ids"]
    ids = torch.tensor(found, dtype=torch.int64).view(len(texts), length)
    return swap_padding(ids, int(tokenizer.pad_token_id)), len(tokenizer)
