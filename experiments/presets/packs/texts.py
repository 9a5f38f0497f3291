"""Text classification data from packs: SST-2 and AG News."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedstill.data import TextData, find_file
from fedstill.data.raw_images import read_npz, require_array
from fedstill.data.text_data import HF_PREFIX, LabeledTexts, read_labeled_texts


@dataclass(frozen=True, kw_only=True)
class SST2(TextData):
    """Stanford Sentiment Treebank: sentences of film reviews, negative or positive."""

    title: ClassVar[str] = "sst2"
    note: ClassVar[str] = "official split, trained on train and dev"

    def labeled_texts(self) -> LabeledTexts:
        """Return all sentences."""
        return replace(read_labeled_texts(find_file(self, "sst2.csv.gz")), classes=("negative", "positive"))


@dataclass(frozen=True, kw_only=True)
class AGNews(TextData):
    """AG News: the beginnings of news on four subjects, stored as word numbers with a vocabulary."""

    title: ClassVar[str] = "ag-news"
    note: ClassVar[str] = "official split; two thirds of the words, all rare, are known by number"

    def labeled_texts(self) -> LabeledTexts:
        """Return all texts; a word without an entry in the vocabulary becomes its number."""
        path = find_file(self, "ag_news_tokens.npz")
        arrays = read_npz(path)
        low, high, lengths, labels, vocabulary, names, split = (
            require_array(path, arrays, name)
            for name in ("tokens_lo", "tokens_hi", "lengths", "labels", "vocab", "classes", "split")
        )
        numbers, lengths = low.astype(np.int64) + (high.astype(np.int64) << 16), lengths.astype(np.int64)
        words = vocabulary.tobytes().decode("utf-8").split("\n")
        # An unknown character becomes the tokenizer's unknown token.
        rare = "\ufffd" if self.vocabulary.startswith(HF_PREFIX) else "#{}"
        tokens = np.array([word or rare.format(number) for number, word in enumerate(words)], dtype=object)
        texts = [text.tolist() for text in np.split(tokens[numbers], np.cumsum(lengths)[:-1])]
        return LabeledTexts(texts, labels.astype(np.int64), tuple(map(str, names)), split == 1)
