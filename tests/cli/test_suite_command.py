"""``fedstill reproduce suite-v1``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstill.cli.main import main
from fedstill.compare import suite

PART = """
seeds = 2
methods = ["standalone", "fedavg"]
[suite]
title = "digits"
main = "even"
minutes = 1
[base]
split = { nodes = 2 }
nodes = { models = ["mlp:4"], local = { epochs = 1 } }
student = { model = "mlp:4" }
evaluation = { every = 0 }
engine = { threads = 1 }
[[settings]]
name = "even"
data = { train_limit = 100 }
[options.fedavg]
rounds = 1
"""
METHOD = """
from dataclasses import dataclass
import fedstill

@dataclass(frozen=True, kw_only=True)
class Mine(fedstill.FedAvg):
    rounds: int = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of experiments with a small part, which is also the working directory."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "small.toml").write_text(PART, encoding="utf-8")
    monkeypatch.setattr(suite, "experiments_folder", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(["reproduce", "suite-v1", *words])
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_custom_method_gets_rows_among_recorded_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--part", "small", "--record", "--quiet") == 0
    assert "| method | even |" in capsys.readouterr().out  # without ranks, as there are two seeds
    results = folder / "suite" / "results" / "small.jsonl"
    assert [(row.label, row.seed) for row in suite.read_rows(results)] == [
        *(("standalone", seed) for seed in range(2)),
        *(("fedavg", seed) for seed in range(2)),
    ]
    before = results.read_text(encoding="utf-8")
    (folder / "my_suite_method.py").write_text(METHOD, encoding="utf-8")
    assert run("--part", "small", "--method", "my_suite_method:Mine", "--quiet", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in rows] == ["standalone"] * 2 + ["fedavg"] * 2 + ["Mine"] * 2
    configs = {row["label"]: row["config"] for row in rows}
    assert len(set(configs.values())) == 3
    own = suite.read_rows(folder / "runs" / "reproduce" / "suite-v1" / "small-Mine" / "rows.jsonl")
    assert [(row.label, row.method, row.score is not None) for row in own] == [
        ("Mine", "my_suite_method:Mine", True)
    ] * 2
    assert results.read_text(encoding="utf-8") == before  # recorded with --record only
    tried = run("--part", "small", "--method", "my_suite_method:Mine", "--quiet", "--data.validation", "0.2")
    assert tried == 0
    assert "| fedavg |" not in capsys.readouterr().out  # rows on other data are not shown
    assert run("--recorded", "--part", "small") == 0
    assert "Mine" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--part", "smal"), "unknown part 'smal': did you mean 'small'?"),
        (("--scale", "paper"), "invalid --scale = 'paper'"),
        (("--method", "nothing"), "unknown method or preset 'nothing'"),
        (("--method", "fedavg"), "invalid --method = 'fedavg'"),
        (("--record", "--split.nodes", "3"), "invalid --record = 'with --split.nodes'"),
    ],
)
def test_bad_arguments_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert line in err
    assert len(err.strip().splitlines()) == 1


def test_part_is_an_option_of_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["reproduce", "fedmd-cg-table1", "--part", "digits"])
    assert exit.value.code == 2
    assert "--part" in capsys.readouterr().err
