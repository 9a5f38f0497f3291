"""Texts as token ids, and data sets of texts with labels.

The words of a node's texts are secrets (a name, a rare drug), so a vocabulary built from them would be a
release. None is built here: words are hashed, which needs no vocabulary, or looked up in a public list. The
ids of a text depend on that text only. Token ids of other tokenizers are converted to fedstill's padding, the
id 0. Custom texts derive from :class:`TextData`.
"""

from __future__ import annotations

import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from fedstill.core.dataset import Column, DataSet, TensorData, as_tensor
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.name_normalization import normalize_class_names, normalize_columns
from fedstill.data.config import DataConfig
from fedstill.data.loading import PATIENT, SITE, UnsplitExamples, join_notes, prepare_data_set
from fedstill.data.raw_images import encode_labels
from fedstill.data.table_files import pop_split_column, read_csv
from fedstill.models.hugging_face import swap_padding
from fedstill.tasks import Targets, TaskConfig

IDS, MASK = "input_ids", "attention_mask"
PADDING, UNKNOWN = 0, 1
HASH = "hash"
MAX_WORDS = 10_000_000
DEFAULT_LENGTH = 64  # tokens per text
DEFAULT_BUCKETS = 16_384  # ids of hashed words
HF_PREFIX = "hf:"
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
Ids = npt.NDArray[np.int64]
Text = str | Sequence[str]  # a text, or its words


# --- words to token ids -------------------------------------------------------------------------------------


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words; each punctuation character is a word.

    >>> split_words("It wasn't GOOD, was it?")
    ['it', "wasn't", 'good', ',', 'was', 'it', '?']
    """
    return _WORD.findall(text.lower())


def hash_word(word: str, buckets: int) -> int:
    """Return the id 1..buckets of a word, by its CRC-32, independent of other words.

    Hashing needs no vocabulary, but does not hide text: guesses of a word can be verified.

    >>> hash_word("good", 8192), hash_word("bad", 8192)
    (3731, 6652)
    """
    return 1 + zlib.crc32(word.encode()) % buckets


def encode_words(texts: Sequence[Text], number: Callable[[str], int], length: int) -> Ids:
    """Encode texts as token ids ``(N, length)``, truncated or padded.

    Args:
        number: returns the id of a word.

    >>> encode_words(["A b, b", "", ["b"]], {"a": 7, "b": 9, ",": 2}.__getitem__, 3).tolist()
    [[7, 9, 2], [0, 0, 0], [9, 0, 0]]
    """
    ids = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        words = split_words(text) if isinstance(text, str) else text
        row[: len(words)] = [number(word) for word in words[:length]]
    return ids


def read_vocabulary(path: Path) -> list[str]:
    """Read a vocabulary from a file with one word per line; duplicates are dropped, case is ignored.

    Raises:
        ArgumentError: the file cannot be opened.
        DataError: it is not UTF-8, has no words, or has a line with several words.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        expected = f"{HASH}, a file of one word a line, or hf:folder"
        raise ArgumentError("data.vocabulary", str(path), expected) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (expected one word a line)") from error
    words = [line.strip().lower() for line in lines if line.strip()]
    invalid = next((word for word in words if len(word.split()) > 1), None)
    if invalid is not None:
        raise DataError(f"{path}: has a line {invalid[:60]!r} (expected one word a line)")
    if not words:
        raise DataError(f"{path}: holds no words (expected one or more, one a line)")
    return list(dict.fromkeys(words))


def encode_texts(
    texts: Sequence[Text], *, length: int | None, words: int | None = None, vocabulary: str = ""
) -> tuple[Ids, int, str]:
    """Return token ids ``(N, L)``, the size of the vocabulary, and a note. Options as in :class:`TextData`.

    In a public word list, the first word has id 2, and 1 stands for unknown words.
    """
    length, encoding = length or DEFAULT_LENGTH, vocabulary or HASH
    if encoding.startswith(HF_PREFIX):
        from fedstill.models.hugging_face import tokenize  # needs an extra

        tokenizer = encoding.removeprefix(HF_PREFIX)
        sentences = [text if isinstance(text, str) else " ".join(text) for text in texts]
        tokens, count = tokenize(tokenizer, sentences, length)
        return tokens.numpy(), count, f"{length} tokens of the tokenizer {tokenizer}"
    if encoding == HASH:
        buckets = words or DEFAULT_BUCKETS
        ids = encode_words(texts, cache(lambda word: hash_word(word, buckets)), length)
        return ids, buckets + 1, f"{length} words, hashed to {buckets} ids"
    words_known = read_vocabulary(Path(encoding).expanduser())
    word_ids = {word: number for number, word in enumerate(words_known, UNKNOWN + 1)}
    note = f"{length} words; {len(words_known)} are known, of {Path(encoding).name}, a public list"
    return encode_words(texts, lambda word: word_ids.get(word, UNKNOWN), length), len(words_known) + 2, note


def encode_texts_for_model(
    texts: Sequence[Text], length: int, vocabulary: int, encoding: str, source: str
) -> torch.Tensor:
    """Encode texts for a model with ``vocabulary`` ids: ``(N, length)``.

    Args:
        encoding: see ``TextData.vocabulary``; empty: hashing.
        source: start of error messages.

    Raises:
        DataError: the encoding has another number of ids.
    """
    ids, count, _ = encode_texts(texts, length=length, words=vocabulary - 1, vocabulary=encoding)
    if count != vocabulary:
        raise DataError(
            f"{source}: {encoding or HASH!r} has {count} ids (expected {vocabulary}, as the model)"
        )
    return torch.from_numpy(ids)


