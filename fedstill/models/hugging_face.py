"""Hugging Face models from a folder or from the hub: ``"hf:FOLDER"`` or ``"hf:distilbert-base-uncased"``.

Weights are read from safetensors files only, never from pickles, and code that comes with a model is not run.
A folder needs no network access. ``transformers`` is installed with the extra "text".
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError, format_option
from fedstill.core.registry import USER_CODE_ERRORS, first_line
from fedstill.models.weights_file import lacking_weights_error

PREFIX = "hf:"
PADDING = 0
LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    SafetensorError,
)  # raised by the library if a model cannot be loaded


def import_transformers(option: str, value: str) -> ModuleType:
    """Return the ``transformers`` library, which the value of an option needs.

    Raises:
        ArgumentError: it is not installed.
        ModelError: it cannot be imported, for example as it does not fit the installed torch.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        expected = "transformers to be installed: pip install 'fedstill[text]'"
        raise ArgumentError(option, value, expected) from error
    except USER_CODE_ERRORS as error:
        raise ModelError(
            f"{option} = {value}: transformers cannot be imported: {first_line(error)}"
        ) from error


def _load_pretrained(auto: Any, where: str, **options: Any) -> Any:
    """Load a model or tokenizer from a folder, or from a name on the hub.

    Names that look like paths are never looked up on the hub, and no code of the model is run.
    """
    local = where[:1] in ("/", ".", "~") or "\\" in where or Path(where).is_dir()
    folder = str(Path(where).expanduser()) if local else where
    return auto.from_pretrained(folder, trust_remote_code=False, local_files_only=local, **options)


def load_encoder(library: Any, folder: Path, spec: str) -> Any:
    """Load a model without a head from a folder, with all its weights.

    A pooler without weights is left out: the hidden states do not depend on it.

    Args:
        library: ``transformers``.
        folder: folder with ``config.json`` and ``model.safetensors``.
        spec: name of the model, for errors.

    Raises:
        ModelError: the model cannot be loaded, or the file lacks weights, which the library would sample.
    """
    verbosity = library.logging.get_verbosity()
    library.logging.set_verbosity_error()  # it prints a table of missing weights
    try:
        model, info = library.AutoModel.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        raise ModelError(f"backbone {spec} cannot be loaded: {first_line(error)}") from error
    finally:
        library.logging.set_verbosity(verbosity)
    absent = [name for name in sorted(info["missing_keys"]) if not name.startswith("pooler.")]
    if lacking := absent + [name for name, *_ in info["mismatched_keys"]]:
        raise lacking_weights_error(folder, lacking, spec)
    if len(absent) < len(info["missing_keys"]):
        model.pooler = None
    return model


def swap_padding(ids: torch.Tensor, padding: int) -> torch.Tensor:
    """Swap token id 0 and another padding id.

    The function is its own inverse.

    >>> swap_padding(torch.tensor([0, 5, 2, 1, 1]), 1)
    tensor([1, 5, 2, 0, 0])
    """
    if padding == PADDING:
        return ids
    zeros = torch.where(ids == padding, PADDING, ids)
    return torch.where(ids == PADDING, padding, zeros)


