"""Limits of the resources that a server can use at a node: memory, time, messages, runs and disk.

Memory is the peak resident size of a separate process.
"""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core import timing
from fedstill.core.errors import ArgumentError, MemoryLimitExceeded
from fedstill.data.public import PublicData
from fedstill.node import limits
from fedstill.node.limits import limit_parameters_of_queries
from fedstill.node.node_service import NodeService
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import GENERATOR_PARAMETERS
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import PROTOCOL, RunPlan, public_fingerprint, public_tensors
from fedstill.protocol.wire_format import HEADER, METADATA, WireConfig, decode_header, pack
from tests.support.errors import raises_refused
from tests.support.node_services import CLASSES, FEDIOD, NODE, PLAN, SHAPE, Clinic, image
from tests.support.processes import FORKING
from tests.support.small_world import SETTING

GIB = 2**30
# At a join the reason is not given, as it would reveal the number of records.
RUN = "max_memory: the run would take more than the node's owner allows"
# Only Linux reports and limits the memory of a process.
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def serve(folder: Path, ceiling: bool) -> None:
    """Serve messages in a separate process; write the replies with CPU seconds, and the memory growth."""
    host = NodeService(folder)
    if ceiling:
        host.limit_process_memory()
    before, replies = peak(), []
    for path in sorted((folder / "messages").iterdir()):
        message, start = path.read_bytes(), time.process_time()
        # Decode the header only, as the tensors may not fit into the memory limit.
        reply = json.loads(decode_header(host.serve(message))[METADATA][HEADER])[HEADER]
        replies.append({**reply.get("error", {}), "took": time.process_time() - start})
    (folder / "replies").write_text(json.dumps([replies, peak() - before]))


