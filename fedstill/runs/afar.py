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
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save_file

from fedstill.core import owner_only
from fedstill.core.errors import DeployError, FedstillError
from fedstill.core.progress import following
from fedstill.core.records import holding, write_text
from fedstill.core.registry import OURS
from fedstill.core.state import load_state
from fedstill.core.tables import as_table
from fedstill.data.config import SplitConfig
from fedstill.data.private_config import PrivateConfig
from fedstill.federation import site
from fedstill.federation.admin import Admin
from fedstill.federation.flare import NODES, RUNS
from fedstill.federation.order import natural
from fedstill.federation.provision import provision, require_flare, write_job
from fedstill.federation.runs import PROGRESS, STOPPED, stop
from fedstill.node.node_file import ComputeConfig, NodeFile, OwnModelConfig
from fedstill.node.policy import PolicyConfig
from fedstill.node.session import SALT
from fedstill.protocol.method import METHODS, method_name
from fedstill.runs.config import NodesConfig, RunConfig, to_dict
from fedstill.runs.experiment import Experiment
from fedstill.tasks import TASKS

RUN = "live.json"  # in the run's folder: its name among the nodes, and at a deployed federation their names
UP = 60.0  # seconds for the processes of a rehearsal to find each other
ENDING = 20.0  # seconds for a job that was ended to be over
SLOW = 15.0  # seconds until it is said that a job waits


def rehearse(config: RunConfig, experiment: Experiment, out: Path, progress: bool) -> dict[str, Any]:
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
        RunFolderError: another process is at work on the run.
    """
    require_flare()
    if config.engine.name == "flare":
        print("Without --startup-kit this is a simulation, in FLARE's simulator.", file=sys.stderr)
    with holding(out, "run"):
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
            _raise_if_stopped(served, out)
        seconds = time.monotonic() - started
        return _looked_into(experiment, out, served, home / "nodes", run, seconds)


def reach(kit: Path) -> None:
    """See whether a run could begin at a deployed federation: the kit is let in, and a node is there.

    Raises:
        DeployError: it could not.
    """
    with Admin(kit) as admin:
        _connected(admin)


def submit(config: RunConfig, out: Path, progress: bool) -> dict[str, Any]:
    """Run at a deployed federation, with the nodes that are there; data, models and policies are theirs.

    The nodes with which a run begins are those with which it goes on: a node that has come since has no part
    in it, and one that is away is waited for by whoever resumes it.

    Args:
        config: the run; ``engine.startup_kit`` is an admin's kit.
        out: the run's folder, into which all results are fetched.
        progress: show on a terminal what goes on.

    Returns:
        What the server found out, as ``result.json`` holds it.

    Raises:
        FedstillError: the server cannot be reached, refuses or stopped; the run can go on.
        RunFolderError: another process is at work on the run.
    """
    if config.nodes != NodesConfig() or config.split != SplitConfig():
        print("What this run says of nodes and split is not used: these are the nodes' own.", file=sys.stderr)
    with holding(out, "run"), Admin(Path(config.engine.startup_kit)) as admin:
        run = run_name(config, out)
        _end_jobs(admin, run)
        job = _begin(admin, config, run, out)
        try:
            status = _waited(admin, job)
            fetched = admin.download(job, out / "fetched")
        except DeployError as error:
            raise DeployError(f"{error}. To go on with the run: {_resuming(out)}") from error
        return _taken_home(fetched, out, f"job {job} ended as {status} and left no result")


def _begin(admin: Admin, config: RunConfig, run: str, out: Path) -> str:
    """Hand in a run's job, for the nodes with which the run began."""
    there = _connected(admin)
    names: list[str] = json.loads((out / RUN).read_text(encoding="utf-8")).get("nodes", there)
    absent = [name for name in names if name not in there]
    taking_part = [name for name in names if name in there]
    if len(taking_part) < config.link.least(len(names)):
        raise DeployError(
            f"not connected to the server at {admin.server}: {', '.join(absent)}. The run began with "
            f"{'this node' if len(absent) == 1 else 'these nodes'}: once enough are there again, "
            f"{_resuming(out)} goes on"
        )
    write_text(out / RUN, json.dumps({"run": run, "nodes": names}) + "\n")
    job_folder = out / "job"
    shutil.rmtree(job_folder, ignore_errors=True)
    # All that are there are mandatory, and only at the start: how many may be lost is the quorum's to say.
    told = {"config": servers_part(config), "run": run, "nodes": names}
    job = admin.submit(write_job(job_folder, taking_part, told, name=run))
    print(f"Job {job} with {', '.join(taking_part)}.", file=sys.stderr)
    return job


