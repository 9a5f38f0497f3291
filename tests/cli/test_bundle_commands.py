"""Offline federation by files, from queries to report, with the commands of server and nodes."""

from __future__ import annotations

import dataclasses
import glob
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file

from fedstill.cli import main as cli
from fedstill.core.seeds import derive
from fedstill.core.text_format import format_bytes
from fedstill.federation import signed_files
from fedstill.node.audit_log import AuditLog
from fedstill.protocol.wire_format import pack, unpack
from fedstill.report import write_report
from fedstill.runs import offline, run, spec
from fedstill.runs.presets import parse
from fedstill.runs.simulation import build_simulation
from tests.support.audit_logs import edit, entries, releases

pytest.importorskip("cryptography")

Main = Callable[..., tuple[int, str, str]]
NAMES = ("node-0", "node-1", "node-2")
RUN = """\
name = "small"
seed = 3
[data]
name = "digits"
[split]
nodes = 3
[public]
name = "held-out"
share = 0.2
[nodes]
models = ["small-cnn:8", "mlp:16"]
local.epochs = 10.0
[method]
name = "fedkd"
z_max = 20.0
student.epochs = 40
predictions = 2
[student]
model = "small-cnn:8"
[engine]
batching = "one-by-one"
[evaluation]
centralized = false
"""


def make_nodes(folder: Path) -> Path:
    """Create the folder of each node of the run ``run.toml``."""
    (folder / "run.toml").write_text(RUN)
    given = spec.load_toml(folder / "run.toml")
    experiment, _ = build_simulation(given)
    for index, name in enumerate(NAMES):
        own = folder / name
        own.mkdir()
        part, model = experiment.setting.nodes[index].data, experiment.setting.nodes[index].model
        pixels = (part.inputs.numpy() + 1) / 2
        np.savez(own / "data.npz", images=pixels, labels=part.targets.numpy())
        weights = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(weights, own / "first.safetensors")
        table = {
            "name": name,
            "seed": given.seed,
            "online": False,
            "data": {"path": "data.npz"},
            "model": {
                "name": given.nodes.models[index % len(given.nodes.models)],
                "weights": "first.safetensors",
            },
            "local": dataclasses.asdict(given.nodes.local),
        }
        (own / "node.toml").write_text(tomli_w.dumps(table))
        (own / "secret").touch(mode=0o600)
        (own / "secret").write_text(f"rehearsal {derive(given.seed, name, 'gate')}")
    return folder


