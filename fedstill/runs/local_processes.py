"""Rehearsal of a deployed federation: a run whose nodes are separate processes on this machine.

As in a simulation, data, split, models and policies come from one configuration. They are written into one
folder per node, and the run then works like a deployed federation. At its end the nodes' checkpoints are read
from these folders, for the metrics that are possible only in a simulation.
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
from fedstill.federation import flare_site, server_rules
from fedstill.federation.admin import STOPPED, Admin, has_ended
from fedstill.federation.flare import NODES, SERVER_FOLDER
from fedstill.federation.provision import NODE_CLASSES, SERVER_CLASSES, provision, require_flare, write_json
from fedstill.models.class_map import ClassMappedModel
from fedstill.node import owner_folder
from fedstill.node.audit_log import FILE
from fedstill.node.node_file import ComputeConfig, NodeFile, NodeModelConfig
from fedstill.node.policy import PolicyConfig
from fedstill.node.run_folder import SALT, TRAINING_STATE, checkpoint_name, checkpoints_in
from fedstill.protocol.method import METHODS, method_name
from fedstill.runs.build import parse_node_model
from fedstill.runs.config import RunConfig
from fedstill.runs.deployed import raise_if_stopped, run_name, server_config_toml, write_run_job
from fedstill.runs.simulation import Simulation
from fedstill.tasks import TASKS

METRICS = "metrics.jsonl"
CONNECTION_TIMEOUT = 60.0  # seconds for the processes of a rehearsal to connect


def rehearse(config: RunConfig, simulation: Simulation, out: Path, bars: ProgressBar) -> dict[str, Any]:
    """Run a simulation's nodes as separate processes on this machine.

    Args:
        config: the run, with ``engine.backend`` ``flare`` or ``flare-poc``.
        simulation: built from it.
        out: folder of the run; all files of the federation are in ``out/federation``.
        bars: progress bars.

    Returns:
        The results of a simulation, with the link's costs.

    Raises:
        FedstillError: FLARE is missing, or a node or the server stopped; the run can be resumed.
        RunFolderError: another process is running the run.
    """
    require_flare()
    if config.engine.backend == "flare":
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
            _link_metrics(served, out)
            with follow_file(served / PROGRESS_FILE, bars):
                if config.engine.backend == "flare":
                    _run_simulator(config, run, names, home)
                else:
                    _run_deployed(config, run, names, home)
            raise_if_stopped(served, out)
        seconds = time.monotonic() - started
        return _evaluate_checkpoints(simulation, out, served, home / "nodes", run, seconds, bars)


def _write_server_rules(config: RunConfig, folder: Path) -> None:
    """Write server rules that allow the resources which the run names.

    Args:
        folder: of the server.
    """
    table = toml.parse(server_config_toml(config)) | {"plugins": config.plugins}
    rules = server_rules.rules_allowing_run(table)
    write_text(folder / server_rules.FILE, tomli_w.dumps(to_table(rules)))


def _link_metrics(served: Path, out: Path) -> None:
    """Link the server's metrics into the run's own folder, for its report."""
    (out / METRICS).unlink(missing_ok=True)
    (out / METRICS).symlink_to(served.relative_to(out) / METRICS)


# --- a rehearsal's nodes ------------------------------------------------------------------------------


def write_nodes(config: RunConfig, simulation: Simulation, folder: Path) -> None:
    """Write one folder per node like an owner's folder: node.toml, data, initial weights, secret.

    Args:
        simulation: built from the configuration, before any training.
        folder: parent of the nodes' folders.
    """
    for index, node in enumerate(simulation.nodes):
        node_folder = folder / node.name
        private_files.make_folder(folder)
        node_folder.mkdir(private_files.FOLDER_MODE)
        part = simulation.setting.parts[index]
        tensors = {"inputs": part.inputs, "targets": part.targets}
        if part.groups is not None:
            tensors["groups"] = part.groups
        for name in ("data.safetensors", "model.safetensors"):
            private_files.create_empty(node_folder / name)
        save_file(
            {name: each.cpu().contiguous() for name, each in tensors.items()},
            node_folder / "data.safetensors",
        )
        model = simulation.setting.models[index]
        model = (
            model[0] if isinstance(model, ClassMappedModel) else model
        )  # the node adds its class map again
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        if weights:  # a model that can only predict has none
            save_file(weights, node_folder / "model.safetensors")
        names, features = config.nodes.models, config.nodes.perceptual
        weights_option = {"weights": "model.safetensors" if weights else ""}
        engine = config.engine
        # Nodes of one machine share its cores.
        threads = engine.threads or max((os.cpu_count() or 1) // len(simulation.nodes), 1)
        file = NodeFile(
            name=node.name,
            seed=config.seed,
            data=NodeDataConfig("tensors", "data.safetensors", group="groups" if "groups" in tensors else ""),
            model=NodeModelConfig(
                **(vars(parse_node_model(names[index % len(names)])) | weights_option),
                perceptual=str(Path(features).expanduser().resolve()) if features else "",
            ),
            local=config.nodes.local,
            policy=_policy_allowing_run(config),
            privacy=config.nodes.privacy,
            compute=ComputeConfig(engine.device, simulation.compute.precision, engine.channels_last, threads),
        )
        private_files.replace_file(node_folder / "node.toml", tomli_w.dumps(to_table(file)).encode())
        secret = f"{owner_folder.REHEARSAL_PREFIX}{simulation.secret(node.name)}\n"
        private_files.replace_file(node_folder / owner_folder.SECRET, secret.encode())
        private_files.create_empty(node_folder / SALT)  # the simulation has none


def _policy_allowing_run(config: RunConfig) -> PolicyConfig:
    """Return the nodes' policy, which allows the method and the task of the rehearsal."""
    policy = config.nodes.policy
    names = ((METHODS, method_name(config.method)), (TASKS, config.task.registered_name))
    plugins = tuple(name for registry, name in names if not registry.is_allowed(name, policy.plugins))
    return replace(policy, plugins=(*policy.plugins, *plugins))