def set_padding_to_zero(ids: Any, mask: Any, source: str) -> torch.Tensor:
    """Return token ids ``(N, L)`` in which exactly the positions without attention are 0.

    Args:
        ids: with any padding id, which is swapped with 0.
        mask: 1 for tokens, 0 for padding, ``(N, L)``; None: the padding is 0 already.
        source: start of error messages.

    Raises:
        DataError: the mask has another shape; there are several padding ids, or one that is also a token; or
            there is no padding but a token 0, so that it is unknown which id to swap.

    >>> set_padding_to_zero([[0, 5, 2, 1, 1]], [[1, 1, 1, 0, 0]], "data")
    tensor([[1, 5, 2, 0, 0]])
    """
    if mask is None:
        return as_tensor(ids, f"{source}: {IDS!r}")
    tokens, attention = as_tensor(ids, f"{source}: {IDS!r}"), as_tensor(mask, f"{source}: {MASK!r}")
    if attention.shape != tokens.shape:
        shapes = f"{MASK} is {tuple(attention.shape)} and {IDS} {tuple(tokens.shape)}"
        raise DataError(f"{source}: {shapes} (expected one shape)")
    padding_ids = sorted(set(tokens[attention == 0].tolist()))
    if len(padding_ids) > 1:
        raise DataError(f"{source}: {MASK} masks the ids {padding_ids[:8]} (expected one padding id)")
    padding_id = padding_ids[0] if padding_ids else PADDING
    if bool((tokens[attention != 0] == padding_id).any()):
        hint = "" if padding_ids else ", or a longer length, so that there is padding"
        raise DataError(
            f"{source}: {MASK} is 1 where {IDS} are {padding_id} (expected an id used for padding only{hint})"
        )
    return swap_padding(tokens, padding_id)


# --- data sets of texts -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LabeledTexts:
    """Texts and their labels, as read.

    Args:
        texts: N texts, or lists of words.
        labels: class indices ``(N,)``.
        classes: class names.
        split: True for test examples, ``(N,)``; None if the source has no split.
        columns: metadata ``(N,)`` by name.
    """

    texts: Sequence[Text]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    split: npt.NDArray[np.bool_] | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    has_class_names: ClassVar[bool] = True  # labels may be names

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", normalize_class_names(self.classes, "classes"))
        object.__setattr__(self, "columns", normalize_columns(self.columns))


@dataclass(frozen=True, kw_only=True)
class TextData(DataConfig):
    """Custom data set of texts with classes. A subclass implements :meth:`labeled_texts`.

    Word ids depend on ``vocabulary`` and the word only, never on which words the texts contain.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class Moods(TextData):
            def labeled_texts(self):
                texts = ["good film", "bad film"] * 50
                return LabeledTexts(texts, np.arange(100) % 2, ("good", "bad"))
    """

    targets: ClassVar[tuple[Targets, ...]] = ("texts",)

    length: Annotated[int, Interval(ge=1, le=100_000), f"an integer from 1 up ({DEFAULT_LENGTH})"] | None = (
        None
    )
    """Texts: number of tokens, truncated or padded; none: 64."""

    words: (
        Annotated[int, Interval(ge=2, le=MAX_WORDS), f"from 2 to {MAX_WORDS} ({DEFAULT_BUCKETS})"] | None
    ) = None
    """Texts: number of ids to which words are hashed; none: 16384."""

    vocabulary: str = ""
    """Texts: how words become ids, independent of private texts. hash, or empty: by hashing; a file of
    public words, one per line; or "hf:" with the folder or name of a Hugging Face tokenizer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        encoding = self.vocabulary or HASH
        if self.words is not None and encoding != HASH:
            raise ArgumentError(
                "data.words", self.words, f"none, as {encoding!r} determines the number of words"
            )

    @abstractmethod
    def labeled_texts(self) -> LabeledTexts:
        """Return all texts with their labels."""

    def read(self, task: TaskConfig) -> DataSet:
        """Return the texts as token ids, divided into training and test parts."""
        return prepare_texts(self.labeled_texts(), self, self.title or self.registered_name, self.note)


def prepare_texts(source: LabeledTexts, config: TextData, name: str, note: str) -> DataSet:
    """Return the data set of texts: inputs (N, L) int64, 0 for padding; targets (N,) int64."""
    ids, vocabulary, encoding_note = encode_texts(
        source.texts, length=config.length, words=config.words, vocabulary=config.vocabulary
    )
    inputs, targets, columns = torch.from_numpy(ids), torch.from_numpy(source.labels), source.columns
    data = prepare_data_set(
        UnsplitExamples(
            name=name,
            targets=source.labels,
            classes=source.classes,
            make_tensors=lambda rows: TensorData(inputs[rows], targets[rows]),
            split=source.split,
            columns=columns,
            note=note,
            sites=columns.get(SITE),
            unit=PATIENT if PATIENT in columns else "",
            ignore_sites=True,
        ),
        config,
    )
    return replace(data, note=join_notes(data.note, encoding_note), vocabulary=vocabulary)


def read_labeled_texts(path: Path) -> LabeledTexts:
    """Read texts from a table with columns ``text``, ``label`` and optionally ``split``.

    Labels are names, sorted alphabetically, or numbers. Validation examples are used for training. All other
    columns are metadata.
    """
    table = read_csv(path, "text", "label")
    texts, cells = table.pop("text"), table.pop("label")
    labels, classes = encode_labels(cells, str(path))
    split_codes = pop_split_column(table, path)
    is_test = None if split_codes is None else split_codes == 1  # validation examples are used for training
    return LabeledTexts(
        texts, labels, classes, is_test, {name: np.array(column) for name, column in table.items()}
    )
