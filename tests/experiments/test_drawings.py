"""Figures drawn from runs: the metrics of each figure on a small comparison of digits."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from fedstill.compare import comparison_runner
from fedstill.compare.comparison import read_comparison
from fedstill.core.registry import add_search_folders
from fedstill.report import write_report
from fedstill.report.records import RunFiles
from tests.support.packs import PRESETS

BASE = """
[base]
data = { name = "digits", train_limit = 200 }
split = { nodes = 2 }
nodes = { models = ["small-cnn:4"], local = { epochs = 1.0 } }
student = { model = "small-cnn:4" }
engine = { threads = 1 }
evaluation = { every = 1 }
"""
FORMS = {
    "fedkd_fig2": 'base.public = { name = "held-out" }\n[method]\nname = "fedkd"\nstudent.epochs = 1\n'
    "[vary]\ngamma = [inf, 1.0]\nlevels = [4, 200]\n",
    "fedmd_cg_fig3": 'methods = ["fedavg", "fedmd-cg"]\n[options]\nfedavg = { rounds = 2 }\n'
    "fedmd-cg = { rounds = 2 }\n",
    "fedmd_cg_fig5": '[options]\nfedcg-ave = { name = "fedcg", rounds = 2, aggregation = "ave*" }\n'
    'ave-latent = { name = "fedmd-cg", rounds = 2, aggregation = "ave*" }\n',
    "fedmd_cg_fig6": '[method]\nname = "fedmd-cg"\nrounds = 2\n'
    "[vary]\nlambda1 = [0.5, 1.0]\nlambda2 = [0.5]\n",
    "fediod_fig8": 'methods = ["fedavg", "fediod"]\n[options]\nfedavg = { rounds = 2 }\n'
    "fediod = { steps = 2, batch = 8, generator.width = 8, critic.width = 4 }\n",
}


def reproduced(name: str, folder: Path, **arguments: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Run a comparison like that of the figure; return its folder and the rows of the figure's program."""
    extra, _, rest = FORMS[name].partition("\n") if FORMS[name].startswith("base") else ("", "", FORMS[name])
    methods, _, tables = rest.partition("\n") if rest.startswith("methods") else ("", "", rest)
    public = extra.removeprefix("base.")
    (folder / f"{name}.toml").write_text(f"{methods}\n{BASE}{public}\n{tables}")
    runs, out = folder / name, folder / "out"
    out.mkdir()
    plan = read_comparison(folder / f"{name}.toml")
    comparison_runner.compare(plan, runs, command="", report=write_report, quiet=True)
    add_search_folders([str(PRESETS.parent)])
    program = importlib.import_module(name)
    return runs, program.reproduce(root="", out=out, seed=0, runs=runs, **arguments)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "picture"), [("fedkd_fig2", "figure2.svg"), ("fedmd_cg_fig6", "figure6.svg")]
)
def test_figures_of_comparison_results_return_no_rows(tmp_path: Path, name: str, picture: str) -> None:
    _, rows = reproduced(name, tmp_path)
    assert rows == []
    assert (tmp_path / "out" / picture).read_text().count("<path") > 10


@pytest.mark.slow
def test_curves_return_early_and_last_accuracy(tmp_path: Path) -> None:
    runs, rows = reproduced("fedmd_cg_fig3", tmp_path)
    values = {(row["method"], row["metric"]): row["value"] for row in rows}
    for method in ("fedavg", "fedmd-cg"):
        course = RunFiles.read(runs / f"{method}-seed0").metrics
        assert values[method, "accuracy, early"] == course.main_model[1]
        assert values[method, "accuracy"] == course.main_model[2]
        assert values[method, "local accuracy"] == course.local_models[2]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"curves.svg", "omega.svg"}


def test_consistency_is_the_last_loss_of_the_run(tmp_path: Path) -> None:
    runs, rows = reproduced("fedmd_cg_fig5", tmp_path)
    last = RunFiles.read(runs / "ave-latent-seed0").metrics.server_losses["consistency"]
    values = {(row["method"], row["metric"]): row["value"] for row in rows}
    assert values["FedMD-CG", "G+D loss, last"] == last[max(last)]
    assert ("FedCG", "G+D loss, last") in values


def test_bytes_until_target_accuracy_are_part_of_total(tmp_path: Path) -> None:
    runs, rows = reproduced("fediod_fig8", tmp_path, levels=[0.0, 101.0])
    values = {(row["method"], row["metric"]): row["value"] for row in rows}
    result = RunFiles.read(runs / "fedavg-seed0").result
    assert result.bytes.up
    assert result.bytes.down
    # The accuracy is at least 0 after the first of two rounds, and never 101.
    assert values["fedavg", "GB to 0 %"] == pytest.approx((result.bytes.up + result.bytes.down) / 2e9)
    assert ("fedavg", "GB to 101 %") not in values
    assert ("fediod", "best, %") in values
