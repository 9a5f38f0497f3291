"""Replays of finished runs, and transcripts of their releases."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file

from fedstill.attacks.transcript import (
    ObservedRelease,
    ObservedSimulation,
    ServerTranscript,
    StopListening,
    load_run,
    replay_run,
)
from fedstill.core import compute
from fedstill.core.errors import RunFolderError
from fedstill.federation.link_config import LinkConfig
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._input_generators import InputGenerator
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fediod import FedIOD
from fedstill.models.module_utils import to_vector
from fedstill.node.policy import PolicyConfig
from tests.support import audit_logs
from tests.support.audit_logs import releases
from tests.support.bright_rows import setting
from tests.support.errors import raises_invalid
from tests.support.runs import FEDIOD, FEDKD, make_run

PUBLIC = {"public": {"name": "held-out", "share": 0.3}}


def replay(folder: Path, max_rows: int = 50) -> tuple[ObservedSimulation, ServerTranscript, str | None]:
    return replay_run(folder, load_run(folder), max_rows)


@pytest.fixture(scope="module")
def fediod(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "fediod", FEDIOD, outputs_only=True)


def test_replay_reaches_student_of_run(fediod: Path) -> None:
    experiment, _, disagreement = replay(fediod)
    assert disagreement is None
    state = load_file(str(fediod / "student.safetensors"))
    assert all(torch.equal(state[name], value) for name, value in experiment.student.state_dict().items())


def test_replay_uses_precision_of_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_gains_from_bfloat16", lambda shape, network: True)
    monkeypatch.setattr(compute, "is_bfloat16_faster", lambda device: True)
    folder = make_run(tmp_path / "run", {"name": "fedavg", "rounds": 2})
    monkeypatch.setattr(compute, "is_bfloat16_faster", lambda device: False)
    again = load_run(folder).experiment()
    again.run_with_listener(lambda release: None)
    state = load_file(str(folder / "student.safetensors"))
    assert again.compute.precision == "bfloat16"
    assert all(torch.equal(state[name], value) for name, value in again.student.state_dict().items())


def test_replay_reports_different_audit_log(fediod: Path, tmp_path: Path) -> None:
    for name in ("config.toml", "result.json", "student.safetensors"):
        (tmp_path / name).write_bytes((fediod / name).read_bytes())
    audit_logs.write(tmp_path, releases(fediod)[:-1])
    disagreement = replay(tmp_path)[2]
    assert disagreement is not None
    assert "in the audit log" in disagreement


def test_transcript_keeps_last_queries_and_responses(fediod: Path) -> None:
    releases: list[ObservedRelease] = []
    load_run(fediod).experiment().run_with_listener(releases.append)
    experiment, transcript, _ = replay(fediod, max_rows=40)
    queried = [one for one in releases if one.node == "node-1" and "logits" in one.tensors]
    responses = transcript.responses("node-1")
    assert transcript.has_generated_inputs
    assert responses is not None
    assert torch.equal(responses[0], torch.cat([one.sent["x"] for one in queried])[-40:])
    assert torch.equal(responses[1], torch.cat([one.tensors["logits"] for one in queried])[-40:])
    assert transcript.inputs is not None
    assert torch.equal(transcript.inputs, responses[0])
    assert {name: counts.tolist() for name, counts in transcript.counts.items()} == {
        node.name: torch.bincount(node.data.targets, minlength=10).tolist() for node in experiment.nodes
    }


def test_transcript_resolves_public_inputs(tmp_path: Path) -> None:
    experiment, transcript, _ = replay(
        make_run(tmp_path / "run", FEDKD, outputs_only=True, **PUBLIC), max_rows=10_000
    )
    responses = transcript.responses("node-0")
    assert not transcript.has_generated_inputs
    assert experiment.public is not None
    assert responses is not None
    assert len(responses[0]) == len(responses[1]) == len(experiment.public)
    assert torch.equal(responses[0], experiment.public.inputs)
    expected = experiment.nodes[0].model(experiment.public.inputs)
    assert (
        torch.corrcoef(torch.stack([expected.flatten(), responses[1].flatten()]))[0, 1] > 0.9
    )  # equal up to the rounding grid


def test_rejects_unfinished_and_remote_runs(fediod: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no result\.json"):
        load_run(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    text = (fediod / "config.toml").read_text()
    for old, new in (('backend = "local"', 'backend = "flare"'), ('startup_kit = ""', 'startup_kit = "kit"')):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "config.toml").write_text(text)
    with raises_invalid("run", ANY, "this machine"):
        load_run(tmp_path)


def test_replay_reports_different_student(fediod: Path, tmp_path: Path) -> None:
    for file in fediod.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "config.toml").read_text()
    assert "seed = 0" in text
    (tmp_path / "config.toml").write_text(text.replace("seed = 0", "seed = 1", 1))
    disagreement = replay(tmp_path)[2]
    assert disagreement is not None
    assert "another student" in disagreement


FEDAVG = FedAvg(rounds=2)
THREE_STEPS = FedIOD(
    steps=3,
    batch=4,
    generator=InputGenerator(width=2),
    critic=Discriminators(width=2, batch=32),
    student=ReplayTraining(steps=1, batch=4, memory=8),
)
OUTPUTS = {"policies": [PolicyConfig()] * 3}


def observe(method: Any, **changes: Any) -> tuple[ObservedSimulation, list[ObservedRelease]]:
    releases: list[ObservedRelease] = []
    experiment = ObservedSimulation(setting(method, **changes))
    assert experiment.run_with_listener(releases.append)
    return experiment, releases


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (FEDAVG, {}),
        (THREE_STEPS, OUTPUTS),
        (THREE_STEPS, {**OUTPUTS, "link": LinkConfig(inputs="int8", gradients="float16")}),
    ],
)
def test_observed_releases_match_audit_log(method: Any, changes: dict[str, Any]) -> None:
    experiment, releases = observe(method, **changes)
    observed: Counter[tuple[str, str]] = Counter()
    for release in releases:
        for name, tensor in release.tensors.items():
            observed[release.node, release.kinds[name]] += tensor.nbytes
    counted = experiment.audit.totals.bytes.items()
    audited = {(node, kind): n for (_, node, direction, kind), n in counted if direction == "up"}
    assert observed.keys() == audited.keys()
    if "link" not in changes:  # otherwise, compressed sizes differ from observed ones
        assert observed == audited


def test_last_observed_parameters_are_the_nodes() -> None:
    experiment, releases = observe(FEDAVG)
    rounds = [release for release in releases if release.query == "train"]
    assert [(release.node, int(release.sent["round"])) for release in rounds] == [
        (node.name, t) for t in range(2) for node in experiment.nodes
    ]
    assert {kind for release in rounds for kind in release.kinds.values()} == {"parameters"}
    for release, node in zip(rounds[3:], experiment.nodes, strict=True):
        assert torch.equal(release.tensors["parameters"], to_vector(node.model))
    # The server sends the average of the parameters of the previous round.
    n = torch.tensor([float(len(node.data)) for node in experiment.nodes])
    parameters = torch.stack([release.tensors["parameters"] for release in rounds[:3]])
    torch.testing.assert_close(rounds[3].sent["parameters"], (n / n.sum()) @ parameters)


def test_observed_gradients_include_output_gradients() -> None:
    _, releases = observe(THREE_STEPS, **OUTPUTS)
    gradients = [release for release in releases if release.part == "gradient"]
    assert len(gradients) == THREE_STEPS.steps * 3
    for release in gradients:
        assert release.tensors["d/dx"].shape == (4, 1, 8, 8)
        assert release.sent["logits"].shape == (4, 3)
        assert release.kinds == {"d/dx": "gradients"}


def test_observed_releases_are_copies() -> None:
    """The server later changes its tensors in place."""
    _, releases = observe(FEDAVG)
    first = next(release for release in releases if release.query == "train")
    other, again = observe(FEDAVG)
    assert torch.equal(first.tensors["parameters"], again[releases.index(first)].tensors["parameters"])
    assert not torch.equal(first.tensors["parameters"], to_vector(other.nodes[0].model))


def test_listener_can_stop_run() -> None:
    releases: list[ObservedRelease] = []
    experiment = ObservedSimulation(setting(FEDAVG))

    def listener(release: ObservedRelease) -> None:
        releases.append(release)
        if release.query == "train":
            raise StopListening

    assert not experiment.run_with_listener(listener)
    assert [release.query for release in releases] == ["count_samples"] * 3 + ["train"]


def test_queries_after_the_run_are_not_observed() -> None:
    experiment, releases = observe(THREE_STEPS, **OUTPUTS)
    before = len(releases)
    x = experiment.nodes[0].data.inputs[:2]
    experiment.server.federation.query("predict_logits", x=x)
    assert len(releases) == before
