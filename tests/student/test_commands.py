"""Use of a student: prediction, evaluation at an unseen hospital, export."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedstill
from fedstill.report.model_card import model_card
from fedstill.runs.run import run
from fedstill.runs.spec import load_toml
from tests.support import data_files

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", name="run")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three hospitals, next to that of a fourth."""
    folder = tmp_path_factory.mktemp("hospitals")
    (folder / "data").mkdir()
    (folder / "data" / "schema.toml").write_text(data_files.HOSPITAL_SCHEMA, encoding="utf-8")
    for seed, site in enumerate("abc"):
        data_files.write_hospital(folder / "data", site, seed)
    data_files.write_hospital(folder, "d", 3)
    toml = data_files.HOSPITAL_RUN.replace("DATA", str(folder / "data"))
    (folder / "run.toml").write_text(toml, encoding="utf-8")
    run(load_toml(folder / "run.toml"), folder / "run", command="fedstill run run.toml", progress=False)
    return folder / "run"


def test_student_file_describes_network_and_inputs(run: Path) -> None:
    with safe_open(run / "student.safetensors", "pt") as file:
        header = file.metadata()
    assert list(header) == ["fedstill"]  # safetensors does not keep the order of several keys
    output = json.loads(header["fedstill"])
    assert output["format"] == "fedstill student 1"
    assert (output["model"], output["classes"], output["shape"]) == ("linear", ["no", "yes"], [4])
    assert output["task"]["name"] == "tabular"
    assert [column["name"] for column in output["schema"]["columns"]] == ["age", "sex", "ill"]


def test_evaluates_on_unseen_hospital(run: Path, command: Main) -> None:
    code, out, _ = command("evaluate", run, "--data", run.parent / "d.csv", "--json")
    assert code == 0
    evaluation = json.loads(out)
    rows = list(csv.DictReader((run.parent / "d.csv").open(encoding="utf-8")))
    responses = fedstill.load(run)({name: [row[name] for row in rows] for name in ("age", "sex")}).argmax(1)
    right = [("no", "yes")[int(each)] == row["ill"] for each, row in zip(responses, rows, strict=True)]
    assert evaluation["examples"] == len(rows) == 60
    assert evaluation["metrics"]["accuracy"] == pytest.approx(100 * sum(right) / 60)
    assert evaluation["metrics"]["accuracy"] > 60, "chance is 50; 75 and 87 with two other seeds"
    low, high = evaluation["interval"]
    assert low < evaluation["metrics"]["accuracy"] < high
    assert evaluation["seen"] == {"examples": 0, "public": 0, "why": ""}

    code, out, _ = command("evaluate", run, "--data", run.parent / "d.csv")
    assert code == 0
    assert "None of the 60 examples is in the nodes' training data" in out


def test_evaluate_counts_seen_examples_and_reports_sites(run: Path, command: Main) -> None:
    both = run.parent / "both"
    both.mkdir()
    for source in (run.parent / "d.csv", run.parent / "data" / "a.csv"):
        shutil.copy(source, both)
    evaluation = json.loads(command("evaluate", run, "--data", both, "--json")[1])
    assert set(evaluation["sites"]) == {"a", "d"}
    alone = json.loads(command("evaluate", run, "--data", run.parent / "d.csv", "--json")[1])
    assert evaluation["sites"]["d"]["metrics"] == alone["metrics"]
    assert evaluation["sites"]["d"]["interval"] == alone["interval"]
    assert evaluation["seen"]["examples"] > 30  # four of five rows of a were at its node
    only = json.loads(command("evaluate", run, "--data", both, "--sites", "d", "--json")[1])
    assert only["metrics"] == alone["metrics"]


