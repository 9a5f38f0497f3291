"""The commands of ``fedstill node``, as used by an owner: processes, output and exit codes."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedstill.cli import node_check
from fedstill.node.admission import RunFacts
from tests.support.golden import Golden

Here = Callable[..., tuple[int, str, str]]

FOREST = """
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

def forest(shape, classes):
    x, y = load_digits(return_X_y=True)
    return RandomForestClassifier(5, random_state=0).fit(x[:200] / 8 - 1, y[:200])
"""


def fedstill(*words: object) -> tuple[int, str, str]:
    """Run ``fedstill node`` and return exit code, stdout and stderr."""
    command = [sys.executable, "-m", "fedstill", "node", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def edit_lines(folder: Path, *changes: tuple[str, str]) -> None:
    """Change lines of node.toml."""
    path = folder / "node.toml"
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(f"\n{old}\n") == 1, old
        text = text.replace(f"\n{old}\n", f"\n{new}\n")
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def here(command: Callable[..., tuple[int, str, str]]) -> Here:
    """Return a function that runs ``fedstill node`` in this process, which is faster."""
    return partial(command, "node")


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a node with 100 digits that responds to files, with `node init` and edited options."""
    folder = tmp_path_factory.mktemp("nodes") / "clinic"
    code, out, err = fedstill("init", folder)
    assert (code, err) == (0, "")
    assert "fedstill node check" in out
    digits = load_digits()
    np.savez(
        folder / "data.npz",
        images=(digits.images * 255 / 16).astype(np.uint8)[:100],
        labels=digits.target[:100],
    )
    (folder / "my_forest.py").write_text(FOREST, encoding="utf-8")
    edit_lines(folder, ("online = true", "online = false"))
    return folder


def test_check_prints_facts_and_decisions_for_each_method(clinic: Path) -> None:
    code, out, err = fedstill("check", clinic)
    assert (code, err) == (0, "")
    counts = np.bincount(load_digits().target[:100])
    for line in (
        f"node clinic, in {clinic}",
        "100 examples, 1 x 8 x 8, from data.npz",
        ", ".join(f"{label}: {count}" for label, count in enumerate(counts)),
        "small-cnn, 58,634 parameters, all trained here",
        "cpu, float32",
        "queries *; outputs only;",
        "none: the node responds to files of queries",
        "No faults.",
    ):
        assert line in out
    decisions = {
        line.split()[0]: line.split()[1]
        for line in out.splitlines()
        if line[2:3].strip() and len(line.split()) > 2
    }
    assert (decisions["fediod"], decisions["fedkd"], decisions["fedavg"], decisions["centralized"]) == (
        "no",
        "yes",
        "no",
        "no",
    )
    assert "the run queries connected nodes repeatedly" in " ".join(out.split())
    assert "refuses train (outputs_only" in " ".join(out.split())
    assert not (clinic / "runs").exists()


