"""Texts as token ids: vocabularies, errors, and independence of other private texts."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.dataset import DataSet
from fedstill.core.errors import ArgumentError, DataError
from fedstill.data import DataConfig, UserFiles, make_data_config
from fedstill.data.loading import load
from fedstill.data.partitioners import Dirichlet, split
from fedstill.data.public import PublicConfig, hold_out
from fedstill.data.text_data import encode_texts, read_labeled_texts, read_vocabulary, split_words
from fedstill.tasks.classification import TextConfig
from tests.support.errors import raises_invalid

ROWS = "text,label,split\nA good film,1,train\nbad,0,dev\n,0,train\ngood good bad film!,1,test\n"
SENTENCES = st.lists(st.text(alphabet="abc '!", max_size=12), min_size=1, max_size=6)


def load_text(config: DataConfig, *, train_needed: bool = True) -> DataSet:
    return load(config, TextConfig(), train_needed=train_needed)


def table(folder: Path, content: str = ROWS, name: str = "reviews.csv") -> UserFiles:
    (folder / name).write_text(content, encoding="utf-8")
    return UserFiles(name=str(folder / name), length=3)


def ids_of(sentences: list[str], vocabulary: str = "") -> list[list[int]]:
    return encode_texts(sentences, length=8, vocabulary=vocabulary)[0].tolist()  # type: ignore[no-any-return]


# --- words --------------------------------------------------------------------------------------------


def test_splits_words() -> None:
    assert split_words("The U.S. isn't (all) 3rd-rate") == [
        "the", "u", ".", "s", ".", "isn't", "(", "all", ")", "3rd", "-", "rate",
    ]  # fmt: skip
    assert split_words("  \n") == []


def test_reads_a_word_list(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("Film\n\n good \nfilm\n", encoding="utf-8")
    assert read_vocabulary(tmp_path / "words.txt") == ["film", "good"]
    assert ids_of(["good bad film"], str(tmp_path / "words.txt"))[0][:4] == [3, 1, 2, 0]
    for content, message in (("two words\n", "a line 'two words'"), ("\n", "holds no words")):
        (tmp_path / "words.txt").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            read_vocabulary(tmp_path / "words.txt")
    with raises_invalid("data.vocabulary", ANY, "hash", "a file"):
        read_vocabulary(tmp_path / "none.txt")


# --- privacy ------------------------------------------------------------------------------------------


@given(SENTENCES, SENTENCES, SENTENCES)
@settings(max_examples=50)
def test_hashed_ids_do_not_depend_on_other_texts(some: list[str], others: list[str], more: list[str]) -> None:
    alone = ids_of(some)
    assert ids_of(some + others)[: len(some)] == alone
    assert ids_of(more + some)[len(more) :] == alone


@given(SENTENCES, SENTENCES)
@settings(max_examples=20)
def test_word_list_ids_do_not_depend_on_other_texts(
    tmp_path_factory: pytest.TempPathFactory, some: list[str], others: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "words.txt"
    path.write_text("a\nab\n", encoding="utf-8")
    assert ids_of(some + others, vocabulary=str(path))[: len(some)] == ids_of(some, vocabulary=str(path))


# --- tables -------------------------------------------------------------------------------------------


def test_reads_a_table_of_texts(tmp_path: Path) -> None:
    data = load_text(table(tmp_path))
    good, bad, film, a = (1 + zlib.crc32(word) % 16384 for word in (b"good", b"bad", b"film", b"a"))
    assert data.train.inputs.tolist() == [[a, good, film], [bad, 0, 0], [0, 0, 0]]
    assert data.test.inputs.tolist() == [[good, good, bad]]
    assert data.train.inputs.dtype == data.train.targets.dtype == torch.int64
    assert (data.train.targets.tolist(), data.test.targets.tolist()) == ([1, 0, 0], [1])
    assert (data.name, data.classes, data.vocabulary, data.mean, data.std) == (
        "reviews",
        ("0", "1"),
        16385,
        (),
        (),
    )
    assert data.note == "3 words, hashed to 16384 ids"


def test_reads_class_names_metadata_and_tsv(tmp_path: Path) -> None:
    rows = "label\tsite\ttext\nspam\tnorth\tbuy, now\nham\tsouth\thello\nham\tnorth\thi\n"
    source = read_labeled_texts(Path(table(tmp_path, rows, "mail.tsv").name))
    assert source.classes == ("ham", "spam")
    assert source.labels.tolist() == [1, 0, 0]
    assert source.columns["site"].tolist() == ["north", "south", "north"]
    assert source.texts == ["buy, now", "hello", "hi"]
    assert source.split is None


def test_texts_of_one_patient_stay_together(tmp_path: Path) -> None:
    """Holds for training and test parts, with a limit, for public data, and between nodes."""
    rows = "text,label,patient\n" + "".join(f"word{n % 9},{n % 2},p{n % 9}\n" for n in range(54))
    data = load_text(replace(table(tmp_path, rows), test_fraction=0.3, train_limit=30))
    assert data.group_column == "patient"
    train, test = set(data.train.inputs[:, 0].tolist()), set(data.test.inputs[:, 0].tolist())
    assert (len(train), len(test)) == (5, 3)  # 5 of the 6 other patients have 30 texts
    assert not train & test
    assert "tested on 3 of 9 patients" in data.note
    assert "trained on 30 of 36" in data.note
    assert data.train.groups is not None
    assert len(set(zip(data.train.groups.tolist(), data.train.inputs[:, 0].tolist(), strict=True))) == 5
    rest, public = hold_out(PublicConfig("held-out", share=0.4), data)
    owner = data.columns["patient"]
    assert not set(owner[rest]) & set(owner[public])
    parts = split(data.train.targets, 2, Dirichlet(nodes=2, minimum=1), np.random.default_rng(0),
                  data.columns, owner)  # fmt: skip
    assert not set(owner[parts[0]]) & set(owner[parts[1]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,split\nx,train\n", "has no column 'label', only text, split"),
        ("", "there are no examples"),
        ("text,label\n", "there are no examples"),
        ("text,label\nx\n", r"line 2 has 1 cells \(expected 2"),
        ("text,label,split\nx,1,later\n", r"split has 'later' \(expected train"),
        ("text,label,split\nx,0,test\nx,1,test\n", "train part of reviews: there are no examples"),
    ],
)
def test_rejects_broken_tables(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_text(table(tmp_path, content))


def test_server_may_have_test_texts_only(tmp_path: Path) -> None:
    config = table(tmp_path, "text,label,split\nx,0,test\nx,1,test\n")
    assert len(load_text(config, train_needed=False).test) == 2


def test_rejects_files_that_are_not_tables(tmp_path: Path) -> None:
    (tmp_path / "broken.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="as a table"):
        load_text(make_data_config(str(tmp_path / "broken.csv.gz")))
    with pytest.raises(DataError, match=r"found: .*absent\.csv"):
        load_text(make_data_config("absent.csv"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, r"data\.length = 0"),
        ({"words": 1}, r"invalid data\.words = 1 \(expected from 2"),
        ({"words": 9, "vocabulary": "list.txt"}, r"invalid data\.words = 9 \(expected none"),
    ],
)
def test_rejects_options_out_of_range(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_text(replace(table(tmp_path), **options))  # type: ignore[arg-type]


def test_loads_a_tokenizer_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ngood\nfilm", encoding="utf-8")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "tokenizer")
    config = replace(table(tmp_path), length=6, vocabulary=f"hf:{tmp_path / 'tokenizer'}")
    data = load_text(config)
    assert data.vocabulary == 7
    assert data.train.inputs.tolist() == [[2, 1, 5, 6, 3, 0], [2, 1, 3, 0, 0, 0], [2, 3, 0, 0, 0, 0]]
