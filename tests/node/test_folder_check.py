"""All files in a node's folder are private to its owner from their creation on."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedstill.cli.main import main
from fedstill.federation import offline_files
from fedstill.federation.offline_files import write_queries
from fedstill.federation.signed_files import load_or_create_key
from fedstill.node import owner_folder
from fedstill.node.folder_check import readable_files_warning
from fedstill.node.node_service import NodeService
from fedstill.protocol.run_plan import RunPlan
from fedstill.runs.offline import build_offline_queries
from fedstill.runs.remote_run import RemoteRun
from fedstill.runs.spec import read_toml
from tests.support.links import Loopback
from tests.support.node_services import FEDIOD, NODE, SPEC, Clinic
from tests.support.processes import FORKING

RUN = """
[data]
name = "digits"
[public]
name = "noise"
limit = 32
[method]
name = "fedkd"
z_max = 20.0
student.epochs = 2
[student]
model = "mlp:8"
"""


def run_node(home: Path, umask: int) -> None:
    """Respond to a file of queries and take part in a live run, in a process with the given umask.

    Functions that change permissions are removed, so files must be created with the right ones.
    """
    folder, permissions = home / "clinic", {}
    os.umask(umask)
    for name in ("chmod", "fchmod", "umask"):
        setattr(os, name, None)
    owner_folder.init_folder(folder)
    assert stat.S_IMODE((folder / "node.toml").stat().st_mode) == 0o600
    draw = np.random.default_rng(0)
    images = draw.uniform(0, 1, (40, 1, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", images=images, labels=draw.integers(0, 10, 40))
    lines = ['name = "clinic"', "online = false", "[model]", 'name = "mlp:8"', "[local]", "epochs = 4"]
    (folder / "node.toml").write_text("\n".join([*lines, "[data]", 'path = "data.npz"']))
    config = read_toml(RUN)

    def record_modes(*given: object) -> None:
        for path in [folder, *folder.rglob("*")]:
            if path.name != "data.npz":  # created by the owner
                try:
                    mode = path.stat().st_mode
                except FileNotFoundError:
                    continue
                wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
                permissions[str(path.relative_to(folder))] = [stat.S_IMODE(mode), wanted]

    write_queries(home / "queries", build_offline_queries(config), load_or_create_key(home / "server.key"))
    offline_files.answer_queries(folder, home / "queries", folder / "answers", report=record_modes)
    record_modes()
    host = NodeService(folder)

    def serve(message: bytes) -> bytes:
        record_modes()
        return host.serve(message)

    (home / "out").mkdir()
    RemoteRun(config, Loopback({"clinic": serve}), "live").run(home / "out")
    record_modes()
    (home / "seen.json").write_text(json.dumps(permissions))


@pytest.mark.parametrize("umask", [0o022, 0o000], ids=oct)
def test_all_files_are_private_to_owner(tmp_path: Path, umask: int) -> None:
    process = FORKING.Process(target=run_node, args=(tmp_path, umask))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    permissions = json.loads((tmp_path / "seen.json").read_text())
    assert {path: oct(mode) for path, (mode, wanted) in permissions.items() if mode != wanted} == {}
    names = {Path(path).name for path in permissions}
    assert names >= {
        *("node.toml", "secret", "node.key", "node.pub", "answers", "answers.sig", "salt", "public", "runs"),
        *("audit.sqlite", "audit.sqlite-wal", "audit.sqlite-shm", "audit.sqlite.head"),
        *("plan.json", "training.safetensors", "responses.safetensors"),
    }
    assert any(name.startswith("checkpoint-") for name in names)
    assert any(Path(path).parent.name == "public" for path in permissions)
    assert readable_files_warning(tmp_path / "clinic", tmp_path / "clinic/audit.sqlite") is None


def test_open_files_are_reported_with_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a clinic"
    owner_folder.init_folder(folder, "clinic")
    (folder / "runs/one").mkdir(parents=True, mode=0o700)
    for name in ("runs/one/salt", "audit.sqlite", "audit.sqlite.head", "data.npz"):
        (folder / name).write_text("")
        (folder / name).chmod(0o640)
    (folder / "runs").chmod(0o700)
    audit = folder / "audit.sqlite"
    assert f"{folder}/, " not in (readable_files_warning(folder, audit) or "")
    folder.chmod(0o755)
    (line,) = [line for line in checked(folder, capsys) if line.startswith("open to others")]
    assert f"machine: {folder}/, runs, audit.sqlite, audit.sqlite.head; chmod go= '{folder}' && " in line
    os.truncate(folder / "secret", 0)  # a faulty secret does not hide the warning
    assert line in checked(folder, capsys)
    subprocess.run(line.partition("; ")[2], shell=True, check=True)
    assert not any(line.startswith("open to others") for line in checked(folder, capsys))
    assert (folder / "data.npz").stat().st_mode & 0o777 == 0o640  # the owner decides about this file


def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of ``fedstill node check``, which finds other faults here."""
    with pytest.raises(SystemExit):
        main(["node", "check", str(folder)])
    return capsys.readouterr().out.splitlines()


def test_augmentation_that_does_not_suit_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The check says so, and a run does not begin."""
    shape = (1, 8, 12)
    clinic = Clinic(tmp_path / "clinic", plan=RunPlan("one", FEDIOD, replace(SPEC, shape=shape)))
    images = np.full((40, *shape), 0.25, dtype=np.float32)
    np.savez(clinic.folder / "data.npz", images=images, labels=np.arange(40) % 10)
    (clinic.folder / "node.toml").write_text(NODE.replace("batch = 8", 'batch = 8\naugment = "turn"'))
    with pytest.raises(SystemExit):
        main(["node", "check", str(clinic.folder)])
    assert "invalid local.augment = 'turn' (expected shift-flip or less" in capsys.readouterr().err
    clinic.again()
    assert clinic.say("join", plan=clinic.plan.to_dict())["kind"] == "NodeDataError"
    assert "local.augment" in caplog.text


@pytest.mark.parametrize(
    ("mechanism", "isolates", "warns"),
    [("dp-sgd", "false", True), ("dp-sgd", "true", False), ("none", "false", False)],
)
def test_check_warns_of_rounding_in_dp_sgd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mechanism: str, isolates: str, warns: bool
) -> None:
    folder = tmp_path / "clinic"
    owner_folder.init_folder(folder, "clinic")
    file = folder / "node.toml"
    text = re.sub(r"(?m)^isolate_rounding = .*$", f"isolate_rounding = {isolates}", file.read_text())
    file.write_text(re.sub(r"(?m)^mechanism = .*$", f'mechanism = "{mechanism}"', text))
    assert f'mechanism = "{mechanism}"' in file.read_text()
    lines = checked(folder, capsys)
    assert any("isolate_rounding" in line for line in lines) == warns
