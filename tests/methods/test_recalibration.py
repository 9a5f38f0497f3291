"""Recalibration of the student by the nodes: in one process, over messages, in sums, with noise, resumed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedstill.core.errors import QueryRefused
from fedstill.core.run_writer import RunWriter
from fedstill.methods._recalibration import RecalibratingServer
from fedstill.models.module_utils import to_vector
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.protocol.recalibration import (
    BATCH_NORM_STATISTICS,
    QUERY,
    batch_norm_layers,
    set_statistics,
    sum_statistics,
)
from fedstill.protocol.run_plan import RunPlan
from fedstill.runs import remote_run, run
from fedstill.runs.offline import build_offline_queries
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import RunSpec
from tests.support.audit_logs import total_charged
from tests.support.errors import raises_invalid, raises_refused
from tests.support.links import Away, RecordingLink, changed, live, nodes, tiny

NAMED = {"outputs_only": True, "kinds": (str(BATCH_NORM_STATISTICS),)}
NUMBERS = 1 + 2 * 4, 1 + 2 * 8  # of the two layers of bn-lenet:4


def spec_of(method: str = "fedkd", student: dict[str, Any] | None = None, **node_options: Any) -> RunSpec:
    """Return a run whose student has batch norm, as the nodes' models have not."""
    config = tiny(method)
    return changed(
        config,
        student={"model": "bn-lenet:4", "recalibrate": True, **(student or {})},
        nodes={"policy": NAMED, **node_options},
    )


def simulate(config: RunSpec) -> tuple[Simulation, dict[str, Any]]:
    simulation, _ = build_simulation(config)
    return simulation, simulation.run()