class HuggingFace(nn.Module):
    """Classifier of the library with logits ``(B, classes)`` as output.

    Inputs are texts ``(B, L)`` int64, padded with 0, or images ``(B, C, H, W)``.
    """

    def __init__(self, model: nn.Module, padding: int) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    @property
    def labels(self) -> list[str]:
        """Names of the outputs in the model's configuration, in order."""
        names = getattr(self.model.config, "id2label", None) or {}
        return [str(names[index]) for index in sorted(names)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        if x.is_floating_point():
            scores: torch.Tensor = self.model(pixel_values=x, return_dict=True).logits
            return scores
        return self._text_logits(x)

    def _text_logits(self, ids: torch.Tensor) -> torch.Tensor:
        # Always attend to the first token: a softmax over no token is undefined.
        attended = (ids != PADDING).index_fill(1, torch.zeros(1, dtype=torch.int64, device=ids.device), True)
        mask = attended.to(torch.int64)
        logits: torch.Tensor = self.model(
            input_ids=swap_padding(ids, self.padding), attention_mask=mask, return_dict=True
        ).logits
        return logits


def load_classifier(where: str, shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """Load a model with a classification head: its own head if it has the right number of classes, else a new
    one.

    Args:
        where: folder with ``config.json`` and ``model.safetensors``, or a name on the hub.
        shape: ``(L,)``, tokens of a text, or ``(C, H, W)`` of an image.
        classes: number of classes.
        vocabulary: number of token ids of the data, at most the model's. 0: inputs are images.

    Raises:
        ArgumentError: ``transformers`` is not installed.
        ModelError: the model does not exist, has no safetensors weights or has fewer tokens than the data.
    """
    spec = PREFIX + where
    library = import_transformers("model", spec)
    try:
        # A head with another number of classes is replaced.
        options = {"num_labels": classes, "ignore_mismatched_sizes": True, "use_safetensors": True}
        kind = "Sequence" if vocabulary else "Image"
        model = _load_pretrained(getattr(library, f"AutoModelFor{kind}Classification"), where, **options)
    except LOAD_ERRORS as error:
        raise ModelError(f"model {spec!r} cannot be loaded: {first_line(error)}") from error
    return (
        wrap_hugging_face(model) if not vocabulary else _adapt_text_model(model, spec, shape[0], vocabulary)
    )


def wrap_hugging_face(model: nn.Module) -> nn.Module:
    """Return a model of the library as a module whose output is logits. Other modules stay as they are."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return model
    padding = getattr(model.config, "pad_token_id", None)
    return HuggingFace(model, PADDING if padding is None else int(padding))


def _adapt_text_model(model: nn.Module, spec: str, length: int, vocabulary: int) -> nn.Module:
    """Return the adapted model if it has enough tokens and positions for the texts."""
    known = int(getattr(model.config, "vocab_size", 0) or 0)
    if known < vocabulary:
        raise ModelError(
            f"model {spec!r} has {known} tokens and the data have {vocabulary} "
            f"(expected {format_option('data.vocabulary', spec)})"
        )
    maximum = int(getattr(model.config, "max_position_embeddings", 0) or length) - _unused_position_count(
        model
    )
    if maximum < length:
        raise ModelError(
            f"model {spec!r} takes {maximum} tokens and texts have {length} "
            f"(expected {format_option('data.length', maximum)})"
        )
    return wrap_hugging_face(model)


def _unused_position_count(model: nn.Module) -> int:
    """Return the number of positions without tokens: RoBERTa's positions up to the padding id."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def tokenize(where: str, texts: Sequence[str], length: int) -> tuple[torch.Tensor, int]:
    """Tokenize texts with a model's own tokenizer.

    Args:
        where: folder with the tokenizer's files, or a name on the hub.
        texts: N texts.
        length: L; longer texts are truncated.

    Returns:
        Token ids ``(N, L)`` int64, padded with 0, and the number of token ids.

    Raises:
        ArgumentError: the tokenizer does not exist, has no vocabulary or no padding token, or
            ``transformers`` is not installed.
    """
    spec = PREFIX + where
    library = import_transformers("data.vocabulary", spec)
    try:
        tokenizer = _load_pretrained(library.AutoTokenizer, where)
    except Exception as error:  # the library raises Exception itself
        expected = f"a folder with a tokenizer, or its name on the hub ({first_line(error)})"
        raise ArgumentError("data.vocabulary", spec, expected) from error
    folder, files = Path(where).expanduser(), sorted(set(tokenizer.vocab_files_names.values()))
    if folder.is_dir() and files and not any((folder / name).is_file() for name in files):
        # The library would make one without words, to which all texts are equal.
        raise ArgumentError("data.vocabulary", spec, f"a folder with a tokenizer: {' or '.join(files)}")
    if tokenizer.pad_token_id is None:
        raise ArgumentError("data.vocabulary", spec, "a tokenizer with a padding token")
    encoded = tokenizer(list(texts), truncation=True, max_length=length, padding="max_length")["input_ids"]
    ids = torch.tensor(encoded, dtype=torch.int64).view(len(texts), length)
    return swap_padding(ids, int(tokenizer.pad_token_id)), len(tokenizer)
