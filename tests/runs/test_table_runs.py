"""Tables in whole runs: supported methods on both engines, and refusals before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.cli import main as cli
from fedstill.core.errors import DataError
from fedstill.data import make_data_config
from fedstill.data.loading import load
from fedstill.data.table_data import check_features, encode_frame
from fedstill.models import MLP, Linear
from fedstill.tasks.classification import TabularConfig
from tests.support.errors import raises_invalid
from tests.support.runs import result_of, small_run


def run(out: Path, *words: str, method: str, model: str = "mlp:16") -> int:
    local = {"epochs": 20, "lr": 0.02, "batch": 8}
    return small_run(
        out, *words, task="tabular", method=method, model=model, local=local, data={"name": "wine"}
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "model", "options"),
    [
        ("standalone", "linear", ()),
        ("fedavg", "residual-mlp:8", ("--method.rounds", "4")),
        ("fedmd-cg", "mlp:16", ("--method.rounds", "4")),
        ("feddf", "mlp:16", ("--method.rounds", "4", "--method.steps", "5")),
        ("fedmd", "mlp:16", ("--method.rounds", "6", "--method.student.lr", "0.01")),
        (
            "fedkd",
            "mlp:16",
            ("--method.student.epochs", "60", "--method.student.batch", "16", "--method.student.lr", "0.01"),
        ),
        ("fediod", "mlp:16", ("--public.name", "none", "--method.steps", "120")),
    ],
)
def test_methods_learn_tables(tmp_path: Path, method: str, model: str, options: tuple[str, ...]) -> None:
    assert run(tmp_path, *options, method=method, model=model) == 0
    result = result_of(tmp_path)
    assert (result["task"], result["metric"], result["data"]["shape"]) == ("tabular", "accuracy", [13])
    accuracy = result["accuracy"] if result["accuracy"] is not None else result["local"]["accuracy"]["mean"]
    assert accuracy > 75, "chance is 40"


@pytest.mark.sample(1)
@pytest.mark.usefixtures("steady_adam")
@pytest.mark.parametrize("method", ["fedavg", "fediod"])
def test_one_by_one_equals_stacked(tmp_path: Path, method: str) -> None:
    steps = ("--method.steps", "20") if method == "fediod" else ("--method.rounds", "3")
    results = []
    for engine in ("stacked", "one-by-one"):
        (tmp_path / engine).mkdir()
        assert run(tmp_path / engine, *steps, "--engine.batching", engine, method=method) == 0
        results.append(result_of(tmp_path / engine))
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert results[0]["bytes"] == results[1]["bytes"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("standalone", ()),
        ("fedavg", ("--method.rounds", "4")),
        (
            "fedkd",
            ("--method.student.epochs", "60", "--method.student.batch", "16", "--method.student.lr", "0.01"),
        ),
        ("fediod", ("--public.name", "none", "--method.steps", "150")),
    ],
)
def test_methods_learn_regression(tmp_path: Path, method: str, options: tuple[str, ...]) -> None:
    numbers = ("--task.name", "regression", "--data.name", "diabetes", "--nodes.local.lr", "0.005")
    assert run(tmp_path, *numbers, *options, method=method) == 0
    result = result_of(tmp_path)
    assert (result["metric"], result["kind"], result["data"]["shape"]) == ("r2", "number", [11])
    reached = result if result["r2"] is not None else {k: v["mean"] for k, v in result["local"].items()}
    assert reached["r2"] > 20, "a constant prediction has 0"
    assert 10 < reached["mae"] < reached["rmse"] < 20
    assert [node["label_counts"] for node in result["nodes"]] == [[n["examples"]] for n in result["nodes"]]
    assert "Rows at each node" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_saves_generated_rows_and_shows_schema(tmp_path: Path) -> None:
    assert run(tmp_path, "--public.name", "none", "--method.steps", "20", method="fediod") == 0
    from safetensors.torch import load_file

    data = load(make_data_config("wine"), TabularConfig())
    saved = load_file(tmp_path / "run" / "samples.safetensors")
    check_features(next(iter(saved.values())), data.schema, "made")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "flavanoids" in page
    assert "0.3 to 5.2" in page


def test_dp_sgd_trains_tables_and_critics(tmp_path: Path) -> None:
    privacy = ("--nodes.privacy.mechanism", "dp-sgd", "--nodes.privacy.epsilon", "8.0")
    words = (*privacy, "--public.name", "none", "--method.steps", "3", "--nodes.local.epochs", "2")
    assert run(tmp_path, *words, method="fediod") == 0
    assert result_of(tmp_path)["privacy"]["guarantee"]


@pytest.mark.parametrize(
    ("words", "method", "model", "message"),
    [
        ((), "fedavg", "small-cnn", "one of mlp, linear, residual-mlp"),
        ((), "fedavg", "linear:8", "model"),
        ((), "fedad", "mlp", "it needs images, and the inputs of this task are rows of a table"),
        ((), "fl-mrcm", "mlp", "it needs images"),
        ((), "asyndgan", "mlp", "it needs images"),
        (("--method.predictions", "2"), "fedkd", "mlp", "rows of a table are never shifted"),
        (("--nodes.local.augment", "shift"), "fedavg", "mlp", "rows cannot be augmented"),
        (("--method.student.augment", "shift"), "fediod", "mlp", "rows cannot be augmented"),
        (("--task.name", "classification"), "fedavg", "mlp", "data.name"),
    ],
)
def test_rejects_methods_unsuitable_for_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], method: str, model: str,
    message: str,
) -> None:  # fmt: skip
    assert run(tmp_path, *words, method=method, model=model) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_attacks_run_on_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--public.name", "none", "--method.steps", "5", method="fediod") == 0
    with pytest.raises(SystemExit) as exit:
        cli.main(["attack", str(tmp_path / "run"), "--attacks", "counts", "memorization"])
    assert exit.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "label counts recovered exactly at 3 of 3 nodes" in output
    assert "it compares images, and the inputs of this task are rows of a table" in output


# --- from Python ------------------------------------------------------------------------------------------

COLUMNS = fedstill.TableSchema(
    "ill",
    (
        fedstill.SchemaColumn(name="age", range=(0.0, 100.0)),
        fedstill.SchemaColumn(name="ill", type="category", categories=("no", "yes")),
    ),
)
QUICK: dict[str, Any] = {
    "task": "tabular",
    "method": fedstill.FedAvg(rounds=5),
    "local": fedstill.LocalConfig(epochs=30, lr=0.05),
    "policies": [fedstill.PolicyConfig(outputs_only=False)] * 2,
}


class Frame(dict[str, list[Any]]):
    """The used attributes of a DataFrame."""

    shape = (60, 2)
    to_numpy = None

    @property
    def columns(self) -> list[str]:
        return list(self)


def frame(first: int) -> Frame:
    ages = [(first + 7 * n) % 100 for n in range(60)]
    return Frame(age=ages, ill=["yes" if age > 50 else "no" for age in ages])


def test_distil_accepts_features_and_data_frames() -> None:
    def tensors(table: Frame) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor(table["age"]).unsqueeze(1) / 50 - 1
        return x, torch.tensor([int(ill == "yes") for ill in table["ill"]])

    outcomes = []
    for form in (lambda table: table, tensors):
        torch.manual_seed(0)
        models = [Linear((1,), 2) for _ in range(2)]
        data, test = [form(frame(0)), form(frame(3))], form(frame(5))
        outcomes.append(
            fedstill.distil(data, models, Linear((1,), 2), test, COLUMNS.classes, schema=COLUMNS, **QUICK)
        )
    assert outcomes[0].result["accuracy"] == outcomes[1].result["accuracy"] > 90


def test_patient_column_groups_rows() -> None:
    whose = Frame(frame(0), patient=["a", "a ", *"bbbb", *range(54)])
    groups = encode_frame(whose, COLUMNS, "data[0]").groups
    assert groups is not None
    assert len(set(groups.tolist())) == 56
    assert groups[0] == groups[1]
    models = [Linear((1,), 2) for _ in range(2)]
    how: dict[str, Any] = {
        **QUICK,
        "schema": COLUMNS,
        "privacies": [fedstill.DPSGD(epsilon=5.0, group_size=4)] * 2,
    }
    outcome = fedstill.distil([whose, whose], models, Linear((1,), 2), frame(5), COLUMNS.classes, **how)
    assert outcome.result["privacy"]["nodes"][0]["epsilon"] <= 5


@pytest.mark.parametrize(
    "column", [{"Patient": ["a"] * 60}, {"patient": [None] * 60}, {"patient": ["a", "A"] * 30}]
)
def test_rejects_missing_patients(column: dict[str, list[Any]]) -> None:
    with pytest.raises(DataError, match=r"data\[0\].*'[Pp]atient'"):
        encode_frame(Frame(frame(0), **column), COLUMNS, "data[0]")


def test_rejects_generating_rows_without_schema() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) * 100
    data = (x, (x[:, 0] > 0).long())
    models = [MLP((3,), 2, 8) for _ in range(2)]
    assert fedstill.distil([data, data], models, MLP((3,), 2, 8), data, 2, **QUICK).result["accuracy"] > 80
    with raises_invalid("schema", "", "a table's columns", "public data"):
        fedstill.distil([data], models[:1], MLP((3,), 2, 8), data, 2, task="tabular")


def test_rejects_invalid_rows() -> None:
    x, model = torch.zeros(4, 1), Linear((1,), 2)
    data = (x, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(DataError, match='task "tabular"'):
        fedstill.distil([data], [model], model, data, 2)
    with pytest.raises(DataError, match=r"data\[0\] .*DataFrame .*schema="):
        fedstill.distil([frame(0)], [model], model, data, 2, task="tabular")
    old = Frame(age=[300], ill=["no"])
    with pytest.raises(DataError, match=r"data\[0\], row 0: .*'age' is 300 .*0 to 100"):
        fedstill.distil([old], [model], model, data, 2, task="tabular", schema=COLUMNS)
    with raises_invalid("classes", 3, "2", "no, yes"):
        fedstill.distil([data], [model], model, data, 3, task="tabular", schema=COLUMNS)
