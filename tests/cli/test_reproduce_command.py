"""Tables and figures of papers: the list, one reproduction from file to record, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedstill.cli import reproduce
from fedstill.cli.main import main
from fedstill.compare import reproduction
from fedstill.compare.reproduction import ReproducedMetric, ReproductionRecord
from fedstill.core.config_tables import parse_toml
from fedstill.report.comparison_tables import reproduction_markdown

FILE = """
seeds = 2
methods = ["standalone", "fedavg"]
[reproduces]
paper = "FedX"
what = "Table 1"
title = "two methods"
minutes = 1
reduction = "Digits for photographs."
[base]
data = { name = "digits", train_limit = 200 }
split = { nodes = 2 }
nodes = { models = ["mlp:8"], local = { epochs = 1.0 } }
student = { model = "mlp:8" }
engine = { threads = 1 }
evaluation = { every = 0 }
[options]
fedavg = { rounds = 2 }
[published]
metrics = ["accuracy", "gigabytes"]
standalone = [[70.0, 1.5], ""]
fedavg = [90.0, 3]
[scale.paper]
base = { data = { train_limit = 0 } }
[scale.features.base]
nodes = { models = ["linear"] }
student = { model = "linear" }
features = { backbone = "random-conv:2" }
[scale.features.reproduces]
reduction = "On frozen filters."
"""
VIEW = """
[reproduces]
paper = "FedX"
what = "Figure 1"
title = "the same, drawn"
minutes = 1
reduction = "As of Table 1."
runs = "x-table1"
methods = ["fedavg"]
program = "x_drawing.py"
[arguments]
scale = 2.0
"""
PROGRAM = """
import json

def reproduce(*, root, out, seed, runs, methods, scale):
    found = json.loads((runs / f"{methods[0]}-seed{seed}" / "result.json").read_text())
    (out / "drawn.svg").write_text("<svg/>")
    return [{"method": "fedavg", "metric": "scaled", "value": scale * found["seed"]}]
"""

ALONE = """
[reproduces]
paper = "FedX"
what = "Figure 2"
title = "no runs"
minutes = 1
reduction = "None."
program = "x_alone.py"
data = ["mnist"]
"""
ALONES = """
def reproduce(*, root, out, seed):
    return [{"method": root, "metric": "seed", "value": seed}]
"""


@pytest.fixture
def papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the files of the papers by those of two others, and change to an empty folder."""
    folder, here = tmp_path / "experiments", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    (folder / "x_table1.toml").write_text(FILE)
    (folder / "x_fig1.toml").write_text(VIEW)
    (folder / "x_drawing.py").write_text(PROGRAM)
    (folder / "x_fig2.toml").write_text(ALONE)
    (folder / "x_alone.py").write_text(ALONES)
    monkeypatch.setattr(reproduction, "experiments_folder", lambda: folder)
    monkeypatch.chdir(here)
    return folder


def test_incomplete_file_is_refused_with_the_missing_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('[reproduces]\nreduction = "None."\npaper = "FedX"\n')
    reproduced("mine.toml", code=2)
    assert "invalid reproduces.what = '' (expected a text" in capsys.readouterr().err


