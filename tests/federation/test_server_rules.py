"""Rules of a deployed server for the admin's runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstill.core.config_tables import parse_toml
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.federation import server_rules
from fedstill.federation.server_rules import FILE, ServerRules
from fedstill.runs import presets
from fedstill.runs.deployment import server_config_toml, write_run_job
from fedstill.runs.flare_server import ServerProgram
from fedstill.runs.spec import from_dict, load, read_toml
from tests.support.errors import raises_invalid

OWN = "class Boom:\n    open({!r}, 'w').close()\n"


def stopped(program: ServerProgram, server: Path) -> str:
    """Return the reason that a job's run stopped, from a server's folder."""
    program._run_in_folder(server / "runs" / program.run_name, server / "kept")
    return str(json.loads((server / "kept/stopped.json").read_text())["text"])


def test_server_refuses_plugins_of_run(tmp_path: Path) -> None:
    (tmp_path / "brought").mkdir()
    (tmp_path / "brought" / "boom_of_a_job.py").write_text(OWN.format(str(tmp_path / "ran")))
    named = f"plugins = [{str(tmp_path / 'brought')!r}]\n[method]\nname = 'boom_of_a_job:Boom'\n"
    assert "invalid plugins = [" in stopped(ServerProgram(named, "one"), tmp_path / "server")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["method", "task", "data", "public", "student"])
def test_server_refuses_unlisted_modules(where: str, tmp_path: Path) -> None:
    key = "model" if where == "student" else "name"
    text = f"[method]\nname = 'fedkd'\n[{where}]\n{key} = 'os:system'\n"
    if where == "method":
        text = "[method]\nname = 'os:system'\n"
    result = stopped(ServerProgram(text, "one"), tmp_path / "server")
    assert result.startswith(f"invalid {where}.{key} = 'os:system'")
    assert str(tmp_path / "server" / FILE) in result


def test_server_refuses_unlisted_encoders(tmp_path: Path) -> None:
    text = "[method]\nname = 'fedavg'\n[student]\nmodel = 'unet:os:system'\n"
    result = stopped(ServerProgram(text, "one"), tmp_path / "server")
    assert result.startswith("invalid student.model = 'unet:os:system'")
    assert str(tmp_path / "server" / FILE) in result
    rules = server_rules.rules_allowing_run({"student": {"model": "unet:os:system"}})
    assert rules.modules == ("unet:os:system",)
    assert server_rules.rules_allowing_run({"student": {"model": "unet:timm:x"}}).modules == ()


def test_server_allows_listed_modules(tmp_path: Path) -> None:
    server, code = tmp_path / "server", tmp_path / "code"
    code.mkdir()
    (code / "listed_at_server.py").write_text(OWN.format(str(tmp_path / "ran")))
    (server / "runs").mkdir(parents=True)
    (server / FILE).write_text("plugins = ['../code']\nmodules = ['listed_at_server:Boom']\n")
    result = stopped(ServerProgram("[method]\nname = 'listed_at_server:Boom'\n", "one"), server)
    assert result.startswith("invalid method")  # allowed, although it is no method
    assert FILE not in result
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("run", ["../provision", "/etc", "a/b", "..", "", "x" * 101, "a\n"])
def test_rejects_run_names_with_paths(run: str) -> None:
    with raises_invalid("run", run, "100"):
        ServerProgram("", run)


def test_reads_files_from_allowed_folders_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("study", "ledgers", "usual", "here"):
        (tmp_path / folder).mkdir()
    (tmp_path / "here" / "secret.npz").touch()
    (tmp_path / "study" / "link").symlink_to(tmp_path / "ledgers")
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path / "usual"))
    monkeypatch.chdir(tmp_path / "here")
    rules, file = ServerRules(data=("../study",)), tmp_path / "server" / FILE

    def refused(part: str, key: str, text: str) -> bool:
        try:
            rules.require_allowed({"name": "here", part: {key: text}}, file)
        except ArgumentError as error:
            return error.name == f"{part}.{key}"
        return False

    study = tmp_path / "study"
    inside = [str(study), str(study / "a.npz"), str(tmp_path / "usual"), "digits", "a.npz", "kg/m2"]
    outside = [str(tmp_path / "ledgers"), str(study / "../ledgers/a.npz"), str(study / "link/a.npz")]
    outside += [str(tmp_path / "study2"), "../ledgers", "~/a.npz", "secret.npz", "x/../../ledgers"]
    for part, key in (("data", "root"), ("public", "name"), ("data", "schema")):
        assert not any(refused(part, key, text) for text in (inside if key != "root" else inside[:3]))
        assert all(refused(part, key, text) for text in outside)
    monkeypatch.setenv("HOME", str(tmp_path / "ledgers"))
    long = "/" + "./" * 2100 + str(tmp_path / "ledgers")[1:]
    tricks = ["./~/a.npz", ".//~root/a.npz", "~", long, "/" * 5000 + "etc", ".", "./.", "/\0", "~nobody/x"]
    for key in ("name", "root", "schema"):
        assert [text for text in tricks if not refused("data", key, text)] == []
    assert [text for text in tricks if not refused("student", "model", f"hf:{text}")] == []
    assert [text for text in tricks[:6] if not refused("method", "weights", text)] == [
        "."
    ]  # is no option for a file
    assert refused("data", "root", "new")  # a download could write there
    assert refused("student", "model", f"hf:{tmp_path / 'ledgers'}")
    assert refused("student", "model", "hf:secret.npz")
    assert not refused("student", "model", f"hf:{study / 'vit'}")
    (tmp_path / "here" / "digits").mkdir()  # the name of a data set is no folder
    assert not refused("data", "name", "digits")
    assert refused("data", "root", "digits")


def test_downloads_need_permission(tmp_path: Path) -> None:
    hub = {"student": {"model": "hf:distilbert-base-uncased"}}
    data = {"data": {"name": "cifar10", "download": True}}
    for table in (hub, data, {"public": {"download": True}}, {"data": {"vocabulary": "hf:gpt2"}}):
        with pytest.raises(ArgumentError, match="downloads = false"):
            ServerRules().require_allowed(table, tmp_path / FILE)
        ServerRules(downloads=True).require_allowed(table, tmp_path / FILE)
    with pytest.raises(ArgumentError, match="`modules`"):  # only for networks is hf: a prefix
        ServerRules(downloads=True).require_allowed({"method": {"name": "hf:Boom"}}, tmp_path / FILE)


@pytest.mark.parametrize("preset", presets.names())
def test_presets_need_no_rules(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ServerRules().require_allowed(parse_toml(server_config_toml(load(preset))), tmp_path / FILE)


def test_server_refuses_extends(tmp_path: Path) -> None:
    assert "extends" in stopped(ServerProgram("extends = '/etc/x.toml'", "one"), tmp_path / "server")


def test_rejects_unknown_rules(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("folders = ['/']\n")
    with pytest.raises(FedstillError, match=f"{FILE}.*folders"):
        server_rules.read_server_rules(tmp_path)
    (tmp_path / FILE).unlink()
    assert server_rules.read_server_rules(tmp_path) == ServerRules()


def test_rules_for_run_allow_its_resources(tmp_path: Path) -> None:
    plain = server_config_toml(from_dict({"method": {"name": "fediod"}, "name": "digits-fediod"}))
    job = write_run_job(read_toml(plain), "one", ["a"], ["a"], tmp_path / "job")
    result = json.loads((job / "app/config/config_fed_server.json").read_text())["components"][0]["args"]
    assert result["config"] == plain
    table = {"method": {"name": "fedkd"}, "data": {"root": str(tmp_path)}, "track": ["a:B"]}
    rules = server_rules.rules_allowing_run({**table, "plugins": [str(tmp_path)]})
    assert rules == ServerRules(
        (str(tmp_path.resolve()),), ("a:B",), (str(tmp_path.resolve()),), downloads=True
    )
    rules.require_allowed(table, tmp_path / FILE)
    with pytest.raises(ArgumentError):
        ServerRules().require_allowed(table, tmp_path / FILE)


def test_server_refuses_custom_backbones_and_outside_files(tmp_path: Path) -> None:
    allowed, file = tmp_path / "allowed", tmp_path / "server" / FILE
    allowed.mkdir()
    rules = ServerRules(data=(str(allowed),))
    for backbone, weights in [("timm:resnet18", str(allowed / "w.safetensors")), (f"hf:{allowed}", "")]:
        rules.require_allowed({"features": {"backbone": backbone, "weights": weights}}, file)
    for backbone, weights in [
        ("os:system", ""),
        (f"hf:{tmp_path}", ""),
        (str(tmp_path / "x.onnx"), ""),
        ("timm:resnet18", str(tmp_path / "w.safetensors")),
    ]:
        with pytest.raises(ArgumentError, match=r"features\.(backbone|weights)"):
            rules.require_allowed({"features": {"backbone": backbone, "weights": weights}}, file)