def test_check_reports_closed_hours(
    clinic: Path, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(clinic, tmp_path / "clinic")
    edit_lines(folder, ('hours = ""', 'hours = "00:00-00:01"'))
    output = (
        "At this hour the node refuses every query: hours: 00:00-00:01, by the clock of the node.\nNo faults."
    )
    for now, expected in ((time(0, 0, 30), False), (time(12), True)):
        monkeypatch.setattr(node_check, "RunFacts", partial(RunFacts, now=now))
        code, out, _ = here("check", folder)
        assert (code, output in out) == (0, expected)
        monkeypatch.undo()


def test_check_of_a_run_prints_each_query(clinic: Path, tmp_path: Path, here: Here) -> None:
    code, out, err = here("check", clinic, "digits-fediod")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "count_labels releases label counts" in lines
    assert "predict_logits x400 releases logits, critic, gradients" in lines
    assert any(line.startswith("It cannot take part: the run queries connected nodes") for line in lines)
    assert "It can take part." in here("check", clinic, "digits-fedkd")[1]
    run = tmp_path / "summed.toml"  # secure aggregation needs a key exchange between connected nodes
    run.write_text(
        'extends = "digits-fedkd"\nlink.secure_aggregation = true\nmethod.levels = 0\n', encoding="utf-8"
    )
    assert "It cannot take part: the run queries connected nodes" in here("check", clinic, run)[1]
    code, out, _ = here("check", clinic, "digits-fedavg")
    assert code == 0  # a refused query is no fault
    assert "train x20 refuses (outputs_only: parameters may not leave)" in " ".join(out.split())
    assert (
        "It cannot take part: it refuses train (outputs_only: parameters may not leave), "
        "and the run needs it." in out
    )


def test_check_names_features_and_differences_from_those_of_a_run(
    clinic: Path, tmp_path: Path, here: Here
) -> None:
    folder = shutil.copytree(clinic, tmp_path / "clinic")
    edit_lines(
        folder, ('backbone = ""', 'backbone = "random-conv:4"'), ('name = "small-cnn"', 'name = "linear"')
    )
    code, out, _ = here("check", folder)
    assert code == 0
    assert "64 of random-conv:4, digest " in out
    run = tmp_path / "run.toml"
    text = 'extends = "digits-fedkd"\nfeatures.backbone = "random-conv:4"\nmethod.z_max = 20.0\n'
    run.write_text(text, encoding="utf-8")
    assert "It can take part." in here("check", folder, run)[1]
    run.write_text(f'{text}features.normalize = "example"\n', encoding="utf-8")
    assert "It cannot take part: its features.normalize is 'none'" in here("check", folder, run)[1]
    text += 'features.normalize = "public"\n'
    run.write_text(f"{text}features.components = 6\n", encoding="utf-8")
    edit_lines(folder, ('normalize = "none"', 'normalize = "public"'), ("components = 0", "components = 5"))
    code, out, _ = here("check", folder, run)
    assert "5 components of 64 of random-conv:4, digest " in out
    assert "It cannot take part: its features.components is 5" in out
    assert "no features.backbone" in here("check", clinic, run)[1]
    edit_lines(folder, ('backbone = "random-conv:4"', 'backbone = "timm:resnet18"'))
    code, _, err = here("check", folder)
    assert code == 2
    assert "features.weights" in err


def test_check_without_data_does_not_decide(clinic: Path, tmp_path: Path, here: Here) -> None:
    damaged = shutil.copytree(clinic, tmp_path / "damaged")
    (damaged / "data.npz").unlink()
    code, out, err = here("check", damaged, "digits-fedkd")
    assert code == 2
    assert "data.npz" in err
    assert "It can take part." not in out
    assert "It is not known if it can take part. Fix the faults" in out
    code, out, err = here("check", damaged)
    assert (code, "data.npz" in err) == (2, True)
    assert "In a run of each method" not in out


def test_forest_releases_predictions_and_refuses_gradients(clinic: Path, tmp_path: Path, here: Here) -> None:
    folder = tmp_path / "forest"
    folder.mkdir()
    for file in clinic.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "secret").chmod(0o600)
    edit_lines(
        folder,
        ('name = "small-cnn"', 'name = "my_forest:forest"'),
        ("max_queries = 0", "max_queries = 300"),
    )
    code, out, err = here("check", folder, "digits-fediod")
    assert (code, err) == (0, "")
    assert "my_forest:forest, RandomForestClassifier, probabilities: it only predicts" in " ".join(
        out.split()
    )
    assert "at most 300 queries" in " ".join(out.split())
    refused = "It cannot take part: it refuses predict_logits (model: it predicts only, no gradient passes"
    assert refused in out
    code, out, err = here("check", folder, "digits-fedkd")
    assert (code, err) == (0, "")
    assert "It can take part." in out
    edit_lines(folder, ("max_queries = 300", "max_queries = 1"))
    assert (
        "It cannot take part: it allows at most 1 queries, and the run sends "
        in here("check", folder, "digits-fedkd")[1]
    )


