"""A run that is done once more is the run, and of what left only that is kept which attacks use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedstill.attacks.heard import Heard, Overheard, Release, hear, replay
from fedstill.core.errors import ArgumentError, RunFolderError
from tests import audited
from tests.attacks.runs import FEDIOD, FEDKD, made
from tests.audited import releases

PUBLIC = {"public": {"name": "held-out", "share": 0.3}}


def heard(folder: Path, most: int = 50) -> tuple[Overheard, Heard, str | None]:
    return hear(folder, replay(folder), most)


@pytest.fixture(scope="module")
def fediod(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("runs") / "fediod", FEDIOD, outputs_only=True)


def test_it_is_the_run_with_the_student_of_the_run(fediod: Path) -> None:
    experiment, _, wrong = heard(fediod)
    assert wrong is None
    state = load_file(str(fediod / "student.safetensors"))
    assert all(torch.equal(state[name], value) for name, value in experiment.student.state_dict().items())


def test_an_audit_log_that_says_otherwise_is_told_of(fediod: Path, tmp_path: Path) -> None:
    for name in ("config.toml", "result.json", "student.safetensors"):
        (tmp_path / name).write_bytes((fediod / name).read_bytes())
    audited.write(tmp_path, releases(fediod)[:-1])
    wrong = heard(tmp_path)[2]
    assert wrong is not None
    assert "by the audit log" in wrong


def test_the_last_questions_and_answers_are_kept(fediod: Path) -> None:
    releases: list[Release] = []
    replay(fediod).experiment().listen(releases.append)
    experiment, seen, _ = heard(fediod, most=40)
    asked = [one for one in releases if one.node == "node-1" and "logits" in one.tensors]
    answers = seen.answers("node-1")
    assert seen.made
    assert answers is not None
    assert torch.equal(answers[0], torch.cat([one.sent["x"] for one in asked])[-40:])
    assert torch.equal(answers[1], torch.cat([one.tensors["logits"] for one in asked])[-40:])
    assert seen.inputs is not None
    assert torch.equal(seen.inputs, answers[0])
    assert {name: told.tolist() for name, told in seen.counts.items()} == {
        node.name: torch.bincount(node.data.targets, minlength=10).tolist() for node in experiment.nodes
    }


def test_answers_about_public_inputs_come_with_them(tmp_path: Path) -> None:
    experiment, seen, _ = heard(made(tmp_path / "run", FEDKD, outputs_only=True, **PUBLIC), most=10_000)
    answers = seen.answers("node-0")
    assert not seen.made
    assert experiment.public is not None
    assert answers is not None
    assert len(answers[0]) == len(answers[1]) == len(experiment.public)
    assert torch.equal(answers[0], experiment.public.inputs)
    told = experiment.nodes[0].model(experiment.public.inputs)
    assert torch.corrcoef(torch.stack([told.flatten(), answers[1].flatten()]))[0, 1] > 0.9  # but for a grid


def test_what_is_no_finished_run_of_this_machine_is_refused(fediod: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"holds no finished run: there is no result\.json"):
        replay(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    text = (fediod / "config.toml").read_text()
    for old, new in (('name = "one-by-one"', 'name = "flare"'), ('startup_kit = ""', 'startup_kit = "kit"')):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ArgumentError, match="nodes' data are on this machine"):
        replay(tmp_path)


def test_another_run_with_the_same_bytes_is_told_of(fediod: Path, tmp_path: Path) -> None:
    for file in fediod.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "config.toml").read_text()
    assert "seed = 0" in text
    (tmp_path / "config.toml").write_text(text.replace("seed = 0", "seed = 1", 1))
    wrong = heard(tmp_path)[2]
    assert wrong is not None
    assert "another student" in wrong