def _connected(admin: Admin) -> list[str]:
    """The nodes that are there.

    Raises:
        DeployError: none.
    """
    names = sorted(admin.nodes(), key=natural)
    if not names:
        raise DeployError(f"no node is connected to the server at {admin.server}")
    return names


def _end_jobs(admin: Admin, run: str) -> None:
    """End the jobs of this run that nobody waits for any more: it goes on from its last mark.

    Those of a server that was killed FLARE may call running for ever.
    """
    for job in admin.jobs():
        if job["name"] == run and not str(job["status"]).startswith("FINISHED"):
            print(f"Ending job {job['job_id']}, which nobody waited for.", file=sys.stderr)
            with contextlib.suppress(DeployError):  # not at work, whatever the server says
                admin.abort(str(job["job_id"]))
                admin.wait(str(job["job_id"]), ENDING)


def _waited(admin: Admin, job: str) -> str:
    """Wait for a job, and say how it does; whoever stops waiting ends it."""
    since, said = time.monotonic(), ""
    try:
        while not (status := admin.status(job)).startswith("FINISHED"):
            late = status == "SUBMITTED" and time.monotonic() - since > SLOW
            now = "waiting: FLARE begins once all these nodes are there and free" if late else status.lower()
            if now != said:
                print(f"  {now}", file=sys.stderr)
                said = now
            time.sleep(1.0)
    except KeyboardInterrupt:
        with contextlib.suppress(DeployError):
            admin.abort(job)
        raise
    return status


def _taken_home(fetched: Path, out: Path, otherwise: str) -> dict[str, Any]:
    """Take the results out of what a job left, into the run's folder.

    Raises:
        DeployError: it left none.
        FedstillError: the run stopped, and why.
    """
    found = [*sorted(fetched.rglob("result.json")), *sorted(fetched.rglob(f"fedstill/{STOPPED}"))]
    if not found:
        raise DeployError(f"{otherwise}: the server's log says why")
    served = found[0].parent
    _raise_if_stopped(served, out)
    for path in served.iterdir():
        if path.is_file() and path.name not in ("config.toml", STOPPED):
            shutil.copy2(path, out / path.name)
    shutil.rmtree(out / "fetched")
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    (out / "result.json").unlink()  # until the report's caller writes it, whole
    return result


def servers_part(config: RunConfig) -> str:
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


def run_name(config: RunConfig, out: Path) -> str:
    """The name by which nodes know a run, made up once and kept in the run's folder."""
    path = out / RUN
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["run"])
    name = f"{config.name[:80]}-{config.seed}-{secrets.token_hex(4)}"
    write_text(path, json.dumps({"run": name}) + "\n")
    return name


# --- a rehearsal's nodes ------------------------------------------------------------------------------


