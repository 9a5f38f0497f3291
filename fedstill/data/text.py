"""Texts and their labels, from a table or a reader of the user's own, as token ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from fedstill.core.dataset import Column, DataSet, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.config import DataConfig
from fedstill.data.preparation import PATIENT, SITE, Source, joined, prepared
from fedstill.data.raw import by_name, whole_numbers
from fedstill.data.tables import read_csv, told_part
from fedstill.data.words import (
    HASH,
    MOST_WORDS,
    Ids,
    Texts,
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
    named: ClassVar[bool] = True  # classes may be names


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
