"""A run whose nodes are processes of their own on this machine: a rehearsal of a real federation.

It is a simulation in everything but the place: data, split, models and policies come from one
configuration. They are written into one folder a node, and from there on everything goes the way of a real
federation. At the end, since it is a rehearsal, the nodes' folders are looked into for the figures that
only a simulation knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save_file

from fedstill.core import private_files, toml
from fedstill.core.checkpoint import load_state
from fedstill.core.config_tables import to_table
from fedstill.core.errors import DeployError
from fedstill.core.progress import PROGRESS_FILE, ProgressBar, follow_file
from fedstill.core.run_writer import lock_folder, write_text
from fedstill.core.startup_kit import KIT_FOLDER
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.user_data import default_folders
from fedstill.federation import flare_kit, flare_site, server_rules
from fedstill.federation.admin import Admin
from fedstill.federation.flare import NODES, SERVER_FOLDER
from fedstill.federation.flare_permissions import NODE_CLASSES, SERVER_CLASSES, write_json
from fedstill.federation.provision import provision, require_flare
from fedstill.federation.run_status import STOPPED, has_ended
from fedstill.models.class_map import ClassMappedModel
from fedstill.node import owner_folder
from fedstill.node.audit_log import FILE
from fedstill.node.node_file import ComputeConfig, NodeFile, NodeModelConfig
from fedstill.node.policy import PolicyConfig
from fedstill.node.run_folder import SALT, TRAINING_STATE, checkpoint_name, checkpoints_in
from fedstill.protocol.method import METHODS, method_name
from fedstill.runs.build import node_models
from fedstill.runs.config import RunConfig
from fedstill.runs.deployed import raise_if_stopped, run_name, server_config_toml, write_run_job
from fedstill.runs.simulation import Simulation
from fedstill.tasks import TASKS

METRICS = "metrics.jsonl"
UP = 60.0  # seconds for the processes of a rehearsal to find each other


def rehearse(config: RunConfig, simulation: Simulation, out: Path, bars: ProgressBar) -> dict[str, Any]:
    """Run a simulation's nodes as processes of their own on this machine.

    Args:
        config: the run, with ``engine.name`` ``flare`` or ``flare-poc``.
        out: the run's folder; everything of the federation lies in ``out/federation``.

    Returns:
        The figures, as a simulation's own run gives them, with what the link cost.

    Raises:
        FedstillError: FLARE is missing, or a node or the server stopped; the run can go on.
        RunFolderError: another process is at work on the run.
    """
    require_flare()
    if config.engine.name == "flare":
        print("Without --startup-kit this is a simulation, in FLARE's simulator.", file=sys.stderr)
    with lock_folder(out, "run"):
        home = out / "federation"
        names = [node.name for node in simulation.nodes]
        run = run_name(config, out)
        if not (home / "nodes").exists():
            part = home / "nodes.part"
            shutil.rmtree(part, ignore_errors=True)
            write_nodes(config, simulation, part)
            part.rename(home / "nodes")
        started = time.monotonic()
        served = home / "runs" / run
        if not (served / "result.json").exists():
            _show_metrics(served, out)
            with follow_file(served / PROGRESS_FILE, bars):
                if config.engine.name == "flare":
                    _simulate(config, run, names, home)
                else:
                    _deploy_here(config, run, names, home)
            raise_if_stopped(served, out)
        seconds = time.monotonic() - started
        return _looked_into(simulation, out, served, home / "nodes", run, seconds, bars)


def _let_in(config: RunConfig, folder: Path) -> None:
    """Let a rehearsal's server use what the run names.

    Args:
        folder: the server's.
    """
    table = toml.parse(server_config_toml(config)) | {"plugins": config.plugins}
    rules = server_rules.rules_for_run(table)
    write_text(folder / server_rules.FILE, tomli_w.dumps(to_table(rules)))


def _show_metrics(served: Path, out: Path) -> None:
    """Have what the server measures in the run's own folder, for its page, while it goes on."""
    (out / METRICS).unlink(missing_ok=True)
    (out / METRICS).symlink_to(served.relative_to(out) / METRICS)


