"""Runs of comparisons: results, attacks, and resuming after a kill at any time."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors.torch import save_file

from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.cli.main import main
from fedstill.compare import comparison_runner
from fedstill.compare.comparison import (
    Comparison,
    ComparisonRun,
    plan_comparison,
    read_comparison,
    read_comparison_folder,
)
from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.core.run_writer import lock_folder
from fedstill.data.builtin import Digits
from fedstill.report import write_report
from fedstill.report.comparison_page import write_comparison
from fedstill.report.comparison_records import summarize
from fedstill.runs import feature_space, run, spec
from tests.support.comparison_files import QUICK, rows_without_seconds, run_rows
from tests.support.models import save_tiny_weights, tiny_backbone
from tests.support.processes import PATIENCE, Command


def run_comparison(plan: Comparison, out: Path, **how: Any) -> None:
    """Run a comparison with reports and files, like the command."""
    comparison_runner.compare(plan, out, report=write_report, **how)
    write_comparison(out, read_comparison_folder(out))


def resume_comparison(out: Path, **how: Any) -> None:
    run_comparison(read_comparison_folder(out), out, command="", **how)


def quick_plan(**changes: Any) -> Comparison:
    return plan_comparison(["standalone", "fedavg"], changes={**QUICK, **changes})


def test_checks_of_runs_compute_no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of many runs starts at once, and its features are computed with a progress bar."""
    computed, compute = [], feature_space.compute_features_of_parts
    monkeypatch.setattr(
        feature_space,
        "compute_features_of_parts",
        lambda *given, **how: computed.append(1) or compute(*given, **how),
    )
    features = {"features.backbone": "random-conv:4", "features.cache": str(tmp_path / "cache")}
    public = {"public.name": "held-out", "features.normalize": "public", "features.components": 8}
    plan = plan_comparison(
        ["standalone", "fedkd", "fedcgs"],
        changes={**QUICK, **features, **public, "nodes.models": ["linear"], "student.model": "mlp:8"},
    )
    run_comparison(plan, tmp_path / "out", command="")
    assert {row["method"]: row["status"] for row in run_rows(tmp_path / "out")} == {
        "standalone": "finished",
        "fedkd": "finished",
        "fedcgs": "refused",  # its student is linear
    }
    assert len(computed) == 2


def test_comparison_with_other_weights_of_its_backbone_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    weights = tiny_backbone((1,)).state_dict()
    save_file(weights, path)
    options = {"features.backbone": "tests.support.models:tiny_backbone", "features.weights": str(path)}
    plan = plan_comparison(
        ["standalone"], changes={**QUICK, **options, "nodes.models": ["linear"], "student.model": "linear"}
    )
    run_comparison(plan, tmp_path / "out", command="")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, path)
    (tmp_path / "out" / "standalone-seed0" / "result.json").unlink()
    with pytest.raises(RunFolderError, match="features"):
        resume_comparison(tmp_path / "out")


