"""Texts and their labels, from a table or a reader of the user's own, as token ids.

The words that occur in a node's texts are a secret of the node (a name, a rare drug), so a vocabulary made
of them would be a release. None is made here: words are hashed, for which nothing need be known beforehand,
or they are looked up in a list that is public already. What a text's ids are follows from that text alone.
"""

from __future__ import annotations

import re
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from fedstill.core.dataset import Column, DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.data.config import DataConfig
from fedstill.data.preparation import PATIENT, SITE, Source, joined, prepared
from fedstill.data.raw import by_name, whole_numbers
from fedstill.data.tables import read_csv, told_part
from fedstill.tasks import Targets, TaskConfig

PADDING, UNKNOWN = 0, 1
HASH = "hash"
MOST_WORDS = 10_000_000

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts as words, each different word kept once.

    Args:
        words: W different words.
        at: all texts' words one behind another, as places in ``words``, ``(T,)``.
        lengths: words of each text, ``(N,)``; together T.
        sentences: the texts as they were, for tokenizers that part them in another way.
    """

    words: Sequence[str]
    at: Ids
    lengths: Ids
    sentences: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, ids: Ids, length: int) -> Ids:
        """Texts as token ids ``(N, length)`` by the ids ``(W,)`` of :attr:`words`, cut or filled with
        padding.

        >>> Texts(["a", "b"], np.array([0, 1, 1, 0]), np.array([3, 0, 1])).padded(np.array([7, 9]), 2)
        array([[7, 9],
               [0, 0],
               [7, 0]])
        """
        column = np.arange(length)
        starts = np.cumsum(self.lengths) - self.lengths
        inside = column < self.lengths[:, None]  # (N, L)
        padded = np.full(inside.shape, PADDING, dtype=np.int64)
        padded[inside] = ids[self.at[(starts[:, None] + column)[inside]]]
        return padded


def words_of(text: str) -> list[str]:
    """The words of a text in lower case; each mark is a word of its own.

    >>> words_of("It wasn't GOOD, was it?")
    ['it', "wasn't", 'good', ',', 'was', 'it', '?']
    """
    return _WORD.findall(text.lower())


def texts_of(sentences: Sequence[str]) -> Texts:
    """Texts parted into words."""
    place: dict[str, int] = {}
    at = [[place.setdefault(word, len(place)) for word in words_of(text)] for text in sentences]
    lengths = np.array([len(text) for text in at], dtype=np.int64)
    flat = np.fromiter((one for text in at for one in text), dtype=np.int64, count=int(lengths.sum()))
    return Texts(list(place), flat, lengths, sentences)


def hashed(words: Iterable[str], buckets: int) -> Ids:
    """Ids 1..buckets of words by their CRC-32: the same everywhere, whatever other words there are.

    Who guesses a word can check the guess: hashing needs no vocabulary, it does not hide text.

    >>> hashed(["good", "bad", "good"], 8192).tolist()
    [3731, 6652, 3731]
    """
    return np.fromiter((1 + zlib.crc32(word.encode()) % buckets for word in words), dtype=np.int64)


def looked_up(words: Iterable[str], vocabulary: Sequence[str]) -> Ids:
    """Ids of words: 2 is the first of the vocabulary's, and 1 stands for all that it lacks.

    >>> looked_up(["good", "film", "zyx"], ["film", "good"]).tolist()
    [3, 2, 1]
    """
    place = {word: number for number, word in enumerate(vocabulary, UNKNOWN + 1)}
    return np.fromiter((place.get(word, UNKNOWN) for word in words), dtype=np.int64)


def read_words(path: Path) -> list[str]:
    """A vocabulary from a file of one word a line, each taken once, in lower case."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        known = f"{HASH}, a file of one word a line, or hf:folder"
        raise ArgumentError("data.vocabulary", str(path), known) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: allowed is one word a line") from error
    words = [line.strip().lower() for line in lines if line.strip()]
    broken = next((word for word in words if len(word.split()) > 1), None)
    if broken is not None:
        raise DataError(f"{path}: has a line {broken[:60]!r}: allowed is one word a line")
    if not words:
        raise DataError(f"{path}: holds no words: allowed is one or more, one a line")
    return list(dict.fromkeys(words))


