"""Survival analysis in whole runs, on a table with known hazards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.cli import main as cli
from fedstill.core.errors import DataError
from fedstill.data.table_data import read_schema, read_table_folder
from fedstill.models import MLP
from tests.support import data_files
from tests.support.runs import result_of, small_run


def run(out: Path, *words: str, method: str) -> dict[str, Any]:
    """Return ``result.json`` of a run with a node for each site."""
    tables = {
        "data": {"name": str(data_files.write_survival(out / "hospitals"))},
        "split": {"name": "column", "column": "site", "nodes": 0},
        "public": {"name": "noise", "limit": 200},
        "evaluation": {"centralized": True, "every": 0},
    }
    local = {"epochs": 30, "lr": 0.01, "batch": 16}
    assert small_run(out, *words, task="survival", method=method, model="mlp:16", local=local, **tables) == 0
    return result_of(out)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("standalone", ()),
        ("centralized", ()),
        ("fedavg", ("--method.rounds", "6")),
        (
            "fedkd",
            ("--method.student.epochs", "40", "--method.student.batch", "16", "--method.student.lr", "0.01"),
        ),
        ("fediod", ("--public.name", "none", "--method.steps", "150")),
    ],
)
def test_methods_learn_survival(tmp_path: Path, method: str, options: tuple[str, ...]) -> None:
    result = run(tmp_path, *options, method=method)
    assert (result["metric"], result["kind"], result["data"]["shape"]) == ("concordance", "time", [6])
    alone = {key: each["mean"] for key, each in (result["local"] or {}).items()}
    reached = alone if result["concordance"] is None else result
    assert reached["concordance"] > 70, "chance is 50"
    assert reached["brier"] < 0.2, "the score of a constant prediction of 0.5 is 0.25"
    low, high = result["intervals"]["nodes" if method == "standalone" else "global_model"]
    assert low < reached["concordance"] < high
    by_site = result["sites"]["nodes"]["node-1"] if alone else result["sites"]["global_model"]
    assert set(by_site) == {"site-0", "site-1", "site-2"}
    assert set(by_site["site-2"]) == {"concordance", "brier"}
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "event indicator" in page
    assert "Follow-up times" in page
    message = "its number of rows followed through each interval"
    assert (message in page) == (method in ("fedkd", "fediod"))


def test_rejects_survival_table_without_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = data_files.write_survival(tmp_path / "hospitals", rows=12)
    for task, text, message in (
        (
            "survival",
            data_files.SURVIVAL_SCHEMA.replace('event = "died"', ""),
            "'months' of the schema is a number",
        ),
        (
            "regression",
            data_files.SURVIVAL_SCHEMA,
            "'months' of the schema is a time until an event (expected",
        ),
    ):
        (folder / "schema.toml").write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit) as exit:
            cli.main(["run", "diabetes-fediod", "--task.name", task, "--data.name", str(folder)])
        assert exit.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_distil_accepts_times_and_events(tmp_path: Path) -> None:
    folder = data_files.write_survival(tmp_path, sites=2)
    schema = read_schema(folder / "schema.toml")
    data = read_table_folder(folder, schema).data
    rows = torch.arange(len(data)) % 3
    parts = [(data.inputs[rows == site], data.targets[rows == site]) for site in range(3)]
    torch.manual_seed(0)
    models = [MLP((6,), 8, 16) for _ in range(3)]
    result: dict[str, Any] = {
        "task": "survival",
        "method": fedstill.FedAvg(rounds=5),
        "local": fedstill.LocalConfig(epochs=20, lr=0.01),
        "policies": [fedstill.PolicyConfig(outputs_only=False)] * 2,
    }
    outcome = fedstill.distil(parts[:2], models[:2], models[2], parts[2], 8, schema=schema, **result)
    assert outcome.result["concordance"] > 70
    late = (parts[0][0], parts[0][1] + torch.tensor([9.0, 0.0]))
    with pytest.raises(DataError, match=r"intervals .*0 to 8"):
        fedstill.distil([late, parts[1]], models[:2], models[2], parts[2], 8, schema=schema, **result)