def statistics(simulation: Simulation) -> torch.Tensor:
    layers = batch_norm_layers(simulation.student)
    return torch.cat([torch.cat([layer.running_mean, layer.running_var]) for layer in layers])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "summed"),
    [("fedkd", False), ("fedkd", True), ("fediod", False), ("fedavg", False), ("fedavg", True)],
)
def test_student_has_statistics_of_pooled_data(method: str, summed: bool) -> None:
    """Also with secure aggregation, where the server sees one sum only."""
    config = spec_of(method, local={"epochs": 1, "optimizer": "sgd"})
    if method == "fedavg":  # which needs the student's architecture, and releases parameters
        config = changed(config, nodes={"models": ["bn-lenet:4"], "policy": {"outputs_only": False}})
    if summed:
        options = {"levels": 0} if method == "fedkd" else {}
        config = replace(config, method=replace(config.method, **options))
        config = changed(config, link={"secure_aggregation": True})
    simulation, result = simulate(config)
    plain, _ = simulate(changed(config, student={"recalibrate": False}))
    expected, pooled = plain.student, torch.cat([node.data.inputs for node in simulation.nodes])
    for one, other in zip(simulation.student.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    before, clip = statistics(plain), config.student.recalibrate_clip
    for number, layer in enumerate(batch_norm_layers(expected)):
        set_statistics(layer, sum_statistics(expected, pooled, number, clip), clip)
    assert not torch.allclose(statistics(plain), before, rtol=1e-2)
    torch.testing.assert_close(statistics(simulation), statistics(plain), rtol=1e-4, atol=1e-5)
    assert result["queries_by_name"][QUERY] == 2
    size = (8 if summed else 4) * sum(NUMBERS)
    assert result["bytes"]["by_kind"][BATCH_NORM_STATISTICS]["up"] == 3 * size
    assert BATCH_NORM_STATISTICS in result["releases"]


def test_result_and_file_are_of_the_recalibrated_student(tmp_path: Path) -> None:
    run.run(spec_of(), tmp_path / "run", command="fedstill run", progress=False)
    saved = load_file(tmp_path / "run/student.safetensors")
    simulation, result = simulate(spec_of())
    assert all(torch.equal(saved[name], value) for name, value in simulation.student.state_dict().items())
    lines = [line for line in simulation.records.metrics if "accuracy" in line]
    assert lines[-1]["accuracy"] == result["accuracy"]
    assert lines[-1]["step"] == simulation.method.total_steps + 2


def test_split_student_is_recalibrated() -> None:
    """FL-MRCM splits its student into extractor and head."""
    config = changed(spec_of("fl-mrcm"), nodes={"models": ["bn-lenet:4"], "policy": {"outputs_only": False}})
    simulation, _ = simulate(config)
    plain, _ = simulate(changed(config, student={"recalibrate": False}))
    assert not torch.equal(statistics(simulation), statistics(plain))


def test_messages_give_the_same_student(tmp_path: Path) -> None:
    simulation, result = simulate(spec_of())
    away = Away(spec_of(), tmp_path).live()
    over_messages = away.run()
    assert torch.equal(to_vector(away.student), to_vector(simulation.student))
    assert over_messages["accuracy"] == result["accuracy"]
    assert over_messages["bytes"] == result["bytes"]
    query = away.description.queries[QUERY]
    assert query == {
        "times": 2,
        "rows": 0,
        "releases": {"moments": "batch-norm statistics"},
        "bytes": 4 * max(NUMBERS),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("mechanism", ["noisy-outputs", "dp-sgd"])
def test_noisy_statistics_are_charged_as_one_event_each(tmp_path: Path, mechanism: str) -> None:
    outputs = {"outputs": {"noise": 5.0, "bound": 1.0}} if mechanism == "noisy-outputs" else {}
    privacy = {"mechanism": mechanism, "sums": {"noise": 2.5}, **outputs}
    config = spec_of(privacy=privacy)
    simulation, _ = build_simulation(config)
    simulation.run(tmp_path)
    plain, _ = build_simulation(changed(config, student={"recalibrate": False}))
    (tmp_path / "plain").mkdir()
    plain.run(tmp_path / "plain")
    for node in simulation.nodes:
        charged = []
        for folder in (tmp_path, tmp_path / "plain"):
            log = AuditLog()
            log.open(folder / FILE)
            charged.append(total_charged(log, node.name))
            log.close()
        (events, unprotected), (without, unprotected_without) = charged
        assert {event: count - without.get(event, 0) for event, count in events.items()} == {
            **dict.fromkeys(without, 0),
            "gaussian(2.5)": 2,
        }
        assert unprotected == unprotected_without
    assert torch.isfinite(statistics(simulation)).all()


def test_noise_has_the_promised_deviation() -> None:
    """Noise of 2.5 sqrt(M) on each of M sums, at each of three nodes."""
    privacy = {"mechanism": "noisy-outputs", "sums": {"noise": 2.5}, "outputs": {"noise": 5.0, "bound": 1.0}}
    simulation, _ = build_simulation(spec_of(privacy=privacy))
    simulation.run()
    server, M = simulation.server, NUMBERS[1]
    assert isinstance(server, RecalibratingServer)
    clip = 2.0
    noise = []
    for seed in range(8):  # other parameters, whose noise is other noise
        student = copy.deepcopy(simulation.student)
        with torch.no_grad():
            next(student.parameters()).add_(1e-3 * seed)
        sums = server.query(QUERY, parameters=to_vector(student), layer=1, clip=clip)["moments"].double()
        true = torch.stack([sum_statistics(student, node.data.inputs, 1, clip) for node in simulation.nodes])
        noise.append(sums - true)
    deviation = torch.stack(noise).std().item()
    assert deviation == pytest.approx(2.5 * M**0.5, rel=0.15)


@pytest.mark.parametrize("moment", ["before", "between"])
def test_resumes_before_and_between_layers(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = spec_of()
    _, expected = simulate(config)
    stop_at = build_simulation(config)[0].method.total_steps + (moment == "between")

    class Stopped(Exception):
        pass

    step = RecalibratingServer.step

    def stop(server: RecalibratingServer) -> Any:
        if server.completed_steps == stop_at:
            raise Stopped
        return step(server)

    with monkeypatch.context() as patch:
        patch.setattr(RecalibratingServer, "step", stop)
        patch.setattr(RunWriter, "is_save_due", lambda records: True)
        with pytest.raises(Stopped):
            build_simulation(config)[0].run(tmp_path)
    resumed, _ = build_simulation(config)
    result = resumed.run(tmp_path)
    assert result["accuracy"] == expected["accuracy"]
    assert result["queries_by_name"] == expected["queries_by_name"]
    assert resumed.server.completed_steps == resumed.server.total_steps


# --- refusals -------------------------------------------------------------------------------------------


def test_policy_must_name_the_kind() -> None:
    config = changed(spec_of(), nodes={"policy": {"outputs_only": True}})
    with raises_refused("outputs_only: batch-norm statistics", "policy.kinds", query=QUERY):
        build_simulation(config)


@pytest.mark.parametrize(
    ("method", "model", "reason"),
    [
        ("fedkd", "small-cnn:4", "small-cnn:4 has no batch norm"),
        ("standalone", "bn-lenet:4", "does not train"),
        ("fens", "bn-lenet:4", "does not train"),
    ],
)
def test_rejects_students_that_cannot_be_recalibrated(method: str, model: str, reason: str) -> None:
    config = changed(spec_of(method), student={"model": model}, nodes={"models": [model]})
    with raises_invalid("student.recalibrate", True, "false", reason):
        build_simulation(config)


def test_rejects_files_of_queries() -> None:
    with raises_invalid("student.recalibrate", True, "false for files"):
        build_offline_queries(spec_of())


@pytest.mark.parametrize(
    ("student", "layers", "reason"),
    [
        ("my_lab:student", 2, "my_lab:student is no network"),
        ("unet:timm:resnet18", 2, "unet:timm:resnet18 is no network"),
        ("bn-lenet:5", 2, "bn-lenet:5 has other"),
        ("bn-lenet:0", 2, "bn-lenet"),
        ("bn-lenet:4", 3, "bn-lenet:4 has other"),
    ],
)
def test_nodes_refuse_other_students_than_planned(
    tmp_path: Path, student: str, layers: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is imported that the server names, and nothing is trained."""
    sound = remote_run.make_run_plan

    def other(*about: Any) -> RunPlan:
        plan = sound(*about)
        assert plan.recalibration is not None
        return replace(plan, student=student, recalibration=replace(plan.recalibration, layers=layers))

    monkeypatch.setattr(remote_run, "make_run_plan", other)
    config = spec_of()
    link = RecordingLink(nodes(config, tmp_path))
    with pytest.raises(QueryRefused, match=f"student: .*{reason}"):
        live(config, link, tmp_path).run()
    assert not link.times("train_locally")


def test_nodes_refuse_students_larger_than_the_policy_allows(tmp_path: Path) -> None:
    config = spec_of()
    link = RecordingLink(nodes(config, tmp_path, max_parameters="100"))
    with pytest.raises(QueryRefused, match="max_parameters: 100"):
        live(config, link, tmp_path).run()
