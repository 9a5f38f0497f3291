"""Token ids of any tokenizer with the padding that fedstill's models expect: the id 0.

Texts and their labels, from a table or a reader of the user's own, as token ids.

The words that occur in a node's texts are a secret of the node (a name, a rare drug), so a vocabulary made
of them would be a release. None is made here: words are hashed, for which nothing need be known beforehand,
or they are looked up in a list that is public already. What a text's ids are follows from that text alone.
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
from fedstill.core.names import class_names, named_columns
from fedstill.data.config import DataConfig
from fedstill.data.loading import PATIENT, SITE, ExampleSource, join_notes, prepare_data_set
from fedstill.data.raw import encode_labels
from fedstill.data.table_files import pop_split_column, read_csv
from fedstill.models.hugging_face import swap_padding
from fedstill.tasks import Targets, TaskConfig

IDS, MASK = "input_ids", "attention_mask"


def set_padding_to_zero(ids: Any, mask: Any, what: str) -> torch.Tensor:
    """Token ids ``(N, L)`` in which exactly what an attention mask leaves out is 0.

    Args:
        ids: with a padding of any id, which is swapped with 0.
        mask: 1 for tokens, 0 for padding, ``(N, L)``; None: the padding is 0.
        what: they are, for errors.

    Raises:
        DataError: a mask of another shape; several ids of padding, or one that is a token, too; or no padding
            and a token 0, so that it is not known which id it is swapped with.

    >>> set_padding_to_zero([[0, 5, 2, 1, 1]], [[1, 1, 1, 0, 0]], "data")
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
    return swap_padding(tokens, own)


PADDING, UNKNOWN = 0, 1
HASH = "hash"
MAX_WORDS = 10_000_000

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")

Ids = npt.NDArray[np.int64]
Text = str | Sequence[str]  # as it is, or parted into words already


def split_words(text: str) -> list[str]:
    """The words of a text in lower case; each mark is a word of its own.

    >>> split_words("It wasn't GOOD, was it?")
    ['it', "wasn't", 'good', ',', 'was', 'it', '?']
    """
    return _WORD.findall(text.lower())


def hash_word(word: str, buckets: int) -> int:
    """The id 1..buckets of a word by its CRC-32: the same everywhere, whatever other words there are.

    Who guesses a word can check the guess: hashing needs no vocabulary, it does not hide text.

    >>> hash_word("good", 8192), hash_word("bad", 8192)
    (3731, 6652)
    """
    return 1 + zlib.crc32(word.encode()) % buckets


def encode_words(texts: Sequence[Text], number: Callable[[str], int], length: int) -> Ids:
    """Texts as token ids ``(N, length)`` by the number of each word, cut or filled with padding.

    >>> encode_words(["A b, b", "", ["b"]], {"a": 7, "b": 9, ",": 2}.__getitem__, 3).tolist()
    [[7, 9, 2], [0, 0, 0], [9, 0, 0]]
    """
    ids = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        words = split_words(text) if isinstance(text, str) else text
        row[: len(words)] = [number(word) for word in words[:length]]
    return ids


def read_vocabulary(path: Path) -> list[str]:
    """A vocabulary from a file of one word a line, each taken once, in lower case."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        known = f"{HASH}, a file of one word a line, or hf:folder"
        raise ArgumentError("data.vocabulary", str(path), known) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (expected one word a line)") from error
    words = [line.strip().lower() for line in lines if line.strip()]
    broken = next((word for word in words if len(word.split()) > 1), None)
    if broken is not None:
        raise DataError(f"{path}: has a line {broken[:60]!r} (expected one word a line)")
    if not words:
        raise DataError(f"{path}: holds no words (expected one or more, one a line)")
    return list(dict.fromkeys(words))


DEFAULT_LENGTH = 64  # tokens of a text, unless data.length says otherwise
DEFAULT_BUCKETS = 16_384  # ids of words, unless data.words says otherwise
HF_PREFIX = "hf:"


@dataclass(frozen=True, eq=False)
class LabeledTexts:
    """What a source of texts holds, as it is."""

    texts: Sequence[Text]
    labels: npt.NDArray[np.int64]  # (N,)
    classes: tuple[str, ...]
    split: npt.NDArray[np.bool_] | None = None  # (N,), None where the source has no split
    columns: Mapping[str, Column] = field(default_factory=dict)  # (N,) each
    has_class_names: ClassVar[bool] = True  # classes may be names

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", class_names(self.classes, "classes"))
        object.__setattr__(self, "columns", named_columns(self.columns))


@dataclass(frozen=True, kw_only=True)
class TextData(DataConfig):
    """Texts of classes, as token ids. A subclass gives the texts with their labels.

    Which id a word has follows from ``vocabulary`` and the word, never from which words the texts hold.
    """

    targets: ClassVar[tuple[Targets, ...]] = ("texts",)

    length: (
        Annotated[int, Interval(ge=1, le=100_000), f"a whole number from 1 up ({DEFAULT_LENGTH})"] | None
    ) = None
    """Texts: how many tokens of each, cut or filled with padding; none: 64."""

    words: (
        Annotated[int, Interval(ge=2, le=MAX_WORDS), f"from 2 to {MAX_WORDS} ({DEFAULT_BUCKETS})"] | None
    ) = None
    """Texts: how many ids words are hashed to; none: 16384."""

    vocabulary: str = ""
    """Texts: how words become ids, which never depends on private texts. hash, or empty: by hashing; a file
    of public words, one a line; or "hf:" with the folder or name of a Hugging Face tokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        how = self.vocabulary or HASH
        if self.words is not None and how != HASH:
            raise ArgumentError(
                "data.words", self.words, f"none, as {how!r} says itself how many words there are"
            )

    @abstractmethod
    def labeled_texts(self) -> LabeledTexts:
        """All texts, with their labels."""

    def read(self, task: TaskConfig) -> DataSet:
        """These texts as token ids, divided into training and test parts."""
        return prepare_texts(self.labeled_texts(), self, self.title or self.called, self.note)