# --- a rehearsal's nodes ------------------------------------------------------------------------------


def write_nodes(config: RunConfig, simulation: Simulation, folder: Path) -> None:
    """One folder a node, as its owner would have it: node.toml, data, first weights, secret.

    Args:
        simulation: made of it; its nodes have learned nothing yet.
    """
    for index, node in enumerate(simulation.nodes):
        own = folder / node.name
        private_files.make_folder(folder)
        own.mkdir(private_files.FOLDER_MODE)
        part = simulation.setting.parts[index]
        tensors = {"inputs": part.inputs, "targets": part.targets}
        if part.groups is not None:
            tensors["groups"] = part.groups
        for name in ("data.safetensors", "model.safetensors"):
            private_files.create_empty(own / name)
        save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, own / "data.safetensors")
        model = simulation.setting.models[index]
        model = model[0] if isinstance(model, ClassMappedModel) else model  # its file maps it again
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        if weights:  # else what only predicts
            save_file(weights, own / "model.safetensors")
        names, features = config.nodes.models, config.nodes.perceptual
        drawn = {"weights": "model.safetensors" if weights else ""}
        engine = config.engine
        # Nodes of one machine share its cores: more threads would only wait for each other.
        threads = engine.threads or max((os.cpu_count() or 1) // len(simulation.nodes), 1)
        file = NodeFile(
            name=node.name,
            seed=config.seed,
            data=NodeDataConfig("tensors", "data.safetensors", group="groups" if "groups" in tensors else ""),
            model=NodeModelConfig(
                **(vars(node_models(names[index % len(names)])) | drawn),
                perceptual=str(Path(features).expanduser().resolve()) if features else "",
            ),
            local=config.nodes.local,
            policy=_allowing(config),
            privacy=config.nodes.privacy,
            compute=ComputeConfig(engine.device, simulation.compute.precision, engine.channels_last, threads),
        )
        private_files.replace_file(own / "node.toml", tomli_w.dumps(to_table(file)).encode())
        secret = f"{owner_folder.REHEARSAL_PREFIX}{simulation.secret(node.name)}\n"
        private_files.replace_file(own / owner_folder.SECRET, secret.encode())
        private_files.create_empty(own / SALT)  # the simulation has none


def _allowing(config: RunConfig) -> PolicyConfig:
    """The policy of a rehearsal's nodes: whoever rehearses a method and a task has installed them, and allows
    them."""
    policy, method, task = config.nodes.policy, method_name(config.method), config.task.registered_name
    if not METHODS.is_allowed(method, policy.methods):
        policy = replace(policy, methods=(*policy.methods, method))
    if not TASKS.is_allowed(task, policy.tasks):
        policy = replace(policy, tasks=(*policy.tasks, task))
    return policy


def _looked_into(
    simulation: Simulation, out: Path, served: Path, nodes: Path, run: str, seconds: float, bars: ProgressBar
) -> dict[str, Any]:
    """The figures of a simulation, from what the server and the nodes of a rehearsal remember."""
    saved = load_state(served / "state.safetensors")
    states: dict[str, dict[str, Any]] = {}
    for node in simulation.nodes:
        path = _latest(nodes / node.name / "runs" / run, saved["checkpoint"])
        if path is not None:
            states[node.name] = load_state(path)["node"]
            # Of a node that was left out as it still learned:
            for optimizers in (states[node.name]["optimizers"], *states[node.name]["teachers"]):
                optimizers.pop("model", None)
    live = json.loads((served / "result.json").read_text(encoding="utf-8"))
    (out / METRICS).unlink(missing_ok=True)  # which is the server's until now
    for name in (FILE, METRICS):
        shutil.copy2(served / name, out / name)
    results = simulation.load_remote_results(out, saved, states, bars)
    results["seconds"] |= {name: live["seconds"][name] for name in ("local_training", "distillation")}
    results["seconds"]["total"] = seconds + results["seconds"]["centralized"]
    starting = max(seconds - live["seconds"]["total"], 0.0)
    link = {**live["link"], "starting": starting}
    link["share"] = link["link"] / max(starting + live["seconds"]["total"], 1e-9)
    results |= {"link": link, "events": live["events"]}
    results["engine"]["name"] = live["engine"]["name"]
    return results


def _latest(folder: Path, mark: int) -> Path | None:
    """Where a node was at a mark; if it had been left out by then, where it was last."""
    if reached := [number for number in checkpoints_in(folder) if number <= mark]:
        return folder / checkpoint_name(max(reached))
    learning = folder / TRAINING_STATE
    return learning if learning.exists() else None


# --- FLARE on this machine ----------------------------------------------------------------------------


def _simulate(config: RunConfig, run: str, names: Sequence[str], home: Path) -> None:
    """FLARE's simulator: a process for the server and one for each node, without certificates."""
    work = home / "simulator"
    shutil.rmtree(work, ignore_errors=True)
    job = write_run_job(config, run, names, names, work / "job")
    _let_in(config, home)
    environment = {
        **_surroundings(),
        SERVER_FOLDER: str(home.resolve()),
        NODES: str((home / "nodes").resolve()),
        "PYTHONPATH": flare_site.python_path(os.environ.get("PYTHONPATH", "")),
    }
    allowed = {"format_version": 2, "class_allow_list": [*SERVER_CLASSES, *NODE_CLASSES]}
    write_json(work / "w" / "local" / "resources.json", allowed)
    words = [sys.executable, "-m", "nvflare.cli", "simulator", str(job), "-w", str(work / "w")]
    words += ["-c", ",".join(names), "-t", str(len(names)), "-l", "concise"]
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
        for place in (
            flare_kit.server(deployed),
            *(flare_kit.node(own) for own in owners if (own / KIT_FOLDER).exists()),
        ):
            flare_site.stop(place)  # of a rehearsal that was killed
    shutil.rmtree(deployed, ignore_errors=True)
    provision(deployed, "localhost", list(names), heartbeat=2.0, dead_after=20.0)
    _let_in(config, deployed)
    for own in owners:
        shutil.rmtree(own / KIT_FOLDER, ignore_errors=True)
        shutil.move(deployed / "nodes" / own.name, own / KIT_FOLDER)
    served = home / "runs" / run
    (home / "runs").mkdir(exist_ok=True)
    (deployed / "runs").symlink_to((home / "runs").resolve(), target_is_directory=True)
    with contextlib.ExitStack() as stack:
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        silent["env"] = _surroundings()
        for here in (flare_kit.server(deployed), *map(flare_kit.node, owners)):
            stack.callback(flare_site.stop, here)
            flare_site.start(here, **silent)
        stack.enter_context(_crowding(len(names), deployed / "server.log"))
        admin = stack.enter_context(Admin(deployed / "admin", patience=UP))
        admin.wait_for(names, UP)
        (served / STOPPED).unlink(missing_ok=True)  # of an earlier time
        job = admin.submit(write_run_job(config, run, names, names, home / "job"))
        status = ""
        # FLARE ends a job's processes at leisure: seconds after the run, and later still without a node.
        while not has_ended(served) and not status.startswith("FINISHED"):
            time.sleep(0.2)
            status = admin.status(job)
    if not has_ended(served):
        raise DeployError(f"the job ended as {status} and left no result: see {deployed / 'server.log'}")


@contextlib.contextmanager
def _crowding(nodes: int, log: Path) -> Iterator[None]:
    """Where a rehearsal breaks off, say with it what a machine that is too small for it can do."""
    try:
        yield
    except DeployError as error:
        here = f"{nodes} nodes and a server of two processes each, on {os.cpu_count()} cores"
        way_out = "where that is too much, take fewer (--nodes N), or leave --engine out"
        raise DeployError(f"{error}: {here}; {way_out}; see {log}") from error


def _surroundings() -> dict[str, str]:
    """The environment of FLARE's processes: threads that wait leave the processor to other processes, and
    data are looked for where this process looks, whatever folder they work in."""
    data = os.pathsep.join(str(folder.resolve()) for folder in default_folders())
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        **os.environ,
        "GOMP_SPINCOUNT": "0",
        "FEDSTILL_DATA": data,
    }