def test_predict_does_not_overwrite_without_flag(
    run: Path, command: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, responses = run.parent / "d.csv", tmp_path / "d-predictions.csv"
    assert command("predict", run, data)[0] == 0
    first = responses.read_bytes()
    code, _, err = command("predict", run, data)
    assert (code, responses.read_bytes()) == (2, first)
    assert "d-predictions.csv exists: --out names another file" in err
    err = command("predict", run.parent, data, "--out", "other.csv")[2]  # such as a comparison's folder
    assert f"it holds several runs (expected one of them, as {run}" in err
    assert command("predict", run, data, "--out", responses)[0] == 0


def test_evaluate_counts_public_training_examples(tmp_path: Path, command: Main) -> None:
    draws, file, out = np.random.default_rng(0), tmp_path / "mine.npz", tmp_path / "run"
    np.savez(file, images=draws.random((200, 8, 8), dtype=np.float32), labels=draws.integers(0, 3, 200))
    few = "--method.name fedkd --method.student.epochs 1 --nodes.local.epochs 1 --split.nodes 2"
    rest = ("--public.name", "held-out", "--evaluation.centralized", "false", "--quiet", "--out", out)
    assert command("run", "demo", "--data", file, *few.split(), *rest)[0] == 0
    overlap = json.loads(command("evaluate", out, "--data", file, "--json")[1])["seen"]
    assert overlap == {
        "examples": 128,
        "public": 32,
        "why": "",
    }  # 160 for training, of which a fifth is held out
    expected = "128 are also in the nodes' training data, and 32 are also in the public data"
    assert expected in " ".join(command("evaluate", out, "--data", file)[1].split())

    file.rename(tmp_path / "moved.npz")  # other data take its place
    np.savez(file, images=draws.random((200, 8, 8), dtype=np.float32), labels=draws.integers(0, 3, 200))
    overlap = json.loads(command("evaluate", out, "--data", tmp_path / "moved.npz", "--json")[1])["seen"]
    assert overlap["examples"] is None
    assert "mine.npz" in overlap["why"]


def test_evaluate_claims_nothing_about_unavailable_node_data(run: Path, command: Main) -> None:
    out = command("evaluate", run / "student.safetensors", "--data", run.parent / "d.csv")[1]
    assert "not checked" in out
    assert "None of the" not in out


def test_predictions_have_one_line_per_example(run: Path, command: Main, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("sex,age\nf,90\nm,10\nf,\n", encoding="utf-8")  # unlabeled data
    words = ("--out", tmp_path / "answers.csv", "--json")
    code, out, err = command("predict", run, tmp_path / "new.csv", *words)
    assert (code, err) == (0, "")
    assert json.loads(out) == {"answers": 3, "file": str(tmp_path / "answers.csv")}
    lines = list(csv.DictReader((tmp_path / "answers.csv").open(encoding="utf-8")))
    assert [line["example"] for line in lines] == ["0", "1", "2"]
    assert [line["prediction"] for line in lines[:2]] == ["yes", "no"]
    assert all(float(line["no"]) + float(line["yes"]) == pytest.approx(1, abs=1e-5) for line in lines)
    (tmp_path / "new.csv").write_text("sex,age\nf,190\n", encoding="utf-8")
    code, _, err = command("predict", run, tmp_path / "new.csv", "--out", tmp_path / "answers.csv")
    assert (code, err.count("\n")) == (2, 1)
    assert "column 'age' is 190 (expected 0 to 100, or nothing" in err


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "huggingface"])
def test_export_matches_student_and_includes_preprocessing(
    run: Path, command: Main, tmp_path: Path, kind: str
) -> None:
    needed = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "huggingface": ("transformers",)}
    for name in needed.get(kind, ()):
        pytest.importorskip(name)
    code, out, _ = command("export", run, "--format", kind, "--out", tmp_path / "student")
    assert code == 0
    assert "loaded back, and the same" in out
    # A woman of 70, a man of unknown age, and a person outside of the schema.
    rows = torch.tensor([[70.0, 0.0], [torch.nan, 1.0], [170.0, 0.0]])
    if kind == "onnx":
        import onnxruntime  # type: ignore[import-not-found]

        session = onnxruntime.InferenceSession(str(tmp_path / "student"))
        theirs = torch.from_numpy(session.run(None, {"rows": rows.numpy()})[0])
    elif kind == "torchscript":
        theirs = torch.jit.load(str(tmp_path / "student"))(rows)
    else:
        from transformers import AutoModel

        theirs = AutoModel.from_pretrained(str(tmp_path / "student"))(rows).logits
    mine = fedstill.load(run)({"age": ["70", ""], "sex": ["f", "m"]})
    torch.testing.assert_close(theirs[:2], mine, atol=1e-5, rtol=1e-5)
    assert theirs[2].isnan().all()


def test_missing_onnx_is_one_line(run: Path, command: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    code, _, err = command("export", run, "--format", "onnx")
    assert (code, err.count("\n")) == (2, 1)
    assert "--format onnx needs onnxscript: pip install 'fedstill[onnx]'" in err


def test_export_to_a_file_named_like_another_format_is_refused(
    run: Path, command: Main, tmp_path: Path
) -> None:
    code, _, err = command("export", run, "--format", "onnx", "--out", tmp_path / "student.pt")
    assert (code, err.count("\n"), list(tmp_path.glob("student*"))) == (2, 1, [])
    assert "invalid --out" in err


def test_model_card_has_facts_of_run(run: Path, command: Main, tmp_path: Path) -> None:
    words = ("--format", "torchscript", "--out", tmp_path / "student.pt", "--json")
    code, out, _ = command("export", run, *words)
    assert code == 0
    output = json.loads(out)
    assert (output["file"], output["card"]) == (str(tmp_path / "student.pt"), str(tmp_path / "student.pt.md"))
    assert 0 <= output["apart"] < 1e-4
    assert output["takes"] in Path(output["card"]).read_text(encoding="utf-8")
    card = (tmp_path / "student.pt.md").read_text(encoding="utf-8")
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    for fact in (
        "license: unknown",
        "trained by FedAvg (tabular)",
        f"| student (FedAvg) | {result['accuracy']:.1f}",
        "144 training examples at 3 nodes, 36 test examples",
        "no guarantee",
        "No attacks were run",
        "parameters (",
        'torch.jit.load("student.pt")(tensor)',
    ):
        assert fact in card
    assert "node-0" not in card, "counts of single nodes are not public"


def test_model_card_omits_unreleased_sizes(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "result.json"
    result = json.loads(file.read_text(encoding="utf-8"))

    def card(*leaves: str, mechanism: str = "none") -> str:
        privacy = {"nodes": [{"name": "node-0", "mechanism": mechanism}]}
        file.write_text(json.dumps({**result, "releases": leaves, "privacy": privacy}), encoding="utf-8")
        return model_card(tmp_path / "run", "rows", "")

    assert "144 training examples" in card("label counts", "parameters")
    assert "node-0" not in card("label counts", "parameters")
    assert "144" not in card("label counts", "parameters", mechanism="dp-sgd")
    assert "144" not in card("parameters")
    result["notes"] = ["no node holds an example of yes"]
    open_, private = card("parameters"), card("parameters", mechanism="dp-sgd")
    assert "no node holds an example of yes." in open_
    assert "| centralized |" in open_
    assert "holds an example" not in private
    assert "| centralized |" not in private
    assert "| student (FedAvg) |" in private
