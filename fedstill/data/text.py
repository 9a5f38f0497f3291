"""Texts and their labels, from a pack or a table of the user's own, as token ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from fedstill.core.dataset import Column, DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.data.config import DataConfig
from fedstill.data.located import find_file
from fedstill.data.npz import read_npz
from fedstill.data.preparation import PATIENT, SITE, Source, joined, prepared
from fedstill.data.raw import by_name, need, whole_numbers
from fedstill.data.tables import read_csv, told_part
from fedstill.data.units import Ints
from fedstill.data.words import (
    HASH,
    MOST_WORDS,
    Ids,
    Texts,
    frequent,
    hashed,
    looked_up,
    read_words,
    texts_of,
)
from fedstill.tasks import Targets, TaskConfig

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


@dataclass(frozen=True, kw_only=True)
class TextData(DataConfig):
    """Texts of classes, as token ids. A subclass gives the texts with their labels.

    Which id a word has follows from ``vocabulary`` and the word, never from which words the texts hold; see
    :mod:`fedstill.data.words`.
    """

    targets: ClassVar[tuple[Targets, ...]] = ("texts",)

    length: Annotated[int, Interval(ge=1, le=100_000), f"a whole number from 1 up ({LENGTH})"] | None = None
    """Texts: how many tokens of each, cut or filled with padding; none: 64."""

    words: Annotated[int, Interval(ge=2, le=MOST_WORDS), f"from 2 to {MOST_WORDS} ({WORDS})"] | None = None
    """Texts: how many ids words are hashed to, or how many of the most frequent public words are known; none:
    16384."""

    vocabulary: str = ""
    """Texts: how words become ids, which never depends on private texts. hash, or empty: by hashing; sst2 or
    ag-news: the most frequent words of those, taken for public; a file of words, one a line; or "hf:" with
    the folder or name of a Hugging Face tokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        how = self.vocabulary or HASH
        if how == self.called:
            raise ArgumentError(
                "data.vocabulary", how, "public words, and not those of the private data themselves"
            )
        if self.words is not None and how != HASH and how not in PUBLIC:
            raise ArgumentError(
                "data.words", self.words, f"none, as {how!r} says itself how many words there are"
            )

    @abstractmethod
    def labelled(self) -> Labelled:
        """All texts, with their labels."""

    def read(self, task: TaskConfig) -> DataSet:
        """These texts as token ids, divided into training and test parts."""
        return data_set(self.labelled(), self, self.called, self.note)


@dataclass(frozen=True, kw_only=True)
class SST2(TextData):
    """Stanford Sentiment Treebank: sentences of film reviews, negative or positive."""

    note: ClassVar[str] = "official split, trained on train and dev"

    def labelled(self) -> Labelled:
        """From its pack."""
        return replace(read_table(find_file(self, "sst2.csv.gz")), classes=("negative", "positive"))


@dataclass(frozen=True, kw_only=True)
class AGNews(TextData):
    """AG News: the beginnings of news on four subjects."""

    note: ClassVar[str] = "official split; two thirds of the words, all rare, are known by number"

    def labelled(self) -> Labelled:
        """From its pack."""
        return read_tokens(find_file(self, "ag_news_tokens.npz"))


# Whose most frequent words may be taken for public.
PUBLIC: Mapping[str, type[TextData]] = MappingProxyType({"sst2": SST2, "ag-news": AGNews})


