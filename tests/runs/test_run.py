"""Whole runs: files, stopping and resuming, and rejected input."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedstill.cli import main as cli
from fedstill.core.errors import DataError, MethodRefused, RunFolderError
from fedstill.core.run_writer import RunWriter
from fedstill.models import SmallCNN
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.run import resume
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import from_dict, load_toml
from tests.support.audit_logs import edit, entries
from tests.support.processes import Command
from tests.support.runs import SHORT, fedstill_run


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one short run with its report."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    assert fedstill_run("digits-fediod", *SHORT, "--out", str(folder)) == 0
    return folder


def test_writes_last_local_loss_of_each_node(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    last = {line["node"]: line["step"] for line in lines if line["phase"] == "local"}
    sizes = json.loads((finished / "result.json").read_text())["nodes"]
    config = LocalConfig(epochs=2.0)
    assert last == {node["name"]: config.steps(node["examples"]) for node in sizes}


def test_run_writes_all_files_and_no_state(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "config.toml",
        "audit.sqlite",
        "audit.sqlite.head",
        "draws.safetensors",
        "metrics.jsonl",
        "predictions.csv",
        "report.html",
        "result.json",
        "samples.safetensors",
        "student.safetensors",
    }


def test_result_has_all_metrics(finished: Path) -> None:
    result = result_of(finished)
    assert (result["method"], result["task"], result["seed"]) == ("fediod", "classification", 0)
    accuracies = [
        result["student"]["accuracy"],
        result["ensemble"]["accuracy"],
        result["centralized"]["accuracy"],
        result["standalone"]["accuracy"]["mean"],
        *result["standalone"]["accuracy"]["per_node"],
    ]
    assert all(0 <= accuracy <= 100 for accuracy in accuracies)
    assert max(accuracies) > 20  # percent
    assert len(result["standalone"]["accuracy"]["per_node"]) == 5
    assert set(result["seconds"]) == {"total", "local_training", "centralized", "distillation"}
    assert result["queries_by_name"] == {"count_labels": 1, "predict_logits": 24}
    assert (
        result["seconds"]["total"] >= sum(v for name, v in result["seconds"].items() if name != "total") > 0
    )
    assert result["engine"]["precision"] == "float32"
    assert result["peak_memory_mb"] > 50
    assert {"python", "torch", "fedstill"} <= set(result["versions"])


def test_counts_bytes_of_tensors(finished: Path) -> None:
    """5 nodes, 24 queries of 16 inputs of 1x8x8 float32, 10 classes, 2x2 patches."""
    by_kind = result_of(finished)["bytes"]["by_kind"]
    queries = 5 * 24
    assert by_kind["inputs"] == {"up": 0, "down": queries * 16 * 64 * 4}
    assert by_kind["logits"]["up"] == queries * 16 * 10 * 4
    assert by_kind["critic"]["up"] == queries * 16 * 4 * 4
    assert by_kind["gradients"] == {
        "up": queries * 16 * 64 * 4,
        "down": queries * (16 * 10 + 16 * 4) * 4,
    }
    assert by_kind["label counts"]["up"] == 5 * (10 + 1) * 4  # for each class, and the total


def test_audit_log_adds_up_to_result(finished: Path) -> None:
    lines = entries(finished)
    assert len(lines) == 5 * (1 + 24 * 2)  # counts once; each query's response and gradient
    assert sum(sum(line["up"].values()) for line in lines) == result_of(finished)["bytes"]["up"]
    assert all((line["mechanism"], line["no_guarantee"]) == ("none", 1) for line in lines)


def test_saved_student_reaches_reported_metrics(finished: Path) -> None:
    from fedstill.runs.simulation import build_simulation

    experiment, _ = build_simulation(load_toml(finished / "config.toml"))
    student = SmallCNN((1, 8, 8), 10, 8)
    student.load_state_dict(load_file(finished / "student.safetensors"))
    student.eval()
    with torch.no_grad():
        right = student(experiment.test.inputs).argmax(1).eq(experiment.test.targets)
    assert 100 * right.double().mean().item() == pytest.approx(result_of(finished)["student"]["accuracy"])


def test_equal_config_reaches_equal_metrics(finished: Path, tmp_path: Path) -> None:
    assert fedstill_run(str(finished / "config.toml"), "--out", str(tmp_path / "again")) == 0
    first, second = result_of(finished), result_of(tmp_path / "again")
    assert second["student"] == first["student"]
    assert second["standalone"] == first["standalone"]


def test_killed_run_reaches_equal_metrics(tmp_path: Path) -> None:
    options = [*SHORT, "--method.steps", "30"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert fedstill_run("digits-fediod", *options, "--out", str(whole)) == 0

    moments = random.Random(0)
    words = ["digits-fediod", *options, "--out", str(broken)]
    for line in sorted(moments.sample(range(30), 3)):
        process = _process(words, tmp_path)
        while _lines(broken / "metrics.jsonl") < line:
            assert process.runs, "the process ended before it was killed"
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        assert process.kill() == -signal.SIGKILL
        words = ["--resume", str(broken)]
    assert _process(words, tmp_path).end()[0] == 0
    expected, actual = result_of(whole), result_of(broken)
    for metric in ("student", "standalone", "ensemble", "centralized", "bytes", "queries_by_name"):
        assert actual[metric] == expected[metric], metric
    metrics = [
        [{**json.loads(line), "seconds": 0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, broken)
    ]
    assert metrics[0] == metrics[1]


def _process(words: list[str], here: Path) -> Command:
    # A state is saved at each opportunity, so that each kill finds an earlier one.
    begin = "from fedstill.core import run_writer; run_writer.SECONDS_BETWEEN = 0.0"
    return Command(["run", *words], here, [Path(cli.__file__).parents[2]], begin)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# --- invalid input: one line, exit code 2, nothing written --------------------------------------------


def images(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "images": rng.integers(0, 255, (200, 8, 8), dtype=np.uint8),
        "labels": np.arange(200) % 4,
        "classes": np.array(["a", "b", "c", "d"]),
        **changes,
    }


def with_nan() -> np.ndarray[Any, Any]:
    pixels = np.random.default_rng(0).random((200, 8, 8)).astype(np.float32)
    pixels[3, 2, 1] = np.nan
    return pixels


def broken_modules(folder: Path) -> None:
    """Write user modules whose imports fail."""
    (folder / "ours_broken.py").write_text("import ours\n")
    (folder / "package_broken").mkdir()
    (folder / "package_broken" / "__init__.py").touch()
    (folder / "package_broken" / "nets.py").write_text("from json import nothing\n")


BAD = {
    "unknown data set": ([], {"--data.name": "digitz"}, "digitz"),
    "label outside the classes": (images(labels=np.full(200, 7)), {}, "7"),
    "size not divisible by 4": (images(images=np.zeros((200, 9, 9), np.uint8)), {}, "multiples of 4"),
    "NaN": (images(images=with_nan()), {}, "NaN"),
    "too many nodes": (images(), {"--split.nodes": "100"}, "split.nodes"),
    "negative decay": ([], {"--nodes.local.weight_decay": "-1"}, "nodes.local.weight_decay = -1.0"),
    "half a channel": (
        [],
        {"--method.generator.width": "1"},
        "invalid method.generator.width = 1 (expected 2",
    ),
    "no network": ([], {"--nodes.models": "json:dumps"}, "model 'json:dumps' cannot be built"),
    "its import": ([], {"--nodes.models": "ours_broken:net"}, "No module named 'ours'"),
    "too few queries": (
        [],
        {"--nodes.policy.max_queries": "5"},
        "max_queries: 5, and the run asks 25",
    ),
    "policy": (images(), {"--nodes.policy.queries": "count_labels"}, "refuse query 'predict_logits'"),
}


@pytest.mark.parametrize("name", BAD)
def test_rejects_invalid_input_without_writing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.syspath_prepend(str(tmp_path))
    broken_modules(tmp_path)
    arrays, options, message = BAD[name]
    words = ["digits-fediod", *SHORT]
    if arrays:
        np.savez(tmp_path / "data.npz", **arrays)
        words += ["--data.name", str(tmp_path / "data.npz")]
    for option, value in options.items():
        words += [option, value]
    out = tmp_path / "out"
    assert fedstill_run(*words, "--out", str(out)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert message in lines[0]
    assert not out.exists()


def test_rejects_unsuitable_method_first() -> None:
    table = {"method": {"name": "asyndgan"}, "data": {"name": "digits"}, "split": {"nodes": 100_000}}
    with pytest.raises(MethodRefused, match="AsynDGAN cannot"):
        build_simulation(from_dict(table))


def test_rejects_damaged_audit_log(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def due(records: RunWriter) -> bool:
        if len(records.metrics) > 8:
            os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler does
        return True

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "is_save_due", due)
        bare = ("--evaluation.centralized", "false")
        assert fedstill_run("digits-fediod", *SHORT, *bare, "--out", str(out)) == 130
    assert "to resume: fedstill run --resume" in capsys.readouterr().err
    assert "The run stopped: interrupted" in (out / "report.html").read_text()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    original = (out / "audit.sqlite").read_bytes()
    edit(out / "audit.sqlite", "UPDATE entries SET line = line || ' ' WHERE entry = 2")
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "audit.sqlite"}
    logged = entries(out)
    assert fedstill_run("--resume", str(out)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "audit.sqlite: entry 2 is not as it was written" in line
    assert {name: (out / name).read_bytes() for name in before} == before
    assert entries(out) == logged
    (out / "audit.sqlite").write_bytes(original)
    assert fedstill_run("--resume", str(out)) == 0
    result = result_of(out)
    assert result["queries_by_name"] == {"count_labels": 1, "predict_logits": 24}
    assert result["bytes"] == result_of(finished)["bytes"]


def test_rejects_folder_of_other_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "result.json").read_bytes()
    assert fedstill_run("digits-fediod", *SHORT, "--out", str(finished)) == 2
    assert "--resume" in capsys.readouterr().err
    assert (finished / "result.json").read_bytes() == before


def test_resuming_finished_run_returns_result(finished: Path) -> None:
    before = result_of(finished)
    assert fedstill_run("--resume", str(finished)) == 0
    assert result_of(finished) == before


@pytest.mark.parametrize(("column", "names"), [("ward", ["a", "b"]), ("site", ["north", "south"])])
def test_metrics_by_site_of_split_column(tmp_path: Path, column: str, names: list[str]) -> None:
    """Without a split column, the column "site" is used. Sites of test examples are known, too."""
    count = np.arange(80)
    np.savez(
        tmp_path / "data.npz",
        images=np.zeros((80, 8, 8), dtype=np.uint8),
        labels=count % 2,
        ward=np.array(["a", "b"])[count // 4 % 2],
        site=np.array(["north", "south"])[count // 40],
        patient=count // 4,
    )
    split = (
        {"name": "column", "column": column, "nodes": 0} if column == "ward" else {"name": "iid", "nodes": 2}
    )
    run, about = build_simulation(
        from_dict(
            {"method": {"name": "fediod"}, "data": {"name": str(tmp_path / "data.npz")}, "split": split}
        )
    )
    assert run.evaluation.sites == names
    assert "test_cases" not in about["data"]  # each example is its own case
    groups = run.test.groups
    assert groups is not None
    assert 1 < len(set(groups.tolist())) < len(run.test)


def test_rejects_data_of_one_class(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "one.npz", images=rng.random((30, 8, 8)), labels=np.zeros(30, dtype=np.int64))
    name = str(tmp_path / "one.npz")
    table = {"method": {"name": "fedkd"}, "nodes": {"models": ["mlp:4"]}, "student": {"model": "mlp:4"}}
    with pytest.raises(DataError, match=r"class is 0 .*2 or"):
        build_simulation(from_dict({**table, "data": {"name": name}}))
    begun, _ = build_simulation(from_dict({**table, "public": {"name": name}}))
    assert begun.public is not None
    assert len(begun.public.inputs) == 24  # without its test part


def test_finished_run_detects_changed_options(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    text = (out / "config.toml").read_text()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert resume(out, progress=False) == result_of(finished)
    (out / "config.toml").write_text(text.replace("\nseed = 0\n", "\nseed = 5\n", 1))
    with pytest.raises(RunFolderError, match=r"seed = 0, .* 5"):
        resume(out, progress=False)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        **before,
        "config.toml": (out / "config.toml").read_bytes(),
    }
    (out / "config.toml").write_text(text.replace('device = "cpu"', 'device = "meta"', 1))
    assert resume(out, progress=False) == result_of(finished), "the device may change"
