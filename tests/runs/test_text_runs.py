"""Texts in whole runs: supported methods, mixed architectures, and refusals before training."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.runs import result_of, small_run

GOOD, BAD = ["fine", "warm", "bright", "sharp"], ["dull", "flat", "slow", "cold"]
FILLERS = ["the", "film", "is", "a", "story", "of", "two", "days"]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 240 reviews, each decided by one word; a third are test data."""
    draw = random.Random(0)
    lines = ["text,label,split"]
    for number in range(240):
        words = [*draw.sample(FILLERS, 4), draw.choice((BAD, GOOD)[number % 2])]
        draw.shuffle(words)
        lines.append(
            f"{' '.join(words)},{('bad', 'good')[number % 2]},{'test' if number % 3 == 0 else 'train'}"
        )
    path = tmp_path_factory.mktemp("texts") / "reviews.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def run(reviews: Path, out: Path, *words: str, method: str = "fedkd", model: str = "bag:16") -> int:
    data = {"name": str(reviews), "length": 8, "words": 500}
    local = {"epochs": 12, "lr": 0.02, "batch": 8}
    return small_run(out, *words, task="text", method=method, model=model, local=local, data=data)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (
            "fedkd",
            ("--method.student.epochs", "30", "--method.student.batch", "16", "--method.student.lr", "0.01"),
        ),
        ("fedavg", ("--method.rounds", "4")),
        ("feddf", ("--method.rounds", "4", "--method.steps", "5")),
        ("fedper", ("--method.rounds", "4")),
        ("lg-fedavg", ("--method.rounds", "4")),
        ("standalone", ()),
    ],
)
def test_methods_learn_texts(reviews: Path, tmp_path: Path, method: str, options: tuple[str, ...]) -> None:
    assert run(reviews, tmp_path, *options, method=method) == 0
    result = result_of(tmp_path)
    assert (result["task"], result["metric"], result["data"]["shape"]) == ("text", "accuracy", [8])
    accuracy = result["accuracy"] if result["accuracy"] is not None else result["local"]["accuracy"]["mean"]
    assert accuracy > 80, "chance is 50"


def test_distils_different_text_architectures(reviews: Path, tmp_path: Path) -> None:
    models = ("--nodes.models", "bag:16", "transformer:16", "--student.model", "bag:32")
    options = ("--method.student.epochs", "30", "--method.student.batch", "16", "--method.student.lr", "0.01")
    assert run(reviews, tmp_path, *models, *options) == 0
    result = result_of(tmp_path)
    assert {node["model"] for node in result["nodes"]} == {"bag:16", "transformer:16"}
    assert result["accuracy"] > 80


def test_text_runs_release_logits_and_counts_only(reviews: Path, tmp_path: Path) -> None:
    assert run(reviews, tmp_path, "--method.student.epochs", "1") == 0
    assert set(result_of(tmp_path)["releases"]) == {"label counts", "logit range", "logits"}


@pytest.mark.parametrize(
    ("words", "method", "model", "message"),
    [
        ((), "fediod", "bag", "text"),
        ((), "fedkd", "small-cnn", "as inputs are texts"),
        (("--data.length", "none", "--task.name", "classification"), "fedkd", "bag", "data"),
        (("--public.name", "noise"), "fedkd", "bag", "public.name"),
    ],
)
def test_rejects_methods_unsuitable_for_texts(
    reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], method: str,
    model: str, message: str,
) -> None:  # fmt: skip
    assert run(reviews, tmp_path, *words, method=method, model=model) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