def _evaluate_checkpoints(
    simulation: Simulation, out: Path, served: Path, nodes: Path, run: str, seconds: float, bars: ProgressBar
) -> dict[str, Any]:
    """Evaluate a simulation from the checkpoints of a rehearsal's server and nodes."""
    server_state = load_state(served / "state.safetensors")
    states: dict[str, dict[str, Any]] = {}
    for node in simulation.nodes:
        path = _checkpoint_file(nodes / node.name / "runs" / run, server_state["checkpoint"])
        if path is not None:
            states[node.name] = load_state(path)["node"]
            # Of a node that was excluded during local training:
            for optimizers in (states[node.name]["optimizers"], *states[node.name]["teachers"]):
                optimizers.pop("model", None)
    server_result = json.loads((served / "result.json").read_text(encoding="utf-8"))
    (out / METRICS).unlink(missing_ok=True)  # the link to the server's file
    for name in (FILE, METRICS):
        shutil.copy2(served / name, out / name)
    results = simulation.load_remote_results(out, server_state, states, bars)
    results["seconds"] |= {
        name: server_result["seconds"][name] for name in ("local_training", "distillation")
    }
    results["seconds"]["total"] = seconds + results["seconds"]["centralized"]
    starting = max(seconds - server_result["seconds"]["total"], 0.0)
    link = {**server_result["link"], "starting": starting}
    link["share"] = link["link"] / max(starting + server_result["seconds"]["total"], 1e-9)
    results |= {"link": link, "events": server_result["events"]}
    results["engine"]["backend"] = server_result["engine"]["backend"]
    return results


def _checkpoint_file(folder: Path, number: int) -> Path | None:
    """Return a node's checkpoint file for a query number; its last one if it was excluded before."""
    if earlier := [each for each in checkpoints_in(folder) if each <= number]:
        return folder / checkpoint_name(max(earlier))
    learning = folder / TRAINING_STATE
    return learning if learning.exists() else None


# --- FLARE on this machine ----------------------------------------------------------------------------


