"""Runs whose nodes are processes of their own: rehearsed on this machine, or at a deployed federation.

A rehearsal is a simulation in everything but the place: data, split, models and policies come from one
configuration. They are written into one folder a node, and from there on everything goes the way of a real
federation. At the end, since it is a rehearsal, the nodes' folders are looked into for the figures that
only a simulation knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.torch import save_file

from fedstill.config import NodesConfig, RunConfig, as_table, to_dict
from fedstill.data.private import PrivateConfig
from fedstill.data.splits import SplitConfig
from fedstill.errors import DeployError, FedstillError
from fedstill.experiment import Experiment
from fedstill.federation import site
from fedstill.federation.admin import Admin
from fedstill.federation.flare import NODES, PROGRESS, RUNS, STOPPED, natural
from fedstill.federation.provision import provision, require_flare, write_job
from fedstill.node.owner import ComputeConfig, NodeFile, OwnModelConfig
from fedstill.progress import following
from fedstill.records import write_text
from fedstill.state import load_state

RUN = "live.json"  # in the run's folder: its name among the nodes
ENGINES = ("flare", "flare-poc")
UP = 60.0  # seconds for the processes of a rehearsal to find each other


def rehearse(config: RunConfig[Any], experiment: Experiment, out: Path, progress: bool) -> dict[str, Any]:
    """Run a simulation's nodes as processes of their own on this machine.

    Args:
        config: the run, with ``engine.name`` ``flare`` or ``flare-poc``.
        experiment: made of it.
        out: the run's folder; everything of the federation lies in ``out/federation``.
        progress: show bars on a terminal.

    Returns:
        The figures, as an experiment's own run gives them, with what the link cost.

    Raises:
        FedstillError: FLARE is missing, or a node or the server stopped; the run can go on.
    """
    require_flare()
    home = out / "federation"
    names = [node.name for node in experiment.nodes]
    run = run_name(config, out)
    if not (home / "nodes").exists():
        part = home / "nodes.part"
        shutil.rmtree(part, ignore_errors=True)
        write_nodes(config, experiment, part)
        part.rename(home / "nodes")
    started = time.monotonic()
    served = home / "runs" / run
    if not (served / "result.json").exists():
        with following(served / PROGRESS, progress):
            if config.engine.name == "flare":
                _simulate(config, run, names, home)
            else:
                _deploy_here(config, run, names, home)
        _raise_if_stopped(served)
    seconds = time.monotonic() - started
    return _looked_into(experiment, out, served, home / "nodes", run, seconds)


def submit(config: RunConfig[Any], out: Path, progress: bool) -> dict[str, Any]:
    """Run at a deployed federation, with the nodes that are there; data, models and policies are theirs.

    Args:
        config: the run; ``engine.startup_kit`` is an admin's kit.
        out: the run's folder, into which all results are fetched.
        progress: show on a terminal what goes on.

    Returns:
        What the server found out, as ``result.json`` holds it.

    Raises:
        FedstillError: the server cannot be reached, refuses or stopped; the run can go on.
    """
    run, kit = run_name(config, out), Path(config.engine.startup_kit)
    if config.nodes != NodesConfig() or config.split != SplitConfig():
        print("What this run says of nodes and split is not used: these are the nodes' own.", file=sys.stderr)
    with Admin(kit) as admin:
        names = sorted(admin.nodes(), key=natural)
        if not names:
            raise DeployError(f"no node is connected to the server at {admin.server}")
        least = config.link.least(len(names))
        job_folder = out / "job"
        shutil.rmtree(job_folder, ignore_errors=True)
        told = {"config": servers_part(config), "run": run}
        job = _job_at_work(admin, out)
        if job is None:
            fewest = 0 if least == len(names) else least
            job = admin.submit(write_job(job_folder, names, told, name=config.name, fewest=fewest))
            write_text(out / RUN, json.dumps({"run": run, "job": job}) + "\n")
            print(f"Job {job} with {', '.join(names)}.", file=sys.stderr)
        status = admin.wait(job, float("inf"), every=1.0)
        fetched = admin.download(job, out / "fetched")
    found = next(
        iter(sorted(fetched.rglob(f"fedstill/{STOPPED}")) + sorted(fetched.rglob("result.json"))), None
    )
    if found is None:
        raise DeployError(f"job {job} ended as {status} and left no result: the server's log says why")
    _raise_if_stopped(found.parent)
    for path in found.parent.iterdir():
        if path.is_file() and path.name != "config.toml":
            shutil.copy2(path, out / path.name)
    shutil.rmtree(out / "fetched")
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    (out / "result.json").unlink()  # until the report's caller writes it, whole
    return result


def _job_at_work(admin: Admin, out: Path) -> str | None:
    """The job of this run that is still at work at the server, though nobody waited for it."""
    job = json.loads((out / RUN).read_text(encoding="utf-8")).get("job")
    if job is None or admin.status(str(job)).startswith("FINISHED"):
        return None
    print(f"Job {job} is still at work.", file=sys.stderr)
    return str(job)


def servers_part(config: RunConfig[Any]) -> str:
    """What of a run its server has to know, as TOML: nothing about nodes, and whole paths."""
    table = to_dict(config)
    for theirs in ("nodes", "split", "paper"):
        table.pop(theirs, None)
    table["engine"]["startup_kit"] = ""
    for part, key in (("data", "name"), ("data", "root"), ("public", "name"), ("public", "root")):
        given = table[part][key]
        if given and Path(given).exists():
            table[part][key] = str(Path(given).resolve())
    return tomli_w.dumps(table)


def run_name(config: RunConfig[Any], out: Path) -> str:
    """The name by which nodes know a run, made up once and kept in the run's folder."""
    path = out / RUN
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["run"])
    name = f"{config.name[:80]}-{config.seed}-{secrets.token_hex(4)}"
    write_text(path, json.dumps({"run": name}) + "\n")
    return name