def test_data_sets_of_a_comparison_may_have_images_of_different_shapes(tmp_path: Path) -> None:
    """The backbone's digest depends on the shape, and the comparison has one for each."""
    rng, settings = np.random.default_rng(0), []
    for side in (8, 12):
        file = tmp_path / f"{side}.npz"
        np.savez(file, images=rng.random((200, side, side), np.float32), labels=rng.integers(0, 3, 200))
        settings.append({"name": str(side), "data": {"name": str(file)}})
    base = {"features": {"backbone": "random-conv:4", "cache_gib": 0.0}, "student": {"model": "linear"}}
    table = {"methods": ["standalone"], "base": base, "settings": settings}
    (tmp_path / "both.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    plan = read_comparison(tmp_path / "both.toml", changes={**QUICK, "nodes.models": ["linear"]})
    run_comparison(plan, tmp_path / "out", command="")
    assert [row["status"] for row in run_rows(tmp_path / "out")] == ["finished", "finished"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "option", ["student.encoder_weights", "nodes.encoder_weights", "nodes.perceptual_weights"]
)
@pytest.mark.parametrize("stopped", [True, False])
def test_runs_of_a_comparison_have_the_same_pretrained_weights(
    option: str, stopped: bool, tmp_path: Path
) -> None:
    """The file is replaced after the first run, whether the comparison is stopped there or continues."""
    images = np.random.default_rng(0).integers(0, 255, (60, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "shapes.npz", images=images, masks=(images > 127).astype(np.uint8))
    network = "tests.support.models:tiny_encoder"
    files = {
        name: tmp_path / f"{name}.safetensors"
        for name in ("student.encoder", "nodes.encoder", "nodes.perceptual")
    }
    for file in files.values():
        save_tiny_weights(file)
    plan = plan_comparison(
        ["standalone", "fedavg"],
        changes={
            **QUICK,
            "data.name": str(tmp_path / "shapes.npz"),
            "task.name": "segmentation",
            "nodes.models": [f"unet:{network}"],
            "student.model": f"unet:{network}",
            "nodes.perceptual": network,
            "nodes.policy.outputs_only": False,
            **{f"{name}_weights": str(file) for name, file in files.items()},
        },
    )
    changed = files[option.removesuffix("_weights")]

    def replace_file(folder: Path) -> None:
        save_tiny_weights(changed, seed=4)

    if stopped:
        run_comparison(plan, tmp_path / "out", command="", only=["standalone"])
        replace_file(tmp_path)
    with pytest.raises(RunFolderError, match=option):
        comparison_runner.compare(plan, tmp_path / "out", command="", report=replace_file)
    assert (tmp_path / "out" / "standalone-seed0" / "result.json").exists()
    assert not (tmp_path / "out" / "fedavg-seed0").exists()


def test_complete_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    plan = quick_plan()
    reads, arrays = [], Digits.arrays
    monkeypatch.setattr(Digits, "arrays", lambda self: reads.append(self) or arrays(self))
    run_comparison(plan, out, command="fedstill compare something")
    assert len(reads) == 1  # data are loaded once for the check and both runs
    lines = [line.rpartition("  ")[0].split("  ") for line in capsys.readouterr().err.splitlines()]
    assert lines == [["run 1 of 2", "standalone, seed 0"], ["run 2 of 2", "fedavg, seed 0"]]
    rows = {row["method"]: row for row in run_rows(out)}
    for label in ("standalone", "fedavg"):
        folder = out / f"{label}-seed0"
        result = json.loads((folder / "result.json").read_text())
        row = rows[label]
        assert float(row["accuracy"]) == result["accuracy"]
        assert int(row["bytes_up"]) == result["bytes"]["up"]
        assert row["evaluated_model"] == result["evaluated_model"]
        assert row["releases"] == "; ".join(result["releases"])
        assert spec.load_toml(folder / "config.toml") == plan.run_config(ComparisonRun("", label, 0))
        assert (folder / "report.html").exists()
    assert read_comparison_folder(out) == plan
    assert comparison_runner.read_command(out) == "fedstill compare something"
    # Runs of a comparison have the same metrics as single runs.
    alone = run.run(
        spec.load_toml(out / "fedavg-seed0" / "config.toml"), tmp_path / "x", command="", progress=False
    )
    assert alone["accuracy"] == float(rows["fedavg"]["accuracy"])
    assert alone["bytes"]["up"] == int(rows["fedavg"]["bytes_up"])
    assert len(reads) == 2


def test_resumes_same_comparison_and_rejects_another(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = plan_comparison(["standalone"], changes=QUICK)
    run_comparison(plan, out, command="one", quiet=True)
    before = (out / "standalone-seed0" / "result.json").read_bytes()
    (out / "compare.html").unlink()
    run_comparison(plan, out, command="two", quiet=True)
    resume_comparison(out, quiet=True)
    assert (out / "compare.html").exists()
    assert (out / "standalone-seed0" / "result.json").read_bytes() == before  # no run was repeated
    for other, part in (
        (
            plan_comparison(["fedavg"], changes=QUICK),
            r"methods \(standalone.name was standalone and is now not set\)",
        ),
        (plan_comparison(["standalone"], changes=QUICK, seeds=[1]), "seeds"),
        (
            plan_comparison(["standalone"], changes={**QUICK, "split.alpha": 1.0}),
            r"base \(split.alpha was 0.5 and is now 1.0\)",
        ),
    ):
        with pytest.raises(RunFolderError, match=f"holds a comparison that differs in its {part}: choose"):
            run_comparison(other, out, command="", quiet=True)
    more = plan_comparison(["ensemble", "standalone"], changes=QUICK, seeds=2)
    run_comparison(more, out, command="", quiet=True)
    assert (out / "standalone-seed0" / "result.json").read_bytes() == before
    assert (out / "standalone-seed1" / "result.json").exists()
    assert (out / "ensemble-seed1" / "result.json").exists()
    assert read_comparison_folder(out) == more
    with pytest.raises(RunFolderError, match="methods"):  # the folder holds more than this plan
        run_comparison(plan_comparison(["standalone"], changes=QUICK, seeds=2), out, command="", quiet=True)


def test_resume_rejects_changed_data(tmp_path: Path) -> None:
    """The changed data have equal shape and size, so the result table would not show a difference."""
    rng = np.random.default_rng(0)
    made = {"images": rng.random((200, 8, 8), dtype=np.float32), "labels": rng.integers(0, 3, 200)}
    file, out = tmp_path / "mine.npz", tmp_path / "out"
    np.savez(file, **made)
    plan = plan_comparison(["standalone", "fedavg"], changes={**QUICK, "data.name": str(file)})
    run_comparison(plan, out, command="", quiet=True, only=["standalone"])
    np.savez(file, **{**made, "images": 1 - made["images"]})
    with pytest.raises(RunFolderError, match=r"other data '.*mine.npz'"):
        resume_comparison(out, quiet=True)
    np.savez(file, **made)
    resume_comparison(out, quiet=True)
    assert {row["method"] for row in run_rows(out)} == {"standalone", "fedavg"}
    np.savez(file, **{**made, "images": 1 - made["images"]})
    more = plan_comparison(["standalone", "fedavg"], changes={**QUICK, "data.name": str(file)}, seeds=2)
    with pytest.raises(RunFolderError, match="other data"):  # for a new seed
        run_comparison(more, out, command="", quiet=True)


def test_resume_rejects_changed_custom_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of different versions of a method must not be averaged."""
    monkeypatch.syspath_prepend(tmp_path)
    file, out = tmp_path / "a_lab_of_mine.py", tmp_path / "out"
    text = "from dataclasses import dataclass\nfrom fedstill.methods.standalone import Standalone\n"
    text += "@dataclass(frozen=True, kw_only=True)\nclass Mine(Standalone):\n    pass\n"
    file.write_text(text)
    one, two = (plan_comparison(["a_lab_of_mine:Mine"], changes=QUICK, seeds=seeds) for seeds in (1, 2))
    run_comparison(one, out, command="", quiet=True)
    file.write_text(text + "    # another idea\n")
    with pytest.raises(RunFolderError, match=r"version of a_lab_of_mine\.py"):
        run_comparison(two, out, command="", quiet=True)
    run_comparison(one, out, command="")
    assert (
        "began with another version of a_lab_of_mine.py: the results are of that version"
        in capsys.readouterr().err
    )
    file.write_text(text)
    run_comparison(two, out, command="", quiet=True)
    assert (out / "Mine-seed1" / "result.json").exists()


def test_rejects_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunFolderError, match="other files"):
        run_comparison(quick_plan(), tmp_path, command="", quiet=True)
    with pytest.raises(RunFolderError, match="is a file"):
        run_comparison(quick_plan(), tmp_path / "thesis.tex", command="", quiet=True)
    with pytest.raises(RunFolderError, match="not a comparison"):
        resume_comparison(tmp_path, quiet=True)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_rejects_run_that_differs_from_plan(tmp_path: Path) -> None:
    run_comparison(
        plan_comparison(["standalone"], changes=QUICK),
        tmp_path / "out",
        command="",
        quiet=True,
    )
    file = tmp_path / "out" / "standalone-seed0" / "config.toml"
    file.write_text(file.read_text().replace("seed = 0", "seed = 1", 1))
    with pytest.raises(RunFolderError, match="other options"):
        resume_comparison(tmp_path / "out", quiet=True)


def test_rejects_second_process_on_same_comparison(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    held = lock_folder(tmp_path / "out", "comparison")
    with held, pytest.raises(RunFolderError, match="another process"):
        run_comparison(quick_plan(), tmp_path / "out", command="", quiet=True)


def test_refused_runs_are_in_table_before_first_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    models = {"nodes.models": ["small-cnn", "mlp"]}
    plan = plan_comparison(["fedavg", "standalone"], changes={**QUICK, **models})
    run_comparison(plan, out, command="", quiet=True)
    refused, finished = run_rows(out)
    assert (refused["method"], refused["status"], refused["accuracy"]) == ("fedavg", "refused", "")
    assert "node-1" in refused["reason"]
    assert "architecture" in refused["reason"]
    assert refused["needs"] == "same architecture"
    assert (finished["method"], finished["status"]) == ("standalone", "finished")
    assert not (out / "fedavg-seed0").exists()
    assert refused["reason"] in (out / "compare.html").read_text().replace("&#39;", "'")
    reasons = comparison_runner.read_not_run(out)
    run_comparison(plan, out, command="", only=["standalone"], quiet=True)  # does not check FedAvg
    assert comparison_runner.read_not_run(out) == reasons == {"fedavg-seed0": refused["reason"]}


def exit_code(words: str) -> Any:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main(words.split())
    return end.value.code


def test_exit_code_reports_refused_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = "--split.nodes 2 --data.train_limit 200 --nodes.local.epochs 1 --engine.threads 1 --quiet"
    words = f"{quick} --nodes.models small-cnn mlp --out {tmp_path / 'out'}"
    assert exit_code(f"compare fedavg standalone {words}") == 1
    out, err = capsys.readouterr()
    assert "FedAvg: refused: " in " ".join(out.split())
    assert err == "fedstill: not all methods ran, the table says why: FedAvg\n"
    assert run_rows(tmp_path / "out")[1]["status"] == "finished"
    assert exit_code(f"compare fedavg {words}2") == 2
    assert exit_code(f"compare standalone {words}3") == 0


def test_postponed_runs_are_not_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_comparison(["fedavg", "standalone"], changes={**QUICK, "nodes.models": ["small-cnn", "mlp"]})
    run_comparison(plan, tmp_path / "out", command="", only=["fedavg", "standalone"], quiet=True)
    for only, code in ((["standalone"], 0), ([], 1)):
        for form in ([], ["--json"]):
            words = ["--only", *only] if only else []
            with pytest.raises(SystemExit) as end:
                main(["compare", "--resume", str(tmp_path / "out"), *words, "--quiet", *form])
            assert end.value.code == code


def test_method_option_error_names_the_key_to_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("compare fedavg fediod --method.rounds 3") == 2
    err = capsys.readouterr().err
    assert err.startswith("fedstill: --method.rounds is an option of one method, ")
    assert "say which, as --fediod.rounds, or" in err
    assert "below [options.METHOD], rounds = ..." in err


def test_creates_no_folder_if_nothing_can_run(tmp_path: Path) -> None:
    plan = plan_comparison(["fedavg"], changes={**QUICK, "nodes.models": ["small-cnn", "mlp"]})
    with pytest.raises(FedstillError, match="FedAvg cannot"):
        run_comparison(plan, tmp_path / "out", command="", quiet=True)
    assert not (tmp_path / "out").exists()


def test_run_at_policy_limit_does_not_stop_others(tmp_path: Path) -> None:
    # The parameters of FedAvg exceed the limit, which is detected in the first round.
    plan = plan_comparison(["fedavg", "standalone"], changes={**QUICK, "nodes.policy.max_bytes": 1000})
    run_comparison(plan, tmp_path / "out", command="", quiet=True)
    rows = {row["method"]: row for row in run_rows(tmp_path / "out")}
    assert rows["fedavg"]["status"] == "stopped"
    assert "max_bytes" in rows["fedavg"]["reason"]
    assert rows["standalone"]["status"] == "finished"


# --- attacks on runs ----------------------------------------------------------------------------------


class FakeAttack:
    """Replaces the attacks: writes a result file, records its calls, and fails on demand."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []  # folder, command
        self.failing: str | None = None

    def __call__(self, folder: Path, config: LeakageConfig, *, command: str, progress: bool) -> Any:
        self.calls.append((folder.name, command))
        if self.failing is not None and folder.name.startswith(self.failing):
            raise FedstillError("the run\nis not repeated here")
        row = {
            "target": "student",
            "attack": "Loss",
            "metric": "AUC",
            "value": 60.0,
            "column": "membership_auc",
        }
        record = {
            "config": config.to_table(),
            "audit": None,
            "attacks": [{"name": "membership", "rows": [row]}],
            "sentence": "One in <three> was found.",
        }
        (folder / "leakage.json").write_text(json.dumps(record))
        return record

    @property
    def folders(self) -> list[str]:
        return [folder for folder, _ in self.calls]


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> FakeAttack:
    attacks = FakeAttack()
    monkeypatch.setattr("fedstill.compare.comparison_runner.run_attacks", attacks)
    return attacks


def test_attacks_each_finished_run_once(
    tmp_path: Path, attacks: FakeAttack, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    plan = plan_comparison(["standalone", "fedavg"], changes=QUICK, leakage=True)
    run_comparison(plan, out, command="fedstill compare x --leakage")
    lines = [line.rpartition("  ")[0].split("  ") for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        ["run 1 of 2", "standalone, seed 0"],
        ["attack 1 of 2", "standalone, seed 0"],
        ["run 2 of 2", "fedavg, seed 0"],
        ["attack 2 of 2", "fedavg, seed 0"],
    ]
    assert attacks.calls[1] == ("fedavg-seed0", f"fedstill attack {out / 'fedavg-seed0'}")
    assert [row["membership_auc"] for row in run_rows(out)] == ["60.0", "60.0"]
    assert "One in &lt;three&gt; was found." in (out / "compare.html").read_text(encoding="utf-8")
    # Attacks are not repeated unless their options change.
    run_comparison(plan, out, command="again", quiet=True)
    resume_comparison(out, quiet=True)
    assert len(attacks.calls) == 2
    file = out / "fedavg-seed0" / "leakage.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "config": {"seed": 9}}))
    assert [row.runs[0].leakage is not None for row in summarize(out, plan).entries] == [True, False]
    resume_comparison(out, quiet=True)
    assert attacks.folders == ["standalone-seed0", "fedavg-seed0", "fedavg-seed0"]


def test_attacks_named_settings_only(tmp_path: Path, attacks: FakeAttack) -> None:
    out = tmp_path / "out"
    settings = {"first": {}, "second": {"split": {"alpha": 1.0}}}
    plan = dataclasses.replace(
        plan_comparison(["standalone"], changes=QUICK, leakage=True),
        settings=settings,
        attacked_settings=("second",),
    )
    run_comparison(plan, out, command="", quiet=True)
    assert attacks.folders == ["standalone-seed0"]
    assert (out / "second" / "standalone-seed0" / "leakage.json").exists()
    assert read_comparison_folder(out).attacked_settings == ("second",)
    page = (out / "compare.html").read_text(encoding="utf-8")
    assert "Not yet attacked" not in page


def test_finished_comparison_can_be_attacked_later(tmp_path: Path, attacks: FakeAttack) -> None:
    out = tmp_path / "out"
    plan = plan_comparison(["standalone"], changes=QUICK)
    run_comparison(plan, out, command="one", quiet=True)
    assert attacks.calls == []
    assert "membership_auc" not in run_rows(out)[0]
    assert not (out / "not_attacked.json").exists()
    before = (out / "standalone-seed0" / "result.json").read_bytes()
    attacked = plan_comparison(["standalone"], changes=QUICK, leakage=True)
    run_comparison(attacked, out, command="two", quiet=True)
    assert (out / "standalone-seed0" / "result.json").read_bytes() == before  # no run was repeated
    assert attacks.folders == ["standalone-seed0"]
    assert read_comparison_folder(out) == attacked
    assert comparison_runner.read_command(out) == "two"
    # Without attacks, the same comparison keeps its attack options. Other attack options are refused.
    (out / "standalone-seed0" / "leakage.json").unlink()
    run_comparison(plan, out, command="three", quiet=True)
    assert attacks.folders == ["standalone-seed0"] * 2
    assert read_comparison_folder(out) == attacked
    other = dataclasses.replace(attacked, leakage=LeakageConfig(seed=7).to_table())
    with pytest.raises(RunFolderError, match=r"leakage \(seed was 0 .* 7\)"):
        run_comparison(other, out, command="", quiet=True)


def test_failed_attack_is_reported_and_does_not_stop_others(
    tmp_path: Path, attacks: FakeAttack, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    attacks.failing = "standalone"
    plan = plan_comparison(["standalone", "fedavg"], changes=QUICK, leakage=True)
    run_comparison(plan, out, command="x")
    assert "not attacked: the run is not repeated here\n" in capsys.readouterr().err
    assert comparison_runner.read_not_attacked(out) == {"standalone-seed0": "the run is not repeated here"}
    rows = {row["method"]: row for row in run_rows(out)}
    assert {label: row["status"] for label, row in rows.items()} == dict.fromkeys(plan.methods, "finished")
    assert (rows["standalone"]["membership_auc"], rows["fedavg"]["membership_auc"]) == ("", "60.0")
    message = "Standalone, seed 0: not attacked: the run is not repeated here."
    assert message in (out / "compare.html").read_text(encoding="utf-8")
    assert message in summarize(out, plan).notes
    # A failed attack is retried, and its note is deleted after success.
    attacks.failing = None
    resume_comparison(out, quiet=True)
    assert comparison_runner.read_not_attacked(out) == {}
    assert attacks.folders == ["standalone-seed0", "fedavg-seed0", "standalone-seed0"]
    assert message not in (out / "compare.html").read_text(encoding="utf-8")


# --- killed runs --------------------------------------------------------------------------------------

COMMAND = """compare standalone few.toml --base few.toml --seeds 2 --split.nodes 2
--data.train_limit 300 --nodes.local.epochs 2 --engine.threads 1
--evaluation.every 5 --out out"""


# Checkpoints are saved every five seconds. Here they are saved more often, so that a kill finds one.
OFTEN = "from fedstill.core import run_writer; run_writer.SECONDS_BETWEEN = 0.2"


def start(folder: Path, words: list[str]) -> Command:
    return Command(words, folder, [Path(__file__).parents[2]], OFTEN)


def run_until_killed(folder: Path, words: list[str], awaited: Path) -> None:
    """Run a command until the file ``awaited`` exists, then kill it."""
    process = start(folder, words)
    deadline = time.monotonic() + PATIENCE
    while not awaited.exists():
        assert process.runs, "the process ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.kill() == -signal.SIGKILL


def test_resumed_comparison_reaches_equal_metrics(tmp_path: Path) -> None:
    words = COMMAND.split()
    (tmp_path / "whole").mkdir()
    for folder in (tmp_path, tmp_path / "whole"):
        (folder / "few.toml").write_text('[method]\nname = "fediod"\nsteps = 30\nbatch = 16')
    whole = start(tmp_path / "whole", words)

    out = tmp_path / "out"
    # written with the first checkpoint
    run_until_killed(tmp_path, words, out / "few-seed0" / "metrics.jsonl")
    assert (out / "standalone-seed0" / "result.json").exists()
    assert not (out / "few-seed0" / "result.json").exists()
    finished = (out / "standalone-seed0" / "result.json").read_bytes()
    run_until_killed(tmp_path, words, out / "standalone-seed1" / "config.toml")  # the same command again
    assert start(tmp_path, ["compare", "--resume", "out"]).end()[0] == 0
    assert whole.end()[0] == 0

    assert (out / "standalone-seed0" / "result.json").read_bytes() == finished
    assert rows_without_seconds(out) == rows_without_seconds(tmp_path / "whole" / "out")
    assert [row["status"] for row in run_rows(out)] == ["finished"] * 4
    assert not list(out.rglob("state.safetensors"))


def test_kill_during_first_write_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "standalone-seed0").mkdir(parents=True)
    (out / "compare.toml.part").write_text("half a f")
    (out / "standalone-seed0" / "config.toml.part").write_text("half a f")
    with pytest.raises(RunFolderError):  # a run folder without a plan
        run_comparison(quick_plan(), out, command="", quiet=True)
    plan = quick_plan()
    (out / "compare.toml").write_text(f"# Made by: x\n\n{plan.to_toml()}")
    run_comparison(plan, out, command="", quiet=True)
    assert [row["status"] for row in run_rows(out)] == ["finished", "finished"]