def peak() -> int:
    """Return the peak memory of this program; getrusage also counts its parent process."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall("VmHWM:[^0-9]*([0-9]+)", status)[0]) * 1024


def served(
    folder: Path,
    *messages: bytes,
    policy: str = "",
    change: Mapping[str, str] | None = None,
    ceiling: bool = False,
) -> tuple[list[dict[str, Any]], int]:
    """Return a node's replies to messages, and the growth of its process in bytes.

    Args:
        folder: the node's folder, which is created if it does not exist.
        messages: messages to the node, in order.
        policy: lines of its policy.
        change: replacements in its file.
        ceiling: limit the memory of the process.
    """
    if not folder.exists():
        Clinic(folder, policy)
    text = NODE + policy
    for old, new in (change or {}).items():
        assert old in text
        text = text.replace(old, new)
    (folder / "node.toml").write_text(text)
    (folder / "messages").mkdir()
    for number, message in enumerate(messages):
        (folder / "messages" / str(number)).write_bytes(message)
    process = FORKING.Process(target=serve, args=(folder, ceiling))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    replies, grown = json.loads((folder / "replies").read_text())
    print(f"\nCOST {folder.name}: {grown / 2**20:.0f} MiB, {[round(each['took'], 2) for each in replies]} s")
    return replies, grown


def join(plan: RunPlan = PLAN, **spec: Any) -> bytes:
    """Return a message that joins a run of another spec."""
    table = plan.to_dict()
    table["spec"].update(spec)
    return pack({"operation": "join", "run": plan.run, "plan": table})


# --- memory -------------------------------------------------------------------------------------------


def test_memory_limit_defaults_to_three_quarters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "_machine_memory", lambda: 1000)
    assert [limits.allowed_memory_bytes(limit, torch.device("cpu")) for limit in (7, 0, None)] == [
        7,
        0,
        750,
    ]


@linux
def test_plan_with_many_classes_is_refused_before_allocation(tmp_path: Path) -> None:
    change, policy = {"mlp:8": "small-cnn"}, f"max_memory = {GIB // 4}\nmax_header = 0\n"
    message = join(classes=[str(number) for number in range(250_000)])
    (reply,), grown = served(tmp_path / "classes", message, policy=policy, change=change)
    assert reply["rule"] == RUN
    assert grown < GIB // 4
    assert reply["took"] < 10
    assert not (tmp_path / "classes" / "runs").exists()


@linux
def test_image_shape_beyond_memory_is_refused(tmp_path: Path) -> None:
    change, policy = {'path = "data.npz"': 'path = "data.npz"\nfit = true'}, f"max_memory = {GIB}\n"
    folder = tmp_path / "fit"
    Clinic(folder)
    pixels_of(folder)
    (reply,), grown = served(folder, join(shape=[1, 2000, 2000]), policy=policy, change=change)
    assert reply["rule"] == RUN
    assert grown < GIB // 8
    assert reply["took"] < 10


@pytest.mark.parametrize("width", [2**40, 2**64])  # the first has 2^80 weights; the second is no int64
def test_model_whose_size_overflows_is_refused(width: int) -> None:
    with pytest.raises(MemoryLimitExceeded):
        limits.check_model(lambda: nn.Linear(width, width), PLAN.spec, 1, GIB)


def test_other_error_of_a_model_is_not_a_memory_limit() -> None:
    with pytest.raises(RuntimeError):  # images have 64 pixels
        limits.check_model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), PLAN.spec, 1, GIB)


def pixels_of(folder: Path) -> None:
    import numpy as np

    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 255, (40, *SHAPE)).astype(np.uint8), draw.integers(0, CLASSES, 40)
    np.savez(folder / "data.npz", images=images, labels=labels)


@linux
def test_text_length_or_vocabulary_beyond_memory_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    Clinic(folder)
    lines = ["text,label", *(f"a word {n},{n % 2}" for n in range(40))]
    (folder / "data.csv").write_text("\n".join(lines))
    change = {'path = "data.npz"': 'source = "csv"\npath = "data.csv"', "mlp:8": "bag"}
    text: dict[str, Any] = {"task": {"name": "text"}, "mean": [], "std": [], "classes": ["0", "1"]}
    plan = dataclasses.replace(PLAN, method={"name": "fedavg"})
    messages = [
        join(plan, **text, shape=[8], vocabulary=2**31),
        join(plan, **text, shape=[2**30], vocabulary=100),
    ]
    replies, grown = served(folder, *messages, policy=f"max_memory = {GIB}\n", change=change)
    assert [reply["rule"] for reply in replies] == [RUN, RUN]
    assert grown < GIB // 8


@linux
def test_query_beyond_memory_is_refused(tmp_path: Path) -> None:
    """max_rows allows 100,000 rows, which would take 4 GB in a small CNN."""
    folder, plan = tmp_path / "rows", PLAN.to_dict()
    header = {"run": "one", "query": "predict_logits", "differentiable": True}
    messages = [
        pack({"operation": "join", "plan": plan}),
        pack({"operation": "train_locally", "run": "one", "seconds": 60}),
        pack({"operation": "answer_query", "number": 0, **header}, {"x": torch.zeros(100_000, *SHAPE)}),
        pack({"operation": "answer_query", "number": 0, **header}, {"x": image(0)}),
    ]
    change = {"mlp:8": "small-cnn"}
    replies, grown = served(folder, *messages, policy=f"max_memory = {GIB}\n", change=change)
    assert replies[2]["rule"].startswith("max_memory: a query about 100000 inputs at once")
    assert replies[2]["took"] < 10
    assert "kind" not in replies[3]
    assert grown < GIB // 2


@linux
def test_repeated_public_rows_are_limited(tmp_path: Path) -> None:
    """One public row of 64 x 64 pixels, requested 100,000 times, would take 1.6 GB."""
    spec = dataclasses.replace(PLAN.spec, shape=(1, 64, 64))
    public = PublicData("ours", torch.zeros(4, *spec.shape), None, "")
    plan = dataclasses.replace(fedmd(initial_rounds=0)[0], spec=spec, public=public_fingerprint(public))
    header = {"operation": "answer_query", "run": "one", "query": "communicate", "differentiable": False}
    messages = [
        pack({"operation": "join", "plan": plan.to_dict()}, public_tensors(public)),
        pack({**header, "number": 0}, {"rows": torch.zeros(100_000, dtype=torch.int32)}),
        pack({**header, "number": 1}, {"rows": torch.zeros(4, dtype=torch.int32)}),
    ]
    folder, change = tmp_path / "named", {'path = "data.npz"': 'path = "data.npz"\nfit = true'}
    Clinic(folder)
    pixels_of(folder)
    replies, grown = served(folder, *messages, policy=f"max_memory = {GIB // 2}\n", change=change)
    assert replies[1]["rule"].startswith("max_memory: a query about 100000 public inputs at once")
    assert "kind" not in replies[2]
    assert grown < GIB // 8


@linux
def test_unforeseen_allocation_meets_process_limit(tmp_path: Path) -> None:
    """An owner's factory may allocate any amount for a spec; afterwards, a valid plan is served."""
    folder = tmp_path / "ceiling"
    Clinic(folder)
    (folder / "mine_of_caps.py").write_text(
        "import torch\n"
        "def make(shape, classes):\n"
        "    big = torch.ones(classes, 10_000, 1000) if classes > 50 else None\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
    )
    change = {"mlp:8": "mine_of_caps:make"}
    sound = dataclasses.replace(PLAN, run="two")
    messages = [join(classes=[str(n) for n in range(100)]), join(sound)]
    policy = f"max_memory = {GIB}\n"
    (refused, reply), grown = served(folder, *messages, policy=policy, change=change, ceiling=True)
    assert refused["rule"] == RUN
    assert refused["kind"] == "QueryRefused"
    assert "kind" not in reply
    assert grown < GIB