def data_set(source: Labelled, config: TextData, name: str, note: str) -> DataSet:
    """The data set that texts and a configuration make.

    Args:
        source: texts and labels.
        config: tokens of a text; how words become ids; how much for testing, validation, training.
        name: of the data set, in results.
        note: what is to be said of it.

    Returns:
        Inputs (N, L) int64, 0 for padding, targets (N,) int64 class indices; without mean and std.

    Raises:
        DataError: a vocabulary that is not there, or as :func:`fedstill.data.preparation.prepared`.
    """
    ids, vocabulary, coding = code(
        source.texts, length=config.length, words=config.words, vocabulary=config.vocabulary, root=config.root
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
    texts: Texts, *, length: int | None, words: int | None = None, vocabulary: str = "", root: str = ""
) -> tuple[Ids, int, str]:
    """Token ids ``(N, L)``; how many there are; what is to be said of it.

    Args:
        texts: N of them.
        length, words, vocabulary: as options of :class:`TextData`.
        root: where the texts lie whose words are taken for public.

    Raises:
        ArgumentError: a vocabulary that is not known.
        DataError: a file of words that cannot be used.
    """
    length, how = length or LENGTH, vocabulary or HASH
    if how.startswith(HF):
        from fedstill.models.hub import tokenize  # an extra

        where = how.removeprefix(HF)
        # A token that the tokenizer does not know is its unknown one, so any rare mark will do.
        tokens, count = tokenize(where, texts.written("\ufffd"), length)
        return tokens.numpy(), count, f"{length} tokens of the tokenizer {where}"
    if how == HASH:
        buckets = words or WORDS
        ids = hashed(_told(texts), buckets)
        return texts.padded(ids, length), buckets + 1, f"{length} words, hashed to {buckets} ids"
    if how in PUBLIC:
        source = PUBLIC[how](root=root).labelled()
        public = _rows(source.texts, np.flatnonzero(~source.test) if source.test is not None else None)
        known, whose = frequent(public, words or WORDS), f"the most frequent of {how}, taken for public"
    else:
        known, whose = read_words(Path(how).expanduser()), f"of {Path(how).name}, a public list"
    ids = looked_up(_told(texts), known)
    return texts.padded(ids, length), len(known) + 2, f"{length} words; {len(known)} are known, {whose}"


def _told(texts: Texts) -> list[str]:
    """All different words; one that the source knows by number only is that number, apart from real words."""
    return [word or f"#{number}" for number, word in enumerate(texts.words)]


def _rows(texts: Texts, rows: Ints | None) -> Texts:
    if rows is None:
        return texts
    inside = np.zeros(len(texts), dtype=bool)
    inside[rows] = True
    return Texts(texts.words, texts.at[np.repeat(inside, texts.lengths)], texts.lengths[rows])


# --- sources ------------------------------------------------------------------------------------------


def read_tokens(path: Path) -> Labelled:
    """Texts from an ``.npz`` of word numbers with the words beside, as the AG News pack is.

    Raises:
        DataError: it cannot be read, or is not of that form.
    """
    pack = read_npz(path)
    low, high, lengths, labels, vocabulary, names, split = (
        need(path, pack, name)
        for name in ("tokens_lo", "tokens_hi", "lengths", "labels", "vocab", "classes", "split")
    )
    numbers, lengths = low.astype(np.int64) + (high.astype(np.int64) << 16), lengths.astype(np.int64)
    try:
        words = vocabulary.tobytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: vocab is not UTF-8 text: allowed are words, one a line") from error
    if len(numbers) != lengths.sum() or not len(lengths) == len(labels) == len(split):
        raise DataError(f"{path}: lengths, labels and split are not of the same texts")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(words):
        raise DataError(f"{path}: has a word number {numbers.max()}: allowed is below {len(words)}")
    classes = tuple(map(str, names))
    return Labelled(Texts(words, numbers, lengths), labels.astype(np.int64), classes, split == 1)


def read_table(path: Path) -> Labelled:
    """Texts from a table with a header: columns ``text``, ``label`` and, if there is one, ``split``.

    Labels are whole numbers from 0, or names, which count in alphabetical order. What ``split`` calls train
    or dev is for training. All other columns are kept: a site, a writer.

    Raises:
        DataError: it cannot be read, or a column or a cell is missing or says what is not allowed.
    """
    table = read_csv(path, "text", "label")
    texts, cells = texts_of(table.pop("text")), table.pop("label")
    labels, classes = by_name(cells)
    if whole_numbers(classes) and int(classes[-1]) < len(cells):  # some may not occur
        labels, classes = np.array(cells, dtype=np.int64), tuple(map(str, range(int(classes[-1]) + 1)))
    test = told_part(table, path, dev=True)
    return Labelled(texts, labels, classes, test, {name: np.array(column) for name, column in table.items()})