LENGTH = 64  # tokens of a text, unless data.length says otherwise
WORDS = 16_384  # ids of words, unless data.words says otherwise
HF = "hf:"


@dataclass(frozen=True, eq=False)
class Labelled:
    """What a source of texts holds, as it is."""

    texts: Texts
    labels: npt.NDArray[np.int64]  # (N,)
    classes: tuple[str, ...]
    test: npt.NDArray[np.bool_] | None = None  # (N,), None where the source has no split
    columns: Mapping[str, Column] = field(default_factory=dict)  # (N,) each
    named: ClassVar[bool] = True  # classes may be names


@dataclass(frozen=True, kw_only=True)
class TextData(DataConfig):
    """Texts of classes, as token ids. A subclass gives the texts with their labels.

    Which id a word has follows from ``vocabulary`` and the word, never from which words the texts hold.
    """

    targets: ClassVar[tuple[Targets, ...]] = ("texts",)

    length: Annotated[int, Interval(ge=1, le=100_000), f"a whole number from 1 up ({LENGTH})"] | None = None
    """Texts: how many tokens of each, cut or filled with padding; none: 64."""

    words: Annotated[int, Interval(ge=2, le=MOST_WORDS), f"from 2 to {MOST_WORDS} ({WORDS})"] | None = None
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
    def labelled(self) -> Labelled:
        """All texts, with their labels."""

    def read(self, task: TaskConfig) -> DataSet:
        """These texts as token ids, divided into training and test parts."""
        return data_set(self.labelled(), self, self.title or self.called, self.note)


def data_set(source: Labelled, config: TextData, name: str, note: str) -> DataSet:
    """The data set that texts and a configuration make: inputs (N, L) int64, 0 for padding, targets (N,)."""
    ids, vocabulary, coding = code(
        source.texts, length=config.length, words=config.words, vocabulary=config.vocabulary
    )
    inputs, targets, columns = torch.from_numpy(ids), torch.from_numpy(source.labels), source.columns
    data = prepared(
        Source(
            name=name,
            targets=source.labels,
            classes=source.classes,
            tensors=lambda rows: TensorData(inputs[rows], targets[rows]),
            test=source.test,
            columns=columns,
            note=note,
            sites=columns.get(SITE),
            unit=PATIENT if PATIENT in columns else "",
            one_by_one=True,
        ),
        config,
    )
    return replace(data, note=joined(data.note, coding), vocabulary=vocabulary)


def code(
    texts: Texts, *, length: int | None, words: int | None = None, vocabulary: str = ""
) -> tuple[Ids, int, str]:
    """Token ids ``(N, L)``; how many there are; what is to be said of it. Options as of :class:`TextData`."""
    length, how = length or LENGTH, vocabulary or HASH
    if how.startswith(HF):
        from fedstill.models.hub import tokenize  # an extra

        where = how.removeprefix(HF)
        tokens, count = tokenize(where, list(texts.sentences), length)
        return tokens.numpy(), count, f"{length} tokens of the tokenizer {where}"
    if how == HASH:
        buckets = words or WORDS
        ids = hashed(texts.words, buckets)
        return texts.padded(ids, length), buckets + 1, f"{length} words, hashed to {buckets} ids"
    known = read_words(Path(how).expanduser())
    told = f"{length} words; {len(known)} are known, of {Path(how).name}, a public list"
    return texts.padded(looked_up(texts.words, known), length), len(known) + 2, told


def read_table(path: Path) -> Labelled:
    """Texts from a table with a header: columns ``text``, ``label`` and, if there is one, ``split``.

    Labels are whole numbers from 0, or names, which count in alphabetical order. What ``split`` calls train
    or dev is for training. All other columns are kept: a site, a writer.
    """
    table = read_csv(path, "text", "label")
    texts, cells = texts_of(table.pop("text")), table.pop("label")
    labels, classes = by_name(cells)
    if whole_numbers(classes) and int(classes[-1]) < len(cells):  # some may not occur
        labels, classes = np.array(cells, dtype=np.int64), tuple(map(str, range(int(classes[-1]) + 1)))
    test = told_part(table, path, dev=True)
    return Labelled(texts, labels, classes, test, {name: np.array(column) for name, column in table.items()})