# --- a rehearsal's nodes ------------------------------------------------------------------------------


def write_nodes(config: RunConfig[Any], experiment: Experiment, folder: Path) -> None:
    """One folder a node, as its owner would have it: node.toml, data, first weights, secret.

    Args:
        config: the run.
        experiment: made of it; its nodes have learned nothing yet.
        folder: where to.
    """
    for index, node in enumerate(experiment.nodes):
        own = folder / node.name
        own.mkdir(parents=True)
        np.savez(
            own / "data.npz",
            images=experiment.setting.parts[index].inputs.cpu().numpy(),
            labels=experiment.setting.parts[index].targets.cpu().numpy(),
        )
        model = experiment.setting.models[index]
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, own / "model.safetensors")
        names = config.nodes.models
        engine = config.engine
        # Nodes of one machine share its cores: more threads would only wait for each other.
        threads = engine.threads or max((os.cpu_count() or 1) // len(experiment.nodes), 1)
        file = NodeFile(
            name=node.name,
            seed=config.seed,
            data=PrivateConfig(path="data.npz", normalised=True),
            model=OwnModelConfig(names[index % len(names)], weights="model.safetensors"),
            local=config.nodes.local,
            policy=config.nodes.policy,
            compute=ComputeConfig(engine.device, engine.precision, engine.channels_last, threads),
        )
        (own / "node.toml").write_text(tomli_w.dumps(as_table(file)), encoding="utf-8")
        secret = own / "secret"
        secret.touch(mode=0o600)
        secret.write_text(f"{node.gate.secret}\n", encoding="utf-8")


def _looked_into(
    experiment: Experiment, out: Path, served: Path, nodes: Path, run: str, seconds: float
) -> dict[str, Any]:
    """The figures of a simulation, from what the server and the nodes of a rehearsal remember."""
    saved = load_state(served / "state.safetensors")
    states: dict[str, dict[str, Any]] = {}
    for node in experiment.nodes:
        path = _latest(nodes / node.name / "runs" / run, saved["mark"])
        if path is not None:
            states[node.name] = load_state(path)["node"]
            states[node.name]["optimisers"].pop("model", None)  # of a node left out as it still learned
    live = json.loads((served / "result.json").read_text(encoding="utf-8"))
    for name in ("ledger.jsonl", "metrics.jsonl"):
        shutil.copy2(served / name, out / name)
    figures = experiment.adopt(out, saved, states)
    figures["seconds"] |= {name: live["seconds"][name] for name in ("local_training", "distillation")}
    figures["seconds"]["total"] = seconds + figures["seconds"]["centralised"]
    starting = max(seconds - live["seconds"]["total"], 0.0)
    link = {**live["link"], "starting": starting}
    link["share"] = link["link"] / max(starting + live["seconds"]["total"], 1e-9)
    figures |= {"link": link, "events": live["events"]}
    figures["engine"]["name"] = live["engine"]["name"]
    return figures


def _latest(folder: Path, mark: int) -> Path | None:
    """Where a node was at a mark; if it had been left out by then, where it was last."""
    marks = {int(path.stem.removeprefix("mark-")): path for path in folder.glob("mark-*.safetensors")}
    reached = [number for number in marks if number <= mark]
    if reached:
        return marks[max(reached)]
    learning = folder / "learning.safetensors"
    return learning if learning.exists() else None


# --- FLARE on this machine ----------------------------------------------------------------------------


def _simulate(config: RunConfig[Any], run: str, names: Sequence[str], home: Path) -> None:
    """FLARE's simulator: a process for the server and one for each node, without certificates."""
    work = home / "simulator"
    shutil.rmtree(work, ignore_errors=True)
    told = {"config": servers_part(config), "run": run}
    job = write_job(work / "job", names, told, name="fedstill")
    environment = {
        **_patient(),
        RUNS: str((home / "runs").resolve()),
        NODES: str((home / "nodes").resolve()),
        "PYTHONPATH": site.python_path(os.environ.get("PYTHONPATH", "")),
    }
    words = [sys.executable, "-m", "fedstill.federation.simulator", str(job), str(work / "w"), *names]
    with (home / "simulator.log").open("wb") as log:
        code = subprocess.run(words, env=environment, stdout=log, stderr=log, check=False).returncode
    served = home / "runs" / run
    if code and not (served / STOPPED).exists():
        raise DeployError(f"FLARE's simulator ended with {code}: see {home / 'simulator.log'}")


def _deploy_here(config: RunConfig[Any], run: str, names: Sequence[str], home: Path) -> None:
    """A federation deployed on this machine: kits, certificates, one process a site, mutual TLS."""
    deployed = home / "flare"
    if not (deployed / "admin").exists():
        shutil.rmtree(deployed, ignore_errors=True)
        provision(deployed, "localhost", list(names), heartbeat=2.0, dead_after=20.0)
        for name in names:
            shutil.rmtree(home / "nodes" / name / "kit", ignore_errors=True)
            shutil.copytree(deployed / "nodes" / name, home / "nodes" / name / "kit")
    runs = deployed / "runs"
    if not runs.exists():
        (home / "runs").mkdir(exist_ok=True)
        runs.symlink_to((home / "runs").resolve(), target_is_directory=True)
    with contextlib.ExitStack() as stack:
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        silent["env"] = _patient()
        for place in (site.server(deployed), *(site.node(home / "nodes" / name) for name in names)):
            site.stop(place)  # of a rehearsal that was killed
            stack.callback(site.stop, place)
            site.start(place, **silent)
        admin = stack.enter_context(Admin(deployed / "admin", patience=UP))
        admin.wait_for(names, UP)
        job_folder = home / "job"
        shutil.rmtree(job_folder, ignore_errors=True)
        told = {"config": servers_part(config), "run": run}
        least = config.link.least(len(names))
        write_job(job_folder, names, told, name=config.name, fewest=0 if least == len(names) else least)
        job = admin.submit(job_folder)
        status = admin.wait(job, float("inf"), every=0.5)
    served = home / "runs" / run
    if not (served / "result.json").exists() and not (served / STOPPED).exists():
        raise DeployError(f"the job ended as {status} and left no result: see {deployed / 'server.log'}")


def _patient() -> dict[str, str]:
    """An environment in which threads that wait leave the processor to other processes."""
    return {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", **os.environ}


def _raise_if_stopped(served: Path) -> None:
    """Pass on why a run stopped at the server."""
    path = served / STOPPED
    if path.exists():
        told = json.loads(path.read_text(encoding="utf-8"))
        raise FedstillError(f"the run stopped, and can go on: {told['text']}")


__all__ = ["ENGINES", "rehearse", "run_name", "submit", "write_nodes"]