def test_check_prints_all_faults_with_exit_code_2(tmp_path: Path, here: Here) -> None:
    folder = tmp_path / "faulty"
    here("init", folder, "--name", "faulty")
    edit_lines(
        folder,
        ('path = "data.npz"', 'path = "scans.npz"\nflavour = 1'),
        ('name = "small-cnn"', 'name = "small-cn"'),
        ("epochs = 30.0", "epochs = -3"),
        ('device = "cpu"', 'device = "abacus"'),
    )
    # in a new process and in this one
    for code, out, err in (fedstill("check", folder), here("check", folder, "digits-fediod")):
        assert code == 2
        assert "No faults" not in out
        first, *faults = err.splitlines()
        assert first == f"fedstill: 6 faults in {folder}:"
        assert len(faults) == 6
        for wanted in (
            "unknown key 'data.flavour'",
            "invalid local.epochs = -3.0 (expected 0 or more",
            f"data.path 'scans.npz': file not found: {folder / 'scans.npz'}",
            "invalid model.name = 'small-cn'",
            "invalid compute.device = 'abacus'",
        ):
            assert sum(wanted in fault for fault in faults) == 1
        assert ("holds no startup kit" in faults[-1]) or ("FLARE is not installed" in faults[-1])
    code, out, err = here("start", folder)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == f"fedstill: 6 faults in {folder}:"


MISTAKES = (
    "chek",
    "check a b c",
    "check a --quick",
    "check no-such-folder digit-fediod",
    "check no-such-folder",
    "start no-such-folder",
    "init no-such-folder --name 'a b'",
)


def test_owner_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Here, golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = []
    for words in MISTAKES:
        code, out, err = here(*shlex.split(words))
        assert (code, out) == (2, "")
        assert err.startswith("fedstill: ")
        assert len(err.splitlines()) == 1
        lines.append(f"$ fedstill node {words}\n{err}")
    golden("errors-of-node", "".join(lines))
    assert list(tmp_path.iterdir()) == []


def test_offline_node_does_not_start(clinic: Path, here: Here) -> None:
    code, out, err = here("start", clinic)
    assert (code, out) == (2, "")
    assert err.startswith("fedstill: invalid online = False (expected true to join a federation")


def test_start_prints_server_and_runs_the_node(
    clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Here
) -> None:
    pytest.importorskip("nvflare")
    from fedstill.federation import flare_site, provision

    provision.provision(tmp_path / "federation", "localhost", ["clinic", "other"], port=8123)
    folder = tmp_path / "clinic"
    shutil.copytree(clinic, folder)
    shutil.copytree(tmp_path / "federation" / "nodes" / "clinic", folder / "kit")
    edit_lines(folder, ("online = false", "online = true"))
    was = []
    monkeypatch.setattr(flare_site, "run", lambda this: was.append((this.role, this.folder)) or 3)
    code, out, err = here("start", folder)
    assert (code, err) == (3, "")  # the exit code of FLARE
    assert was == [("client", folder)]
    assert out == f"node clinic joins localhost:8123; Ctrl+C ends it. Its log: {folder / 'node.log'}\n"
    assert "dials out to localhost:8123; its certificate is valid until" in here("check", folder)[1]
    shutil.rmtree(folder / "kit")
    shutil.copytree(tmp_path / "federation" / "nodes" / "other", folder / "kit")
    code, out, err = here("start", folder)
    assert (code, out) == (2, "")
    assert err == "fedstill: invalid name = 'clinic' (expected 'other', as the startup kit has it)\n"


