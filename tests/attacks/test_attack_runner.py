"""All attacks on a run, with one result file and one section of the report."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file

from fedstill.attacks.attack import Attack, AttackResult, ImageStrip, ImageTable, LeakageMetric, Target
from fedstill.attacks.attack_runner import LeakageConfig, run_attacks
from fedstill.attacks.gradient_inversion import GradientInversion
from fedstill.attacks.label_counts import LabelCounts
from fedstill.attacks.transcript import ObservedRelease
from fedstill.core.errors import ArgumentError, RunFolderError, UnknownName
from fedstill.report import write_report
from tests.support.errors import raises_invalid
from tests.support.runs import FEDAVG, FEDIOD, make_run

QUICK = {
    "inversion": {"victims": 2, "attacks": ["idlg"]},
    "membership": {"shadows": 4, "records": 60, "responses": 64},
    "memorization": {"images": 40, "permutations": 49, "pairs": 3},
}
CONFIG = LeakageConfig.from_table(QUICK)


@pytest.fixture(scope="module")
def fediod(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "fediod", FEDIOD, outputs_only=True)
    run_attacks(folder, CONFIG, command="fedstill attack here")
    return folder


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "fedavg", FEDAVG)
    run_attacks(folder, CONFIG)
    return folder


def read_leakage(folder: Path) -> dict[str, Any]:
    leakage: dict[str, Any] = json.loads((folder / "leakage.json").read_text())
    return leakage


def results_by_attack(leakage: dict[str, Any]) -> dict[str, Any]:
    """Index the results by attack name."""
    return {each["name"]: each["result"] for each in leakage["attacks"]}


def test_runs_attacks_on_responses(fediod: Path) -> None:
    leakage = read_leakage(fediod)
    assert leakage["audit"] is None
    assert leakage["epsilon"] is None
    assert leakage["command"] == "fedstill attack here"
    got = results_by_attack(leakage)
    assert list(got) == ["membership", "memorization", "counts", "labels", "properties"]
    assert [target["target"] for target in got["membership"]["targets"]] == ["student", "responses of node-0"]
    assert got["memorization"]["images"] == 40
    assert len(got["memorization"]["spaces"][0]["pairs"]) == 3
    assert set(got["memorization"]["distances"][0]["nodes"]) == {"node-0", "node-1", "node-2"}
    assert 1 <= got["memorization"]["scores"]["adapted"] <= 10
    assert [node["exact"] for node in got["counts"]["nodes"]] == [True] * 3
    assert {
        "attack": "inversion",
        "reason": "gradient inversion needs parameters, and none are released",
    } in leakage["skipped"]
    pictures = load_file(str(fediod / "leakage.safetensors"))
    assert pictures["memorization.generated"].shape == (3, 1, 8, 8)
    assert {picture.dtype for picture in pictures.values()} == {torch.uint8}


def test_runs_attacks_on_parameters(fedavg: Path) -> None:
    leakage = read_leakage(fedavg)
    assert list(results_by_attack(leakage)) == ["inversion", "membership"]
    assert results_by_attack(leakage)["inversion"]["attacks"][0]["psnr"]["mean"] > 25
    skipped = {each["attack"] for each in leakage["skipped"]}
    assert skipped == {"memorization", "counts", "labels", "properties", "membership through responses"}
    assert load_file(str(fedavg / "leakage.safetensors"))["inversion.idlg"].shape == (2, 1, 8, 8)


def test_attacks_student_on_features(tmp_path: Path) -> None:
    features = {"backbone": "random-conv:4", "normalize": "public", "cache": str(tmp_path / "cache")}
    changes = {"features": features, "nodes": {"models": ["mlp:8"]}, "student": {"model": "mlp:8"}}
    public = {"name": "held-out", "share": 0.2}
    folder = make_run(tmp_path / "run", {"name": "fedkd", "student": {"epochs": 2}}, **changes, public=public)
    options = {"attacks": ["membership"], "membership": QUICK["membership"]}
    leakage = run_attacks(folder, LeakageConfig.from_table(options))
    assert leakage["audit"] is None  # the replay reached the student of the run
    assert results_by_attack(leakage)["membership"]["targets"][0]["target"] == "student"


def test_progress_without_terminal_is_one_line_per_attack(
    fedavg: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(fedavg, tmp_path / "run")
    run_attacks(folder, LeakageConfig((LabelCounts(),)), progress=True)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("repeating the run to record its releases  after ")
    assert second.startswith("attack: counts  after ")
    run_attacks(folder, LeakageConfig((LabelCounts(),)))
    assert capsys.readouterr().err == ""


def test_equal_seeds_give_equal_results(fedavg: Path) -> None:
    first = results_by_attack(read_leakage(fedavg))
    again = results_by_attack(json.loads(json.dumps(run_attacks(fedavg, CONFIG))))
    assert _without_seconds(again) == _without_seconds(first)


def _without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_seconds(each) for key, each in value.items() if key != "seconds"}
    return [_without_seconds(each) for each in value] if isinstance(value, list) else value


def test_summary_sentences(fediod: Path, fedavg: Path) -> None:
    by_responses, by_parameters = (read_leakage(folder)["sentence"] for folder in (fediod, fedavg))
    assert by_responses.startswith("FedIOD: critic, gradients, label counts, logits left the nodes.")
    assert "exact number of its examples of each class" in by_responses
    assert "iDLG recovers images from all parameters at" in by_parameters
    assert "chance is 50" in by_parameters
    for words in (by_responses, by_parameters):
        assert "safe" not in words
    low = {**results_by_attack(read_leakage(fedavg))["inversion"], "guess": 12.0}
    low["attacks"] = [{**low["attacks"][0], "psnr": {"mean": 12.5, "std": 0.0, "per_image": [12.5]}}]
    assert "no better than a guess" in GradientInversion().sentence(low)


def test_config_round_trips_through_table() -> None:
    assert LeakageConfig.from_table(CONFIG.to_table()) == CONFIG
    with pytest.raises(UnknownName, match=r"leakage\.membership\.shadow"):
        LeakageConfig.from_table({"membership": {"shadow": 4}})
    with raises_invalid("attack", "guessing"):
        LeakageConfig.from_table({"attacks": ["guessing"]})
    with raises_invalid("leakage.memorization", {"pairs": 3}, "none"):
        LeakageConfig.from_table({"attacks": ["counts"], "memorization": {"pairs": 3}})
    for twice in ((), (LabelCounts(), LabelCounts())):
        with raises_invalid("attacks", ANY, "each once"):
            LeakageConfig(twice)
    with pytest.raises(ArgumentError, match="seed"):
        LeakageConfig(seed=-1)


@dataclass(frozen=True)
class Keeper(Attack):
    """Attack that counts releases; with ``odd``, its record cannot be written as JSON."""

    title: ClassVar[str] = "Releases of nodes"
    odd: bool = False

    def keeps_release(self, release: ObservedRelease) -> bool:
        return release.query == "predict_logits" and release.part == "response"

    def run(self, target: Target) -> AttackResult:
        if self.odd:
            return AttackResult({"student": target.student})
        count = Counter(release.node for release in target.releases)
        same = all(set(release.kinds) == set(release.tensors) for release in target.releases)
        return AttackResult(
            {"counts": count, "same": same}, {"first": torch.zeros(1, 1, 2, 2, dtype=torch.uint8)}
        )

    def rows(self, part: Any) -> Iterator[LeakageMetric]:
        for node, count in part["counts"].items():
            yield LeakageMetric(target=node, metric="releases", value=count, baseline="none")

    def pictures(self, part: Any) -> tuple[ImageTable]:
        return (ImageTable(title="one", heads=("a",), strips=(ImageStrip(head="first", stack="first"),)),)


def test_attack_receives_kept_releases(fediod: Path, tmp_path: Path) -> None:
    for file in fediod.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "tests.attacks.test_attack_runner:Keeper"
    leakage = run_attacks(tmp_path, LeakageConfig.from_table({"attacks": [name]}))
    (only,) = leakage["attacks"]
    assert only["result"] == {"counts": {"node-0": 6, "node-1": 6, "node-2": 6}, "same": True}
    assert only["sentence"] == (
        "Releases of nodes: releases of node-0 6 (by chance none); releases of node-1 6 "
        "(by chance none); releases of node-2 6 (by chance none)."
    )
    assert only["pictures"][0]["strips"][0]["stack"] == f"{name}.first"
    assert list(load_file(str(tmp_path / "leakage.safetensors"))) == [f"{name}.first"]
    assert 'alt="first"' in write_report(tmp_path).read_text()
    with raises_invalid("record of tests.attacks.test_attack_runner:Keeper"):
        run_attacks(tmp_path, LeakageConfig((Keeper(odd=True),)))
    assert read_leakage(tmp_path)["attacks"] == [only]  # the previous result is kept
    assert list(results_by_attack(run_attacks(tmp_path, LeakageConfig((LabelCounts(),))))) == ["counts"]
    assert not (tmp_path / "leakage.safetensors").exists()  # the previous images are deleted


def test_rejects_folder_without_finished_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="finished run"):
        run_attacks(tmp_path)
    assert list(tmp_path.iterdir()) == []
