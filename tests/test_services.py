"""Containers and services of the examples: valid commands, and only necessary mounts."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from fedstill.cli import main as cli

ROOT = Path(__file__).parents[1]
DOCKER, SYSTEMD = ROOT / "examples" / "docker", ROOT / "examples" / "systemd"
README = (DOCKER / "README.md").read_text(encoding="utf-8")
UNITS = sorted(SYSTEMD.glob("*.service"))
NODES = ("north", "east", "west")
KEYS = {  # keys of a service in the Compose specification that are used here
    "cap_drop", "command", "healthcheck", "image", "init", "networks", "pids_limit", "ports", "profiles",
    "read_only", "restart", "security_opt", "stop_grace_period", "tmpfs", "user", "volumes", "working_dir",
}  # fmt: skip


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    services: dict[str, Any] = pytest.importorskip("yaml").safe_load((DOCKER / "compose.yaml").read_text())
    return services


def check_command(words: list[str]) -> None:
    """Check that fedstill accepts a command, except ``run`` (tested below) and ``attack``."""
    if words[0] in ("run", "attack"):
        return
    cli.bind(words)


def test_containers_run_existing_commands(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        check_command(service["command"])
        kind, *words = service.get("healthcheck", {"test": ["CMD", "fedstill", *service["command"]]})["test"]
        assert kind == "CMD"
        if words[0] == "python":
            compile(words[2], "healthcheck", "exec")
        else:
            assert words[0] == "fedstill"
            check_command(words[1:])
    assert 'ENTRYPOINT ["fedstill"]' in (DOCKER / "Dockerfile").read_text()


def test_docker_page_shows_existing_commands(compose: dict[str, Any]) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    typed = [line[1:] for line in lines if line[:1] == ["fedstill"]]
    inside = [line for line in lines if line[:2] == ["docker", "compose"]]
    executed = [line[5:] for line in inside if line[2] == "exec"]
    single = [line[5:] for line in inside if line[2:4] == ["run", "--rm"] and len(line) > 5]
    for words in (*typed, *executed, *single):
        check_command(words)
    assert (len(typed), len(executed), len(single)) == (2, 5, 1)
    assert {name for line in inside for name in line if name in compose["services"]} == {
        "north",
        "server",
        "run",
    }


def test_compliance_page_shows_existing_commands() -> None:
    page = (ROOT / "docs" / "compliance.md").read_text(encoding="utf-8")
    typed = [shlex.split(command) for command in re.findall(r"`fedstill ([^`]+)`", page)]
    for words in typed:
        check_command(words)
    named = {tuple(words[:2]) for words in typed}
    assert named >= {("audit", "export"), ("audit", "verify"), ("node", "approve"), ("node", "log")}


def test_run_of_docker_page_starts(
    compose: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("nvflare")
    (text,) = re.findall(r"```toml\n(# university/fediod.toml\n.*?)```", README, re.DOTALL)
    (tmp_path / "fediod.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(compose["services"]["run"]["command"])
    stderr = capsys.readouterr().err
    assert "/admin" in stderr, "options and file are valid; the kit is missing"
    assert "startup kit" in stderr


def test_container_mounts_only_its_own_folders(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert set(service) <= KEYS, f"{name} has a key that Compose may not know"
        assert (service["user"], service["read_only"], service["cap_drop"]) == ("10001:10001", True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        binds = [volume for volume in service["volumes"] if volume["type"] == "bind"]
        assert all(volume["bind"] == {"create_host_path": False} for volume in binds), (
            "missing host folders are not created as root"
        )
        writes = {volume["source"] for volume in binds if not volume.get("read_only")}
        reads = {volume["source"] for volume in binds if volume.get("read_only")}
        if name in NODES:
            assert service["networks"] == [name]
            assert "ports" not in service
            assert writes == {f"./{name}/node"}
            own = {f"./{name}/node/{part}" for part in ("node.toml", "secret", "kit/startup")}
            assert reads == {*own, f"./{name}/data"}
    assert set(compose["services"]) == {*NODES, "server", "run"}
    hidden = {v["target"] for v in compose["services"]["server"]["volumes"] if v["type"] == "tmpfs"}
    assert hidden == {f"/federation/{part}" for part in ("provision", "admin", "nodes")}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_fedstill_unprivileged(path: Path) -> None:
    unit = ConfigParser(strict=False, interpolation=None, allow_no_value=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"].replace("%i", "north"))
    assert program == "/opt/fedstill/bin/fedstill"
    check_command(words)
    assert (service["User"], service["CapabilityBoundingSet"]) == ("fedstill", "")
    assert (service["NoNewPrivileges"], service["ProtectSystem"]) == ("true", "strict")
    paths = [part.lstrip("-") for part in service.get("ReadOnlyPaths", "").split()]
    if "@" in path.name:
        assert {part.rpartition("%i/")[2] for part in paths} == {"node.toml", "secret", "kit/startup"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    paths = [shutil.copy(path, tmp_path / path.name.replace("@", "@north")) for path in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
    faults = [line for line in done.stderr.splitlines() if "fedstill is not executable" not in line]
    assert not [line for line in faults if "fedstill" in line]