def test_status_prints_if_node_runs_and_server_is_reachable(tmp_path: Path, here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        startup = tmp_path / "kit" / "startup"
        startup.mkdir(parents=True)
        kit = {"servers": [{"service": {"target": address}}]}
        (startup / "fed_client.json").write_text(json.dumps(kit), encoding="utf-8")
        code, out, _ = here("status", tmp_path)
        assert (code, out) == (1, f"The node does not run on this machine: fedstill node start {tmp_path}\n")
        with (tmp_path / "node.pid").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write("4711")
            lock.flush()
            code, out, _ = here("status", tmp_path)
            assert code == 0
            assert f"The node runs as process 4711; {address} is reachable." in out
            server.close()
            code, out, _ = here("status", tmp_path)
            assert (code, f"{address} is not reachable." in out) == (1, True)


def test_help_lists_all_commands(here: Here) -> None:
    page = here("--help")[1]
    assert page == here()[1]
    for command in ("init", "check", "start", "status", "requests", "approve", "reject", "log"):
        assert f"│ {command} " in page
        assert re.match(rf"Usage: fedstill node {command} .*FOLDER", here(command, "--help")[1])


def test_data_of_unknown_task_are_no_fault(scans: Path, tmp_path: Path, here: Here) -> None:
    folder = scans
    code, out, err = here("check", folder)
    assert (code, err) == (1, "")
    assert "not images of classes, name the run, which determines the task" in " ".join(out.split())
    assert "has no array 'labels', only images, masks" in " ".join(out.split())
    assert "Not checked: " in out
    assert "No faults." not in out
    assert "In a run of each method" not in out
    run = tmp_path / "run.toml"  # label maps; the data of the node are used
    run.write_text(
        f'method.name = "fedkd"\ntask.name = "segmentation"\ndata.name = "{folder / "data.npz"}"\n'
        'nodes.models = ["unet:8"]\nstudent.model = "unet:8"\n',
        encoding="utf-8",
    )
    code, out, err = here("check", folder, run)
    assert (code, err) == (0, "")
    assert "3 examples, 1 x 16 x 16, from data.npz" in out
    assert "background: 93.8%, foreground: 6.25% of all pixels" in out


@pytest.fixture
def scans(tmp_path: Path, here: Here) -> Path:
    """Create a node with three masked images of 16 x 16 pixels."""
    folder = tmp_path / "scans"
    here("init", folder)
    edit_lines(folder, ("online = true", "online = false"), ('name = "small-cnn"', 'name = "unet:8"'))
    images = np.zeros((3, 16, 16), dtype=np.uint8)
    np.savez(folder / "data.npz", images=images, masks=images + np.eye(16, dtype=np.uint8))
    return folder


RUN = """
method.name = "fediod-maps"
task.name = "segmentation"
data.name = "/nowhere/else.npz"
nodes.models = ["unet:8"]
student.model = "unet:8"
"""


def test_check_uses_the_task_of_a_run_whose_data_are_elsewhere(
    scans: Path, tmp_path: Path, here: Here
) -> None:
    folder, run = scans, tmp_path / "run.toml"
    run.write_text(RUN, encoding="utf-8")
    code, out, err = here("check", folder, run)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "shape and classes are those of yours" in text
    assert "3 examples, 1 x 16 x 16, from data.npz" in text
    assert "background: 93.8%, foreground: 6.25% of all pixels" in text
    assert "send_label_maps refuses (" in text
    assert "It cannot take part: it refuses" in text
    assert "No faults." in text


def test_check_skips_data_whose_spec_is_at_the_server(scans: Path, tmp_path: Path, here: Here) -> None:
    folder, run = scans, tmp_path / "run.toml"
    edit_lines(folder, ("fit = false", "fit = true"))  # to a size known only to the server
    run.write_text(RUN, encoding="utf-8")
    code, out, err = here("check", folder, run)
    assert (code, err) == (1, "")
    text = " ".join(out.split())
    assert "shape and classes are not known" in text
    assert "send_label_maps refuses (" in text
    assert "It cannot take part: it refuses" in text
    assert "Not checked: data 'data.npz': only a run determines its data spec for task segmentation" in text
    assert "No faults." not in text


def test_node_that_allows_sums_only_joins_secure_aggregation(scans: Path, tmp_path: Path, here: Here) -> None:
    folder, run = scans, tmp_path / "run.toml"
    edit_lines(folder, ("sums_only = false", "sums_only = true"))
    config_text = (
        'method.name = "fedavg"\ntask.name = "segmentation"\ndata.name = "/nowhere/else.npz"\n'
        'nodes.models = ["unet:8"]\nstudent.model = "unet:8"\n'
    )
    for sums, refused in (("false", True), ("true", False)):
        run.write_text(f"{config_text}link.secure_aggregation = {sums}\n", encoding="utf-8")
        _, out, _ = here("check", folder, run)
        assert ("refuses (sums_only: " in out) is refused
        assert "outputs_only: parameters may not leave" in out or refused  # refused by another rule