def _run_simulator(config: RunConfig, run: str, names: Sequence[str], home: Path) -> None:
    """Run in FLARE's simulator: a process for the server and one for each node, without certificates."""
    work = home / "simulator"
    shutil.rmtree(work, ignore_errors=True)
    job = write_run_job(config, run, names, names, work / "job")
    _write_server_rules(config, home)
    environment = {
        **_process_environment(),
        SERVER_FOLDER: str(home.resolve()),
        NODES: str((home / "nodes").resolve()),
        "PYTHONPATH": flare_site.python_path(os.environ.get("PYTHONPATH", "")),
    }
    allowed = {"format_version": 2, "class_allow_list": [*SERVER_CLASSES, *NODE_CLASSES]}
    write_json(work / "w" / "local" / "resources.json", allowed)
    command = [sys.executable, "-m", "nvflare.cli", "simulator", str(job), "-w", str(work / "w")]
    command += ["-c", ",".join(names), "-t", str(len(names)), "-l", "concise"]
    with (home / "simulator.log").open("wb") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    served = home / "runs" / run
    if code and not (served / STOPPED).exists():
        raise DeployError(f"FLARE's simulator ended with {code}: see {home / 'simulator.log'}")


def _run_deployed(config: RunConfig, run: str, names: Sequence[str], home: Path) -> None:
    """Deploy a federation on this machine: kits, certificates, one process per site, mutual TLS.

    It is provisioned again each time, as its port may be taken by now.
    """
    deployed, owners = home / "flare", [home / "nodes" / name for name in names]
    if (deployed / "admin").exists():
        for site in (
            flare_site.server(deployed),
            *(flare_site.node(node_folder) for node_folder in owners if (node_folder / KIT_FOLDER).exists()),
        ):
            flare_site.stop(site)  # left by a rehearsal that was killed
    shutil.rmtree(deployed, ignore_errors=True)
    provision(deployed, "localhost", list(names), heartbeat=2.0, dead_after=20.0)
    _write_server_rules(config, deployed)
    for node_folder in owners:
        shutil.rmtree(node_folder / KIT_FOLDER, ignore_errors=True)
        shutil.move(deployed / "nodes" / node_folder.name, node_folder / KIT_FOLDER)
    served = home / "runs" / run
    (home / "runs").mkdir(exist_ok=True)
    (deployed / "runs").symlink_to((home / "runs").resolve(), target_is_directory=True)
    with contextlib.ExitStack() as stack:
        process_options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process_options["env"] = _process_environment()
        for site in (flare_site.server(deployed), *map(flare_site.node, owners)):
            stack.callback(flare_site.stop, site)
            flare_site.start(site, **process_options)
        stack.enter_context(_explain_overload(len(names), deployed / "server.log"))
        admin = stack.enter_context(Admin(deployed / "admin", patience=CONNECTION_TIMEOUT))
        admin.wait_for(names, CONNECTION_TIMEOUT)
        (served / STOPPED).unlink(missing_ok=True)  # left by an earlier job
        job = admin.submit(write_run_job(config, run, names, names, home / "job"))
        status = ""
        # FLARE ends a job's processes seconds after the run, and later if a node is missing.
        while not has_ended(served) and not status.startswith("FINISHED"):
            time.sleep(0.2)
            status = admin.status(job)
    if not has_ended(served):
        raise DeployError(f"the job ended as {status} and left no result: see {deployed / 'server.log'}")


@contextlib.contextmanager
def _explain_overload(nodes: int, log: Path) -> Iterator[None]:
    """Add advice for small machines to errors of a rehearsal."""
    try:
        yield
    except DeployError as error:
        load = f"{nodes} nodes and a server with two processes each, on {os.cpu_count()} cores"
        advice = "if that is too much, use fewer nodes (--nodes N) or no --engine"
        raise DeployError(f"{error}: {load}; {advice}; see {log}") from error


def _process_environment() -> dict[str, str]:
    """Return the environment of FLARE's processes.

    Waiting threads release the processor, and data are searched in the same folders as by this process.
    """
    data = os.pathsep.join(str(folder.resolve()) for folder in default_folders())
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        **os.environ,
        "GOMP_SPINCOUNT": "0",
        "FEDSTILL_DATA": data,
    }