@pytest.fixture(scope="module")
def exchange_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all steps once: make queries, respond at three nodes; also run the same experiment live."""
    folder = make_nodes(tmp_path_factory.mktemp("carried"))
    run.run(spec.load_toml(folder / "run.toml"), folder / "live", command="fedstill run", progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (
            ["offline", "make", "run.toml"],
            *(["offline", "answer", name, "queries.safetensors"] for name in NAMES),
        ):
            with pytest.raises(SystemExit) as exit_info:
                cli.main(words)
            assert exit_info.value.code == 0, words
    return folder


@pytest.fixture
def here(exchange_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a copy of the folder, which tests may change."""
    shutil.copytree(exchange_folder, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


RESPONSES = tuple(f"responses-{name}.safetensors" for name in NAMES)
COMBINE = ("offline", "combine", *RESPONSES, "--queries", "queries.safetensors", "--out", "out", "--quiet")


def refused(outcome: tuple[int, str, str]) -> str:
    code, _, text = outcome
    assert code == 2, text
    assert text.count("\n") == 1
    return text


# --- all steps -----------------------------------------------------------------------------------


def test_student_equals_live_run_and_report_names_offline_exchange(here: Path, command: Main) -> None:
    code, out, err = command(*COMBINE)
    assert code == 0, err
    live, mine = (json.loads((here / name / "result.json").read_text()) for name in ("live", "out"))
    student, expected = (load_file(here / name / "student.safetensors") for name in ("out", "live"))
    for name, value in expected.items():
        torch.testing.assert_close(student[name], value, msg=name, rtol=1e-5, atol=1e-6)
    assert mine["accuracy"] == live["accuracy"] > 50
    carried = format_bytes(len(NAMES) * Path("queries.safetensors").stat().st_size)
    assert re.search(rf"bytes to nodes: +{carried}\n", out)
    for same in ("bytes", "queries", "queries_by_name", "releases"):
        assert mine[same] == live[same]
    for one, other in zip(mine["nodes"], live["nodes"], strict=True):
        for same in ("name", "examples", "label_counts", "parameters", "bytes"):
            assert one[same] == other[same]
    assert mine["engine"]["backend"] == "files"
    assert mine["standalone"] is None
    audits = [releases(here / name) for name in ("out", "live")]
    for lines in audits:
        for line in lines:
            # hashes, processing rules and the run name differ from those of the live run
            for name in ("at", "history_hash", "release_hash", "run", "rule"):
                del line[name]
        lines.sort(key=lambda line: (line["number"], line["node"]))
    assert audits[0] == audits[1]
    assert sorted(path.name for path in (here / "out").iterdir()) == [
        "audit.sqlite", "audit.sqlite.head", "config.toml", "draws.safetensors", "files.json",
        "metrics.jsonl", "predictions.csv", "report.html", "result.json", "student.safetensors",
    ]  # fmt: skip
    page = (here / "out" / "report.html").read_text()
    for name in NAMES:
        key = signed_files.parse_fingerprint(f"{name}/node.pub")
        assert f"{name:<11} {key}" in out
        assert f"signed by key {key} (not verified)" in page
    assert "keys were not compared" in out
    assert "This was a simulation" not in page
    assert "This was a simulation" in write_report(here / "live").read_text()


def test_report_names_verified_keys_and_missing_nodes(here: Path, command: Main) -> None:
    Path("keys").mkdir()
    for name in NAMES:
        shutil.copy(f"{name}/node.pub", f"keys/{name}.pub")
    without = [word for word in COMBINE if word != RESPONSES[1]]
    code, out, err = command(*without, "--node-keys", "keys")
    assert code == 0, err
    assert "No responses came from node-1, whose keys are in keys." in out
    assert "not compared" not in out
    result = json.loads(Path("out/result.json").read_text())
    assert [node["key_known"] for node in result["files"]["responses"]] == [True, True]
    assert result["files"]["missing"] == ["node-1"]
    assert [node["name"] for node in result["nodes"]] == ["node-0", "node-2"]
    assert "(verified)" in Path("out/report.html").read_text()


def test_output_of_each_offline_step(here: Path, command: Main) -> None:
    fingerprint = signed_files.parse_fingerprint("server.pub")
    for name in (
        "queries.safetensors",
        "queries.safetensors.sig",
        "queries.safetensors.toml",
        "server.pub",
    ):
        Path(name).unlink()
    code, out, _ = command("offline", "make", "run.toml")
    assert code == 0
    assert "queries     count_labels (1), predict (2)" in out
    assert "inputs      288 public inputs: held-out" in out
    assert f"your key    {fingerprint}" in out  # the existing key is used
    for step in ("queries.safetensors.sig", "fedstill offline answer", "fedstill offline combine"):
        assert step in out
    assert command("offline", "show", "queries.safetensors")[1].endswith(f"signed by   {fingerprint}\n")
    code, out, _ = command("offline", "answer", "node-0", "queries.safetensors")
    assert f"signed by   {fingerprint} (not compared yet)" in out
    assert "released    label counts 44 B, logits 5.8 kB" in out
    assert "noise       none; no guarantee" in out
    assert "fedstill offline combine responses-*.safetensors --queries queries.safetensors" in out
    assert "cost        no guarantee: in all 3 releases left without noise" in out
    assert f"your key    {signed_files.parse_fingerprint('node-0/node.pub')}" in out
    assert "by phone" in out
    for known in (fingerprint, "server.pub"):
        code, out, _ = command("offline", "answer", "node-0", "queries.safetensors", "--server-key", known)
        assert f"signed by   {fingerprint} (as expected)" in out
        assert "by phone" not in out


@pytest.mark.slow
def test_commands_of_the_docs_page_work(
    tmp_path: Path, command: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "offline.md"
    if not page.exists():
        pytest.skip("without the docs")
    monkeypatch.chdir(tmp_path)
    printed, commands = "", []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        if kind == "toml":
            Path("run.toml").write_text(block)
        elif kind == "python":
            exec(block, {})
            file = Path("north/node.toml")
            file.write_text(file.read_text().replace("online = true", "online = false"))
        for words in map(shlex.split, block.splitlines() if not kind else []):
            if words[0] == "fedstill":
                if "--server-key" in words:
                    words[-1] = re.findall(r"your key +(.*)", printed)[0]
                words = [name for word in words for name in sorted(glob.glob(word)) or [word]]
                words = [word for word in words if not word.endswith(".sig")]
                code, out, err = command(*words[1:])
                assert code == 0, (words, err)
                printed, commands = printed + out, [*commands, " ".join(words[1:3])]
            elif shutil.which(words[0]):
                subprocess.run([sys.executable if words[0] == "python" else words[0], *words[1:]], check=True)
    assert commands == [
        "offline make", "node init", "node check", "offline show", "offline answer", "offline combine",
    ]  # fmt: skip
    assert json.loads(Path("student/result.json").read_text())["accuracy"] > 70
    assert "not compared" not in printed.split("signed by")[-1]


# --- repeated responses --------------------------------------------------------------------------


def test_responses_of_another_node_are_not_overwritten(here: Path, command: Main) -> None:
    before, lines = Path(RESPONSES[0]).read_bytes(), entries(Path("node-1"))
    output = refused(command("offline", "answer", "node-1", "queries.safetensors", "--out", RESPONSES[0]))
    assert f"{RESPONSES[0]} is signed by another key: choose another path" in output
    assert (Path(RESPONSES[0]).read_bytes(), entries(Path("node-1"))) == (before, lines)


def test_repeated_responses_are_equal_and_free(here: Path, command: Main) -> None:
    before = Path(RESPONSES[0]).read_bytes(), Path(f"{RESPONSES[0]}.sig").read_bytes()
    lines = entries(Path("node-0"))
    assert lines
    Path(RESPONSES[0]).unlink()
    assert command("offline", "answer", "node-0", "queries.safetensors")[0] == 0
    assert (Path(RESPONSES[0]).read_bytes(), Path(f"{RESPONSES[0]}.sig").read_bytes()) == before
    assert entries(Path("node-0")) == lines
    # Responses are equal if the model is trained again, for example after the folder was lost.
    shutil.rmtree("node-0/runs")
    assert command("offline", "answer", "node-0", "queries.safetensors")[0] == 0
    assert Path(RESPONSES[0]).read_bytes() == before[0]


def test_refused_queries_get_responses_after_option_changes(here: Path, command: Main) -> None:
    for path in (*Path("node-0").glob("audit.*"), *Path("node-0").glob("runs/*/*")):
        path.unlink()
    path = Path("node-0/node.toml")
    original = path.read_text()
    path.write_text(f"{original}\n[privacy]\nmechanism = 'dp-sgd'\nepsilon = 1e-3\ntraining.noise = 0.5\n")
    assert "privacy budget" in refused(command("offline", "answer", "node-0", "queries.safetensors"))
    path.write_text(f"{original}\n[privacy]\nmechanism = 'dp-sgd'\ndelta = 1e-6\ntraining.noise = 0.7\n")
    code, out, err = command("offline", "answer", "node-0", "queries.safetensors")
    assert code == 0, err
    assert re.search(r"cost +epsilon [0-9.]+ at delta 1e-06, in all runs on these data", out)
    # Options of a run with releases cannot change, even if the stored responses are lost.
    path.write_text(f"{original}\n[privacy]\nmechanism = 'dp-sgd'\ndelta = 1e-6\ntraining.noise = 0.9\n")
    (responses,) = Path("node-0").glob("runs/*/responses.safetensors")
    responses.unlink()
    error = refused(command("offline", "answer", "node-0", "queries.safetensors"))
    assert "it was begun with another setup: start a new run" in error


def test_released_responses_stay_the_same_after_option_changes(here: Path, command: Main) -> None:
    """Other responses would release more data than was charged. The recorded policy stays the same too."""
    before = Path(RESPONSES[0]).read_bytes()
    path, original = Path("node-0/node.toml"), dict(np.load("node-0/data.npz"))
    for corrupt in (
        lambda: np.savez("node-0/data.npz", images=original["images"][:50], labels=original["labels"][:50]),
        lambda: Path("node-0/first.safetensors").unlink(),
        lambda: path.write_text(path.read_text().replace('name = "small-cnn:8"', 'name = "mlp:4"')),
        lambda: path.write_text(path.read_text() + "\n[policy]\nmax_rows = 7\n"),
    ):
        corrupt()
        Path(RESPONSES[0]).unlink()
        assert command("offline", "answer", "node-0", "queries.safetensors")[0] == 0
        assert Path(RESPONSES[0]).read_bytes() == before
    assert unpack(before)[0]["policy"]["max_rows"] != 7  # the policy at the time of the release


ANSWER = ("offline", "answer", "node-0", "queries.safetensors")


def test_stored_responses_are_released_again_only_if_unchanged(here: Path, command: Main) -> None:
    (stored,) = Path("node-0/runs").glob("*/responses.safetensors")
    whole, signed_before = stored.read_bytes(), Path(RESPONSES[0]).read_bytes()
    header, tensors = unpack(whole)
    tensor = len(whole) - 100
    for offset in (0, whole.index(b"node-0"), whole.index(b"max_rows"), whole.index(b"mechanism"), tensor):
        blob = bytearray(whole)
        blob[offset] ^= 1
        stored.write_bytes(blob)
        Path(RESPONSES[0]).unlink(missing_ok=True)
        assert f"{stored} was modified, or audit" in refused(command(*ANSWER)), offset
        assert not Path(RESPONSES[0]).exists()
    header["replies"]["join"]["privacy"]["mechanism"] = "pate"
    stored.write_bytes(pack(header, tensors))
    assert "Restore the one that has changed" in refused(command(*ANSWER))
    stored.unlink()
    assert command(*ANSWER)[0] == 0
    assert (stored.read_bytes(), Path(RESPONSES[0]).read_bytes()) == (whole, signed_before)


def test_stored_responses_need_the_audit_log_that_charged_them(here: Path, command: Main) -> None:
    audit, files = Path("node-0/audit.sqlite"), ("audit.sqlite", "audit.sqlite.head")
    shutil.copytree("node-0", "sound")
    Path(RESPONSES[0]).unlink()

    def edited() -> None:
        edit(audit, "UPDATE entries SET line = replace(line, 'rule', 'rull') WHERE entry = 1")

    def foreign() -> None:
        for name in files:
            shutil.copy(f"node-1/{name}", f"node-0/{name}")

    def another_run() -> None:  # a valid log of this node without these releases
        for path in Path("node-0").glob("audit.sqlite*"):
            path.unlink()
        AuditLog(audit).close()

    for corrupt, message in (
        (edited, "entry 1 is not as it was written; nothing is released until its owner has accepted it"),
        (foreign, "was modified, or audit.sqlite is another audit log"),
        (audit.unlink, "audit.sqlite: is missing, but its head exists: put it back"),
        (another_run, "was modified, or audit.sqlite is another audit log"),
    ):
        corrupt()
        assert message in refused(command(*ANSWER))
        assert not Path(RESPONSES[0]).exists()
        shutil.rmtree("node-0")
        shutil.copytree("sound", "node-0")
    assert command(*ANSWER)[0] == 0


def test_repeated_queries_name_the_current_server(here: Path, command: Main) -> None:
    """The queries are first signed by another server; the true server must query the node again."""
    signature = Path("queries.safetensors.sig").read_bytes()
    shutil.rmtree("node-0/runs")
    blob = Path("queries.safetensors").read_bytes()
    signed_files.write(Path("queries.safetensors"), blob, signed_files.load_or_create_key(Path("thief.key")))
    assert command("offline", "answer", "node-0", "queries.safetensors")[0] == 0
    Path("queries.safetensors.sig").write_bytes(signature)
    assert f"{RESPONSES[0]} responds to these queries as signed by another key" in refused(command(*COMBINE))
    words = ("offline", "answer", "node-0", "queries.safetensors", "--server-key", "server.pub")
    assert command(*words)[0] == 0
    assert command(*COMBINE)[0] == 0
    about = json.loads(Path("out/result.json").read_text())["files"]["responses"]
    assert [node["asker_known"] for node in about] == [True, False, False]
    page = Path("out/report.html").read_text()
    assert page.count("; the node had verified the server&#39;s key") == 1
    assert page.count("; the node had not verified the server&#39;s key") == 2


def test_other_queries_are_charged_as_another_run(here: Path, command: Main) -> None:
    assert command("offline", "make", "run.toml", "--method.levels", 100, "--out", "more.safetensors")[0] == 0
    assert command("offline", "answer", "node-0", "more.safetensors", "--out", "more.answers")[0] == 0
    assert len({entry["run"] for entry in entries(Path("node-0"))}) == 2
    outcome = command(*COMBINE[:4], "more.answers", *COMBINE[5:])
    assert "more.answers responds to another file of queries" in refused(outcome)


def test_stopped_combine_resumes_with_the_same_command(
    here: Path, command: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(offline.RemoteRun, "run", stop)
        code, _, err = command(*COMBINE)
    assert (code, err) == (130, "fedstill: stopped; run the same command to resume\n")
    assert "holds another run or other files" in refused(command(*COMBINE, "--method.student.epochs", 5))
    assert "file not found: out/config.toml" in refused(command("run", "--resume", "out"))
    assert command(*COMBINE)[0] == 0
    assert "holds another run" in refused(command(*COMBINE))


def test_server_side_options_can_change_after_the_queries(here: Path, command: Main) -> None:
    code, _, err = command(*COMBINE, "--method.student.epochs", 3, "--student.model", "mlp:8")
    assert code == 0, err
    result = json.loads(Path("out/result.json").read_text())
    assert (result["iterations"], result["student"]["model"]) == (3, "mlp:8")
    for option, value, message in (
        (
            "--method.levels",
            100,
            "invalid method.levels = 100 (expected 200, as in the queries",
        ),
        ("--method.predictions", 1, "invalid method.predictions = 1 (expected 2, as in the queries"),
        ("--seed", 4, "invalid seed = 4 (expected 3, as in the queries"),
        ("--public.share", 0.3, "invalid public.share = 0.3 (expected 0.2, as in the queries"),
        ("--nodes.local.epochs", 99, "invalid nodes.local.epochs = 99.0 (expected 10.0, as in the queries"),
        ("--link.inputs", "int8", "invalid link.inputs = 'int8' (expected 'float32', as in the queries"),
    ):
        assert message in refused(command(*COMBINE[:-2], "other", option, value))
        assert not Path("other").exists()


@pytest.mark.parametrize(
    ("here_and_there", "message"),
    [
        (("levels = 200", "levels = 100"), "invalid method.levels = 100 (expected 200, as in the queries"),
        (("share = 0.2", "share = 0.3"), "does not hold the queries of this run"),
    ],
)
def test_rejects_a_configuration_that_differs_from_its_queries(
    here: Path, command: Main, here_and_there: tuple[str, str], message: str
) -> None:
    recipe = Path("queries.safetensors.toml")
    text = recipe.read_text()
    assert here_and_there[0] in text
    recipe.write_text(text.replace(*here_and_there))
    assert message in refused(command(*COMBINE))
    assert not Path("out").exists()


# --- refusals ------------------------------------------------------------------------------------


def corrupt(path: str) -> None:
    blob = bytearray(Path(path).read_bytes())
    blob[len(blob) // 2] ^= 1
    Path(path).write_bytes(blob)


def test_rejects_unknown_keys(here: Path, command: Main) -> None:
    Path("keys").mkdir()
    assert "invalid --node-keys = 'keys' (expected a folder" in refused(
        command(*COMBINE, "--node-keys", "keys")
    )
    for name in NAMES:
        shutil.copy("node-0/node.pub", f"keys/{name}.pub")
    error = refused(command(*COMBINE, "--node-keys", "keys"))
    assert f"{RESPONSES[1]} is signed by a key that is not expected here" in error
    words = ("offline", "answer", "node-0", "queries.safetensors", "--server-key")
    assert "signed by a key that is not expected" in refused(command(*words, "node-1/node.pub"))
    assert "is no public key" in refused(command(*words, "friend"))


def test_node_with_other_classes_or_inputs_releases_nothing(here: Path, command: Main) -> None:
    header, tensors = unpack(Path("queries.safetensors").read_bytes())
    header["plan"]["spec"]["classes"] = header["plan"]["spec"]["classes"][:-2]
    signed_files.write(
        Path("fewer.safetensors"), pack(header, tensors), signed_files.load_or_create_key(Path("server.key"))
    )
    # node-0 has examples of the classes that are removed here.
    assert {8, 9} & set(np.load("node-0/data.npz")["labels"].tolist())
    text = refused(command("offline", "answer", "node-0", "fewer.safetensors", "--out", "fewer-answers"))
    assert re.search(r"label|class", text), text
    assert len(list(Path("node-0/runs").glob("*/responses.safetensors"))) == 1  # only the earlier responses
    original = dict(np.load("node-0/data.npz"))
    shutil.rmtree("node-0/runs")
    Path(RESPONSES[0]).unlink()
    np.savez("node-0/data.npz", images=original["images"].repeat(2, axis=2), labels=original["labels"])
    assert "1 x 8 x 8" in refused(command("offline", "answer", "node-0", "queries.safetensors"))
    assert not Path(RESPONSES[0]).exists()


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ({"queries": ["count_labels"]}, "refuses query 'predict' by rule queries: count_labels"),
        ({"max_queries": 2}, "by rule max_queries: 2, and the file asks 3"),
    ],
)
def test_forbidden_queries_are_refused_before_training(
    here: Path, command: Main, policy: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("node-0/node.toml")
    path.write_text(tomli_w.dumps({**parse(path.read_text()), "policy": policy}))
    shutil.rmtree("node-0/runs")
    Path(RESPONSES[0]).unlink()
    monkeypatch.setattr(
        "fedstill.node.node_service.Session.train_locally",
        lambda *given: pytest.fail("trained before the refusal"),
    )
    assert rule in refused(command("offline", "answer", "node-0", "queries.safetensors"))
    assert not Path(RESPONSES[0]).exists()
    *_, last = entries(Path("node-0"))
    assert last["part"] == "refused"
    assert last["rule"] in rule


def test_nothing_is_released_after_the_owner_forbids_it(here: Path, command: Main) -> None:
    path = Path("node-0/node.toml")
    path.write_text(tomli_w.dumps({**parse(path.read_text()), "policy": {"queries": []}}))
    Path(RESPONSES[0]).unlink()
    text = refused(command("offline", "answer", "node-0", "queries.safetensors"))
    assert "refuses query 'count_labels' by rule queries: none" in text
    assert not Path(RESPONSES[0]).exists()
    *_, last = entries(Path("node-0"))
    assert (last["part"], last["rule"]) == ("refused", "queries: none")


def test_rejects_runs_that_cannot_use_files(here: Path, command: Main) -> None:
    for words, message in (
        (["run.toml", "--method.z_max", 0], "invalid method.z_max = 0.0 (expected a bound above 0"),
        (["run.toml", "--method.z_max", 0], "--method.z_max 20 (or no quantizer: --method.levels 0)"),
        (["digits-fediod"], "invalid method.name = 'fediod' (expected a one-round method"),
        (
            ["run.toml", "--link.secure_aggregation", "true"],
            "invalid link.secure_aggregation = True (expected false for files",
        ),
        (["run.toml", "--public.name", "none"], "there is no public data: pass --public.name"),
        (["run.toml", "--method.levels", 100], "queries.safetensors exists and holds other data"),
    ):
        assert message in refused(command("offline", "make", *words))
    assert "unknown command 'offline mak': did you mean 'offline make'?" in refused(command("offline", "mak"))