def write_nodes(config: RunConfig, experiment: Experiment, folder: Path) -> None:
    """One folder a node, as its owner would have it: node.toml, data, first weights, secret.

    Args:
        config: the run.
        experiment: made of it; its nodes have learned nothing yet.
        folder: where to.
    """
    for index, node in enumerate(experiment.nodes):
        own = folder / node.name
        owner_only.make_folder(folder)
        own.mkdir(owner_only.FOLDER)
        part = experiment.setting.parts[index]
        tensors = {"inputs": part.inputs, "targets": part.targets}
        if part.groups is not None:
            tensors["groups"] = part.groups
        for name in ("data.safetensors", "model.safetensors"):
            owner_only.touch(own / name)
        save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, own / "data.safetensors")
        model = experiment.setting.models[index]
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, own / "model.safetensors")
        names, features = config.nodes.models, config.nodes.perceptual
        engine = config.engine
        # Nodes of one machine share its cores: more threads would only wait for each other.
        threads = engine.threads or max((os.cpu_count() or 1) // len(experiment.nodes), 1)
        file = NodeFile(
            name=node.name,
            seed=config.seed,
            data=PrivateConfig("tensors", "data.safetensors", group="groups" if "groups" in tensors else ""),
            model=OwnModelConfig(
                names[index % len(names)],
                weights="model.safetensors",
                perceptual=str(Path(features).expanduser().resolve()) if features else "",
            ),
            local=config.nodes.local,
            policy=_allowing(config),
            privacy=config.nodes.privacy,
            compute=ComputeConfig(engine.device, engine.precision, engine.channels_last, threads),
        )
        owner_only.replace(own / "node.toml", tomli_w.dumps(as_table(file)).encode())
        owner_only.replace(own / "secret", f"{experiment.secret(node.name)}\n".encode())
        owner_only.touch(own / SALT)  # the simulation has none


def _allowing(config: RunConfig) -> PolicyConfig:
    """The policy of a rehearsal's nodes: whoever rehearses a method and a task has installed them, and allows
    them."""
    policy, method, task = config.nodes.policy, method_name(config.method), config.task.called
    if METHODS.origin(method) != OURS and method not in policy.methods:
        policy = replace(policy, methods=(*policy.methods, method))
    if TASKS.origin(task) != OURS and task not in policy.tasks:
        policy = replace(policy, tasks=(*policy.tasks, task))
    return policy


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
            # Of a node that was left out as it still learned:
            for optimisers in (states[node.name]["optimisers"], *states[node.name]["teachers"]):
                optimisers.pop("model", None)
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


def _simulate(config: RunConfig, run: str, names: Sequence[str], home: Path) -> None:
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


def _deploy_here(config: RunConfig, run: str, names: Sequence[str], home: Path) -> None:
    """A federation deployed on this machine: kits, certificates, one process a site, mutual TLS.

    It is made anew each time: its kits are nobody else's, and its port may be another's by now.
    """
    deployed, owners = home / "flare", [home / "nodes" / name for name in names]
    if (deployed / "admin").exists():
        for place in (site.server(deployed), *(site.node(own) for own in owners if (own / "kit").exists())):
            site.stop(place)  # of a rehearsal that was killed
    shutil.rmtree(deployed, ignore_errors=True)
    provision(deployed, "localhost", list(names), heartbeat=2.0, dead_after=20.0)
    for own in owners:
        shutil.rmtree(own / "kit", ignore_errors=True)
        shutil.move(deployed / "nodes" / own.name, own / "kit")
    (home / "runs").mkdir(exist_ok=True)
    (deployed / "runs").symlink_to((home / "runs").resolve(), target_is_directory=True)
    with contextlib.ExitStack() as stack:
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        silent["env"] = _patient()
        for here in (site.server(deployed), *map(site.node, owners)):
            stack.callback(site.stop, here)
            site.start(here, **silent)
        admin = stack.enter_context(Admin(deployed / "admin", patience=UP))
        admin.wait_for(names, UP)
        job_folder = home / "job"
        shutil.rmtree(job_folder, ignore_errors=True)
        told = {"config": servers_part(config), "run": run}
        least = config.link.least(len(names))
        write_job(job_folder, names, told, name=run, fewest=0 if least == len(names) else least)
        job = admin.submit(job_folder)
        status = admin.wait(job, float("inf"), every=0.5)
    served = home / "runs" / run
    if not (served / "result.json").exists() and not (served / STOPPED).exists():
        raise DeployError(f"the job ended as {status} and left no result: see {deployed / 'server.log'}")


def _patient() -> dict[str, str]:
    """An environment in which threads that wait leave the processor to other processes."""
    return {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", **os.environ}


def _raise_if_stopped(served: Path, out: Path) -> None:
    """Pass on why a run stopped at the server, with the command that goes on.

    Args:
        served: the run's folder at the server, or what was fetched of it.
        out: the run's folder here.
    """
    why = stop(served)
    if why is None:
        return
    again = _resuming(out)
    if why.refused:
        raise FedstillError(f"the run is refused: {why.text}. Once that is changed there, {again} goes on")
    if why.final:
        raise FedstillError(f"the run cannot go on as it is: {why.text}")
    raise FedstillError(f"the run stopped: {why.text}. To go on: {again}")


def _resuming(out: Path) -> str:
    """The command that goes on with a run."""
    return shlex.join(["fedstill", "run", "--resume", str(out)])


__all__ = ["reach", "rehearse", "run_name", "submit", "write_nodes"]