def reproduced(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(["reproduce", *words])
    assert end.value.code == code


def test_table_is_run_recorded_and_resumed(
    papers: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = ("--nodes.local.epochs=1.0", "--data.root", str(papers))
    reproduced("x-table1", "--seeds", "1", "--quiet", *changed)
    shown = capsys.readouterr().out
    assert "| fedavg |" in shown
    assert "90.0" in shown
    assert "Digits for photographs." in shown
    assert "Pairs of methods in the paper's order: 0 of 1; significantly different: none." in shown
    first = Path("runs/reproduce/x-table1/fedavg-seed0/result.json")
    before = first.read_bytes()
    assert not (papers / "records").exists()
    reproduced("x-table1", "--record", "--quiet", *changed)
    assert first.read_bytes() == before  # only the second seed was run
    record = ReproductionRecord.read(papers / "records" / "x_table1.json")
    assert record is not None
    assert record.seeds == (0, 1)
    assert record.changed == ("--nodes.local.epochs 1.0",)  # the data folder does not change the table
    rows = {(row.method, row.metric): row for row in record.rows}
    result = json.loads(before)
    assert rows["fedavg", "accuracy"].values[0] == round(result["accuracy"], 4)
    crossed = (result["bytes"]["up"] + result["bytes"]["down"]) / 1e9
    assert rows["fedavg", "gigabytes"].values[0] == pytest.approx(crossed, abs=1e-4)

    capsys.readouterr()
    reproduced("x-table1", "--recorded")
    assert "| fedavg |" in capsys.readouterr().out
    reproduced("x-table1", "--json", "--quiet", *changed)
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(record.rows)
    reproduced("x-table1", "--recorded", "--json")
    assert json.loads(capsys.readouterr().out)["seeds"] == [0, 1]
    page = Path("runs/reproduce/x-table1/compare.html").read_text(encoding="utf-8")
    assert "values differ from the paper&#39;s: Digits for photographs." in page
    monkeypatch.delenv("COLUMNS", raising=False)
    reproduced()
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("x-table1\t")]
    output = "x-table1 FedX, Table 1: two methods digits 1 "
    assert " ".join(line.split()).startswith(
        f"{output}{record.date}, 2 seeds; 0 of 1; significantly different: "
    )

    made = papers / "records" / "x_table1.json"
    made.write_text(made.read_text().replace(str(rows["fedavg", "accuracy"].values[0]), "1.5"))
    stale = ReproductionRecord.read(made)
    assert stale is not None
    assert stale.rows != record.rows
    reproduced("x-table1", "--only", "standalone", "--record", "--quiet", "--out", "apart", *changed)
    assert not Path("apart/x-table1/fedavg-seed0").exists()
    separate_record = ReproductionRecord.read(made)
    assert separate_record is not None
    assert separate_record.rows == stale.rows  # results of the other method are kept
    reproduced("x-table1", "--only", "fedavg", "--record", "--quiet", *changed)
    renewed = ReproductionRecord.read(made)
    assert renewed is not None
    assert renewed.rows == record.rows
    where = f"Run on {record.date}:"  # on the machine of the record
    assert renewed.note == f"{where} standalone. {where} fedavg."
    real = reproduce._run_missing_and_read_metrics

    def while_another_command_records(*arguments: Any) -> Any:
        measured = real(*arguments)
        made.write_text(json.dumps({**json.loads(made.read_text()), "note": "From another command."}))
        return measured

    with monkeypatch.context() as during:
        during.setattr(reproduce, "_run_missing_and_read_metrics", while_another_command_records)
        reproduced("x-table1", "--only", "fedavg", "--record", "--quiet", *changed)
    assert json.loads(made.read_text())["note"].startswith("From another command. Run on")
    reproduced("x-table1", "--only", "fedavg", "--seeds", "1", "--record", code=2)
    assert "invalid --seeds = 1 (expected 2, as in the record" in capsys.readouterr().err

    reproduced("x-fig1", "--record", "--quiet", *changed)  # uses existing runs and starts none
    assert first.read_bytes() == before
    assert Path("runs/reproduce/x-fig1/seed1/drawn.svg").exists()
    written = ReproductionRecord.read(papers / "records" / "x_fig1.json")
    assert written is not None
    assert written.rows == (ReproducedMetric("", "fedavg", "scaled", {0: 0.0, 1: 2.0}),)


def test_table_at_another_scale_has_the_remarks_on_that_scale(
    papers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reproduced("x-table1", "--scale", "features", "--seeds", "1", "--record", "--quiet")
    shown = capsys.readouterr().out
    page = Path("runs/reproduce/x-table1-features/compare.html").read_text(encoding="utf-8")
    for text in (shown, page):
        assert "On frozen filters." in text
        assert "Digits for photographs." not in text
    record = ReproductionRecord.read(papers / "records" / "x_table1_features.json")
    assert record is not None
    assert record.scale == "features"
    result = json.loads(Path("runs/reproduce/x-table1-features/fedavg-seed0/result.json").read_bytes())
    assert result["features"]["backbone"] == "random-conv:2"


def test_figure_runs_only_the_methods_it_shows(papers: Path) -> None:
    reproduced("x-fig1", "--seeds", "1", "--quiet")
    table = Path("runs/reproduce/x-table1")
    assert Path("runs/reproduce/x-fig1/seed0/drawn.svg").exists()
    assert (table / "fedavg-seed0" / "result.json").exists()
    assert not (table / "standalone-seed0").exists()
    reproduced("x-table1", "--seeds", "1", "--quiet")  # the same comparison resumes with the remaining runs
    assert (table / "standalone-seed0" / "result.json").exists()


def test_program_without_runs_gets_the_data_folder(papers: Path) -> None:
    reproduced("x-fig2", "--data.root=there", "--record")
    record = ReproductionRecord.read(papers / "records" / "x_fig2.json")
    assert record is not None
    assert record.rows == (ReproducedMetric("", "there", "seed", {0: 0.0}),)
    assert record.changed == ()


def test_plan_prints_configuration_and_runs_nothing(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reproduced("x-table1", "--scale", "paper", "--plan", "--seeds", "1", "--split.nodes", "3")
    plan = parse_toml(capsys.readouterr().out, "plan")
    assert (plan["seeds"], plan["base"]["data"]["train_limit"], plan["base"]["split"]["nodes"]) == ([0], 0, 3)
    assert plan["options"]["fedavg"] == {"name": "fedavg", "rounds": 2, "participation": 1.0}
    reproduced("x-fig1", "--plan")
    output = capsys.readouterr().out
    assert "arguments of x_drawing.py\n[arguments]\nscale = 2.0\n" in output
    assert parse_toml(output, "plan")["methods"] == ["standalone", "fedavg"]
    assert not Path("runs").exists()


def test_part_of_a_table_is_recorded_before_the_rest(papers: Path) -> None:
    """The first row's record is of that row only, also if the other one has a result."""
    changed = ("--nodes.local.epochs=1.0", "--data.root", str(papers), "--quiet")
    file = papers / "records" / "x_table1.json"
    reproduced("x-table1", *changed)
    reproduced("x-table1", "--only", "fedavg", "--record", *changed)
    first = ReproductionRecord.read(file)
    assert first is not None
    assert {row.method for row in first.rows} == {"fedavg"}
    assert first.note == "Only: fedavg."
    reproduced("x-table1", "--only", "standalone", "--record", *changed)
    second = ReproductionRecord.read(file)
    assert second is not None
    assert {row.method for row in second.rows} == {"fedavg", "standalone"}
    assert [row for row in second.rows if row.method == "fedavg"] == list(first.rows)


def test_stopped_reproduction_prints_the_command_to_resume(
    papers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (papers / "x_fig3.toml").write_text(ALONE.replace("x_alone", "x_stopped"))
    (papers / "x_stopped.py").write_text("def reproduce(**_): raise KeyboardInterrupt")
    reproduced("x-fig3", "--data.root", "a b", code=130)
    assert capsys.readouterr().err.endswith("to resume: fedstill reproduce x-fig3 --data.root 'a b'\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x-table2",), "unknown table or figure 'x-table2': did you mean 'x-table1'"),
        (("x-table1", "--scale", "huge"), "unknown scale 'huge'"),
        (("x-fig1", "--scale", "paper"), "unknown scale 'paper'"),
        (("x-table1", "--recorded"), "nothing is recorded of x-table1"),
        (("x-table1", "--only", "fedprox"), "unknown method or setting 'fedprox'"),
        (
            ("x-fig1", "--only", "fedavg"),
            "invalid --only = 'fedavg' (expected none: a program computes x-fig1",
        ),
        (
            ("x-table1", "--recorded", "--only", "fedavg"),
            "invalid --recorded = '--only' (expected none of these",
        ),
        (
            ("--only", "fedavg"),
            "invalid fedstill reproduce = '--only fedavg' (expected the name of a table or figure",
        ),
        (("x-table1", "--seeds", "0"), "invalid --seeds = 0 (expected 1 or more"),
        (("x-table1", "--data.name", "cifar10", "--data.root", "nowhere"), "docs/tasks.md"),
        (("x-table1", "--unheard.of", "1"), "`fedstill reproduce x-table1 --help-all` lists all"),
        (("x-fig2", "--split.nodes", "3"), "of a run's options it takes --data.root only"),
        (("x-fig2", "--data.root", "one", "two"), "invalid --data.root = 'one two' (expected one folder"),
    ],
)
def test_invalid_reproductions_are_one_line(
    papers: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    reproduced(*words, code=2)
    [line] = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_rejects_file_without_reproduction(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (papers / "plain.toml").write_text('methods = ["fedavg"]')
    reproduced(str(papers / "plain.toml"), code=2)
    assert "a file with a table [reproduces]" in capsys.readouterr().err


def test_built_in_reproductions_are_listed_in_order_with_matching_records() -> None:
    """Every record belongs to a file, contains the published methods of the file, and can be printed."""
    entries = reproduction.reproductions()
    names = [entry.name for entry in entries]
    assert names.index("fediod-table2") < names.index("fediod-table9") < names.index("fediod-fig3")
    assert names.index("fediod-fig8") < names.index("fedkd-table1") < names.index("fedmd-cg-table2")
    files = {entry.record_file(scale) for entry in entries for scale in entry.scales}
    for file in (reproduction.experiments_folder() / "records").glob("*.json"):
        assert file in files
    for entry in entries:
        assert "paper" in entry.scales
        if entry.is_comparison:
            comparison = entry.comparison("small")
            runs = [comparison.run_config(planned_run) for planned_run in comparison.planned_runs()]
            named = {name for run in runs for name in (run.data.registered_name, run.public.name)}
            assert set(entry.data) == named - {"none", "held-out", "noise"}
        assert entry.data
        assert entry.reproduction_with_runs.is_comparison or entry.program_arguments("paper") is not None
        for scale in entry.scales:
            record, published = entry.record(scale), entry.published(scale)
            if record is not None:
                metrics = {row.metric for row in record.rows}
                assert metrics >= {metric.metric for metric in published} - {"gigabytes"}
                assert reproduction_markdown(entry, record)