@linux
def test_serving_processes_have_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks FLARE jobs and `fedstill offline answer`."""
    clinic = Clinic(tmp_path / "clinic", f"max_memory = {GIB}\n")
    code = (
        "import resource, sys\nfrom fedstill.cli import main as cli\n"
        "try:\n    cli.main(['offline', 'answer', sys.argv[1], 'missing'])\n"
        "except SystemExit:\n    print(resource.getrlimit(resource.RLIMIT_DATA)[0])\n"
    )
    words = [sys.executable, "-c", code, str(clinic.folder)]
    limit = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert GIB < limit < 3 * GIB
    flare = pytest.importorskip("fedstill.federation.flare")
    # Filters of connections of other tests in this process do not apply to this site.
    monkeypatch.setattr(
        "fedstill.federation.flare_component.install_job_request_filter", lambda site, folder: None
    )
    monkeypatch.setenv("FEDSTILL_NODE", str(clinic.folder))
    monkeypatch.setattr(flare, "collab", type("Site", (), {"site_name": "clinic"}))
    limited: list[str] = []
    monkeypatch.setattr(
        "fedstill.node.node_service.limit_process_memory", lambda most, device: limited.append(most)
    )
    flare.NodeProgram().begin()
    assert limited == [GIB]


def test_billion_sampled_images_are_refused(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, method={**FEDIOD, "batch": 10**9, "student": {"memory": 10**9}})
    clinic = Clinic(tmp_path / "clinic", plan=plan)
    reply, _ = clinic.say("join", plan=plan.to_dict())
    assert reply["refused_queries"] == {"predict_logits": "max_rows: 100000, and it has 1000000000"}


# --- networks of the server -----------------------------------------------------------------------------

HUGE = {
    "critic": {**FEDIOD, "critic": {"width": 10**6}},  # 1.3e14 bytes
    "overflow": {**FEDIOD, "critic": {"width": 10**12}},
    "generator": {"name": "fedmd-cg", "rounds": 1, "generator": {"width": 10**6}},
}
OPEN = "outputs_only = false"


def joined(folder: Path, method: dict[str, Any], policy: str = OPEN) -> Any:
    """Return a node's reply to a plan."""
    clinic = Clinic(folder, policy, dataclasses.replace(PLAN, method=method))
    reply = clinic.say("join", plan=clinic.plan.to_dict())
    if clinic.host.session is not None:
        clinic.say("leave")
    return reply