def prepare_texts(source: LabeledTexts, config: TextData, name: str, note: str) -> DataSet:
    """The data set that texts and a configuration make: inputs (N, L) int64, 0 for padding, targets (N,)."""
    ids, vocabulary, coding = encode_texts(
        source.texts, length=config.length, words=config.words, vocabulary=config.vocabulary
    )
    inputs, targets, columns = torch.from_numpy(ids), torch.from_numpy(source.labels), source.columns
    data = prepare_data_set(
        ExampleSource(
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
    return replace(data, note=join_notes(data.note, coding), vocabulary=vocabulary)


def encode_texts(
    texts: Sequence[Text], *, length: int | None, words: int | None = None, vocabulary: str = ""
) -> tuple[Ids, int, str]:
    """Token ids ``(N, L)``; how many there are; what is to be said of it. Options as of :class:`TextData`.

    Of a public list 2 is the first word's id, and 1 stands for all that it lacks.
    """
    length, how = length or DEFAULT_LENGTH, vocabulary or HASH
    if how.startswith(HF_PREFIX):
        from fedstill.models.hugging_face import tokenize  # an extra

        where = how.removeprefix(HF_PREFIX)
        sentences = [text if isinstance(text, str) else " ".join(text) for text in texts]
        tokens, count = tokenize(where, sentences, length)
        return tokens.numpy(), count, f"{length} tokens of the tokenizer {where}"
    if how == HASH:
        buckets = words or DEFAULT_BUCKETS
        ids = encode_words(texts, cache(lambda word: hash_word(word, buckets)), length)
        return ids, buckets + 1, f"{length} words, hashed to {buckets} ids"
    known = read_vocabulary(Path(how).expanduser())
    place = {word: number for number, word in enumerate(known, UNKNOWN + 1)}
    told = f"{length} words; {len(known)} are known, of {Path(how).name}, a public list"
    return encode_words(texts, lambda word: place.get(word, UNKNOWN), length), len(known) + 2, told


def encode_for_vocabulary(
    texts: Sequence[Text], length: int, vocabulary: int, how: str, what: str
) -> torch.Tensor:
    """Ids ``(N, length)`` of a model's ``vocabulary``, made of words as ``how`` says (empty: hashed).

    Raises:
        DataError: another number of ids comes of it.
    """
    ids, count, _ = encode_texts(texts, length=length, words=vocabulary - 1, vocabulary=how)
    if count != vocabulary:
        allowed = f"allowed are {vocabulary}, as the model has"
        raise DataError(f"{what}: {how or HASH!r} gives {count} ids: {allowed}")
    return torch.from_numpy(ids)


def read_labeled_texts(path: Path) -> LabeledTexts:
    """Texts from a table with a header: columns ``text``, ``label`` and, if there is one, ``split``.

    Labels are names, which count in alphabetical order, numbers as numbers. What ``split`` calls train or dev
    is for training. All other columns are kept: a site, a writer.
    """
    table = read_csv(path, "text", "label")
    texts, cells = table.pop("text"), table.pop("label")
    labels, classes = encode_labels(cells, str(path))
    part = pop_split_column(table, path)
    test = None if part is None else part == 1  # a source's own validation part is for training, too
    return LabeledTexts(
        texts, labels, classes, test, {name: np.array(column) for name, column in table.items()}
    )
