"""From words to token ids, without learning a vocabulary from private text.

The words that occur in a node's texts are a secret of the node (a name, a rare drug), so a vocabulary made
of them would be a release. None is made here: words are hashed, for which nothing need be known beforehand,
or they are looked up in a list that is public already. What a text's ids are follows from that text alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import ArgumentError, DataError

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