@pytest.mark.parametrize("which", HUGE)
def test_plan_with_huge_networks_is_refused_before_they_have_memory(tmp_path: Path, which: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = joined(tmp_path / "clinic", HUGE[which])
    assert reply["kind"] == "QueryRefused"
    assert reply["rule"] == "max_parameters: 50000000, and the plan's networks have more"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_parameter_limit_is_exact(tmp_path: Path) -> None:
    """FedIOD's critic of width 4 on one channel: 68 + (520 + 16) + 9 parameters."""
    assert "rule" in joined(tmp_path / "less", FEDIOD, "max_parameters = 612")
    reply, _ = joined(tmp_path / "enough", FEDIOD, "max_parameters = 613")
    assert reply["refused_queries"] == {}
    reply, _ = joined(tmp_path / "none", FEDIOD, "max_parameters = 0")
    assert reply["refused_queries"] == {}
    with pytest.raises(ArgumentError, match="max_parameters = -1"):
        PolicyConfig(max_parameters=-1)


def test_query_with_large_network_is_refused() -> None:
    """FedGEN creates the server's generator in each round."""
    made: list[nn.Module] = []

    def function(node: object) -> dict[str, torch.Tensor]:
        made.append(nn.Linear(100, 100))
        return {}

    sends = {"generator": GENERATOR_PARAMETERS}
    queries = {"train": Query(function, sends=sends, name="train"), "other": Query(function, name="other")}
    side = limit_parameters_of_queries(NodeSide(queries, SETTING), 10_000, "clinic")
    with raises_refused("max_parameters: 10000", query="train"):
        side.queries["train"].function(None)
    assert not made
    side.queries["other"].function(None)
    limit_parameters_of_queries(NodeSide(queries, SETTING), 10_100, "clinic").queries["train"].function(None)
    assert len(made) == 2


# --- messages -----------------------------------------------------------------------------------------


@linux
def test_large_header_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    message = pack({"operation": "identify", "x": [[]] * 5_000_000})
    assert len(message) > 19 * 2**20
    (reply,), grown = served(tmp_path / "header", message)
    assert reply["rule"] == f"max_header: 1000000, and it has {len(message) - 8} bytes"
    assert reply["took"] < 1
    assert (
        grown < 100 * 2**20
    )  # the message itself, which this process reads from a file; parsed, it would take three times as much


def test_header_within_limit_is_parsed(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic")
    reply, _ = clinic.say("identify", x="y" * 990_000)
    assert reply["protocol"] == PROTOCOL


def test_compressed_message_counts_as_float32(tmp_path: Path) -> None:
    """int8 has a quarter of the size in transit, but not at the node."""
    plan = dataclasses.replace(PLAN, wire=WireConfig(inputs="int8"))
    clinic = Clinic(tmp_path / "clinic", "max_message = 10_000\n", plan).ready()
    sent = plan.wire.compress({"x": torch.ones(60, *SHAPE)}, {"x": "inputs"})
    reply = clinic.say("answer_query", sent, query="predict_logits", number=0, differentiable=True)
    assert reply["rule"] == "max_message: 10000, and in float32 it has 15360 bytes"


# --- time ---------------------------------------------------------------------------------------------


def fedmd(**options: Any) -> tuple[RunPlan, PublicData]:
    public = PublicData("ours", torch.zeros(40, *SHAPE), None, "")
    method = {"name": "fedmd", "initial_rounds": 1, "rounds": 2, "subset": 32, **options}
    return dataclasses.replace(PLAN, method=method, public=public_fingerprint(public)), public


def query_digest(clinic: Clinic, number: int = 0) -> Any:
    rows = torch.arange(32).int()
    sent = {"rows": rows, "consensus": torch.zeros(32, CLASSES), "round": torch.tensor(0)}
    return clinic.say("answer_query", sent, query="digest", number=number, differentiable=False)


@pytest.mark.parametrize("private", [False, True])
def test_slow_response_is_stopped(tmp_path: Path, private: bool) -> None:
    plan, public = fedmd(digest_epochs=10**6)
    noise = '[privacy]\nmechanism = "dp-sgd"\n[privacy.training]\nnoise = 1.0\n' * private
    clinic = Clinic(tmp_path / "clinic", f"max_seconds = 2\n{noise}", plan)
    clinic.say("join", public_tensors(public), plan=plan.to_dict())
    while not clinic.say("train_locally", seconds=60)[0]["is_trained"]:
        pass
    start = time.monotonic()
    reply = query_digest(clinic)
    assert 2 < time.monotonic() - start < 20
    assert reply["rule"] == "max_seconds: 2, and it takes longer"
    assert clinic.lines()[-1]["rule"] == reply["rule"]
    if private:  # as after any query that fails during private training
        assert "it failed at query 0 (digest)" in query_digest(clinic, 1)["text"]


def test_endless_rounds_are_refused(tmp_path: Path) -> None:
    plan, public = fedmd(initial_rounds=10**9)
    reply = Clinic(tmp_path / "clinic", "", plan).say("join", public_tensors(public), plan=plan.to_dict())
    assert reply["rule"].startswith("rounds: 100000 at most, and the plan's number of parts is 10000000")


def test_cost_computation_respects_time_limit() -> None:
    cost = PrivacyCost({Event("gaussian", 1.2345, rate=0.0123): 10**5})
    with timing.time_limit(1e-9, lambda: TimeoutError("too long")), pytest.raises(TimeoutError):
        compute_epsilon(cost, 1e-5)


def test_initial_training_stops_at_time_limit_and_resumes(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", "max_seconds = 1\n")
    path = clinic.folder / "node.toml"
    path.write_text(path.read_text().replace("epochs = 4", "epochs = 2000"))
    clinic.again()
    clinic.say("join", plan=PLAN.to_dict())
    start, (reply, _) = time.monotonic(), clinic.say("train_locally", seconds=60)
    assert time.monotonic() - start < 20
    assert not reply["is_trained"]
    before = clinic.session.training.steps
    clinic.say("train_locally", seconds=60)
    assert clinic.session.training.steps > before


# --- runs and disk ------------------------------------------------------------------------------------


def test_new_runs_are_limited_and_known_runs_continue(tmp_path: Path) -> None:
    policy = "max_runs = 2\n"
    for run in ("one", "two"):
        clinic = Clinic(tmp_path / "clinic", policy, dataclasses.replace(PLAN, run=run)).ready()
        clinic.say("leave")
    third = Clinic(tmp_path / "clinic", policy, dataclasses.replace(PLAN, run="three"))
    reply = third.say("join", plan=third.plan.to_dict())
    assert reply["rule"] == (
        "max_runs: 2, and 2 are in runs/; the node's owner moves folders of finished runs out of runs/"
    )
    assert sorted(path.name for path in (clinic.folder / "runs").iterdir()) == ["one", "two"]
    assert clinic.say("join", plan=clinic.plan.to_dict())[0]["is_trained"]
    clinic.say("leave")
    (clinic.folder / "runs" / "one").rename(tmp_path / "kept")
    third.ready()


def test_disk_limit_refuses_writes(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    clinic.query(0)
    clinic.say("leave")
    audit = clinic.folder / "audit.sqlite"
    used = audit.stat().st_size
    used += sum(path.stat().st_size for path in (clinic.folder / "runs").rglob("*") if path.is_file())
    clinic = Clinic(tmp_path / "clinic", f"max_disk = {used + 1000}\n")
    reply, _ = clinic.say("join", plan=PLAN.to_dict())
    assert reply["is_trained"]
    assert "max_disk" in clinic.say("save_checkpoint", checkpoint=1)["rule"]
    assert not list(clinic.session.run_folder.path.glob("checkpoint-*"))
    for number in range(50):  # each refusal is logged, until the log's share of the disk is full
        clinic.say("answer_query", query="none", number=number, differentiable=False)
    assert sum(path.stat().st_size for path in clinic.folder.glob("audit.sqlite*")) < used + 50_000
    assert "max_disk" in clinic.query(1)["rule"]
    clinic.say("leave")
    other = Clinic(tmp_path / "clinic", f"max_disk = {used}\n", dataclasses.replace(PLAN, run="two"))
    assert "max_disk" in other.say("join", plan=other.plan.to_dict())["rule"]
    assert not (clinic.folder / "runs" / "two").exists()


def test_public_data_count_for_disk_limit(tmp_path: Path) -> None:
    plan, public = fedmd()
    clinic = Clinic(tmp_path / "clinic", "max_disk = 5000\n", plan)
    assert "max_disk: 5000" in clinic.say("join", public_tensors(public), plan=plan.to_dict())["rule"]
    assert not (clinic.folder / "public").exists()


# --- invalid limits -----------------------------------------------------------------------------------

WILD: list[Any] = [True, -1, 1.5, float("nan"), "9" * 1000]


@pytest.mark.parametrize("value", WILD, ids=repr)
@pytest.mark.parametrize(
    "name", [part.name for part in dataclasses.fields(PolicyConfig) if part.name.startswith("max_")]
)
def test_limits_must_be_integers(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"invalid policy.{name} = .* 0 .no limit. or more, an integer"):
        PolicyConfig(**{name: value})


@linux
def test_out_of_memory_message_keeps_node_serving(tmp_path: Path) -> None:
    """In Rust code, the failed allocation would end the process, or raise an error that is not handled."""
    large = pack({"operation": "identify"}, {"x": torch.zeros(2**24)})
    policy = f"max_memory = {2**20 * 100}"
    replies, _ = served(
        tmp_path / "large", large, pack({"operation": "identify"}), policy=policy, ceiling=True
    )
    assert replies[0]["rule"] == "max_memory: it would take more than the node's owner allows"
    assert "rule" not in replies[1]


def test_out_of_memory_response_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()

    def full(header: Mapping[str, Any], tensors: Any = None) -> bytes:
        if tensors:
            raise MemoryError
        return pack(header)

    with monkeypatch.context() as patch:
        patch.setattr("fedstill.node.node_service.pack", full)
        assert clinic.query(0)["rule"] == "max_memory: it would take more than the node's owner allows"
    assert clinic.charged_releases() == [(0, "response")], "the response is charged"
    _, released = clinic.query(0)
    assert set(released) == {"logits", "critic"}
    assert clinic.charged_releases() == [(0, "response")], "the response is charged once"
