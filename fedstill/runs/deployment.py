"""Runs whose nodes are other processes: a deployed federation, and its rehearsal on this machine.

A run at a deployed federation submits a job, follows its progress and fetches its results. In a rehearsal
data, split, models and policies come from one configuration, as in a simulation. They are written into one
folder per node, and the run then works like a deployed federation. At its end the nodes' checkpoints are read
from these folders, for the metrics that are possible only in a simulation.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save_file

from fedstill.core import private_files
from fedstill.core.checkpoint import load_state
from fedstill.core.compute import ComputeConfig
from fedstill.core.config_tables import parse_toml, to_table
from fedstill.core.dataset import DataSet
from fedstill.core.errors import DataError, DeployError, FedstillError
from fedstill.core.hashing import group_digits
from fedstill.core.name_normalization import natural_sort_key
from fedstill.core.progress import PROGRESS_FILE, ProgressBar, follow_file
from fedstill.core.run_writer import lock_folder, write_text
from fedstill.core.startup_kit import KIT_FOLDER
from fedstill.core.text_format import json_text
from fedstill.data.config import DATA
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import load
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.partitioners import Dirichlet
from fedstill.data.public import load_public
from fedstill.data.user_data import default_folders
from fedstill.federation import flare_site, server_rules
from fedstill.federation.admin import STOPPED, Admin, has_ended, read_stop_reason
from fedstill.federation.flare import NODES, SERVER_FOLDER, write_job
from fedstill.federation.provision import NODE_CLASSES, SERVER_CLASSES, provision, require_flare, write_json
from fedstill.models.hugging_face import PREFIX
from fedstill.models.interface import ClassMappedModel
from fedstill.models.perceptual import is_backbone
from fedstill.node import owner_folder
from fedstill.node.audit_log import FILE
from fedstill.node.node_file import NodeFile, NodeModelConfig
from fedstill.node.policy import PolicyConfig
from fedstill.node.run_folder import SALT, TRAINING_STATE, checkpoint_name, checkpoint_query_numbers
from fedstill.protocol.method import METHODS, method_name
from fedstill.protocol.run_plan import describe
from fedstill.runs.build import parse_node_model, split_data
from fedstill.runs.simulation import Simulation
from fedstill.runs.spec import NodesConfig, RunSpec, read_toml, to_dict
from fedstill.tasks import TASKS
from fedstill.track.trackers import TrackerGroup

RUN = "live.json"  # in the run's folder: its name at the nodes, and at a deployed federation the nodes' names
ABORT_TIMEOUT = 20.0  # seconds for an aborted job to end
WAITING_DELAY, WAITING_INTERVAL = 15.0, 10.0  # seconds until a waiting job is reported, and between updates
PROGRESS_INTERVAL = 2.0  # seconds between two progress queries


def check_connection(kit: Path) -> None:
    """Check that a deployed federation accepts the kit and that a node is connected.

    Raises:
        DeployError: it does not, or none is.
    """
    with Admin(kit) as admin:
        _require_connected_nodes(admin)


def submit(spec: RunSpec, out: Path, bars: ProgressBar, listeners: TrackerGroup) -> dict[str, Any]:
    """Run at a deployed federation with the connected nodes and their data, models and policies.

    A resumed run continues with the nodes with which it was started: a node that has connected since does not
    take part, and one that is missing must be connected again unless a quorum is.

    Args:
        spec: the run; ``engine.startup_kit`` is an admin's kit.
        out: folder of the run, into which all results are downloaded.
        bars: progress bars.
        listeners: trackers that get the metrics; the caller closes them.

    Returns:
        The server's part of ``result.json``.

    Raises:
        FedstillError: the server cannot be reached, refuses the run, or stopped it; the run can be resumed.
        RunFolderError: another process is running the run.
    """
    if spec.nodes != NodesConfig() or spec.split != Dirichlet():
        print("Options of nodes and split are ignored: a deployed federation has its own.", file=sys.stderr)
    with lock_folder(out, "run"), Admin(Path(spec.engine.startup_kit)) as admin:
        run = run_name(spec, out)
        _abort_jobs(admin, run)
        try:
            listeners.start(out, spec.method.title)
            job, taking_part = _submit_job(admin, spec, run, out)
            metrics = MetricsFollower(out / "metrics.jsonl", listeners)
            try:
                with bars:
                    status = _wait_for_job(admin, job, taking_part, bars, metrics)
                fetched = admin.download(job, out / "fetched")
            except DeployError as error:
                raise DeployError(f"{error}. To resume the run: {_resume_command(out)}") from error
            result = _collect_results(fetched, out, f"job {job} ended as {status} and left no result")
            metrics.log_rest()
        except BaseException:  # Ctrl-C, too
            listeners.close(None)
            raise
        return result


class MetricsFollower:
    """Writes the server's metrics to the run's folder, for its report, and logs them to trackers.

    Args:
        path: the file, which is started again; a resumed run sends all its metrics again.
        listeners: trackers.
    """

    def __init__(self, path: Path, listeners: TrackerGroup) -> None:
        self._path, self._listeners, self.known = path, listeners, 0
        path.unlink(missing_ok=True)

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json_text(line, indent=None) + "\n" for line in lines)
        self.known += len(lines)
        self._listeners.log(lines)

    def log_rest(self) -> None:
        """Log the lines of the server's complete file that have not been logged."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        self._listeners.log([json.loads(line) for line in lines[self.known :]])


def _submit_job(admin: Admin, spec: RunSpec, run: str, out: Path) -> tuple[str, list[str]]:
    """Submit a run's job for the nodes of the run; return its id and the nodes that take part."""
    connected = _require_connected_nodes(admin)
    names: list[str] = json.loads((out / RUN).read_text(encoding="utf-8")).get("nodes", connected)
    absent = [name for name in names if name not in connected]
    taking_part = [name for name in names if name in connected]
    if len(taking_part) < spec.link.min_nodes(len(names)):
        raise DeployError(
            f"not connected to the server at {admin.server}: {', '.join(absent)}. The run was started with "
            f"{'this node' if len(absent) == 1 else 'these nodes'}: once enough are connected again, "
            f"{_resume_command(out)} resumes it"
        )
    write_text(out / RUN, json.dumps({"run": run, "nodes": names}) + "\n")
    _print_fingerprint(spec, run, len(names))
    job = admin.submit(write_run_job(spec, run, taking_part, names, out / "job"))
    print(f"Job {job} with {', '.join(taking_part)}.", file=sys.stderr)
    return job, taking_part


def _print_fingerprint(spec: RunSpec, run: str, nodes: int) -> None:
    """Print the SHA-256 of the run's description, which nodes' owners approve, if the data are here."""
    from fedstill.runs.remote_run import make_run_plan

    if spec.features:  # they are computed at the server, which logs it
        return
    spec = read_toml(server_config_toml(spec))  # as the server reads it
    try:
        data = load(spec.data, spec.task, train_needed=False)
        _, public = load_public(spec.public, data, spec.task)
    except DataError:  # the server logs it
        return
    if note := unused_data_note(spec, data):
        print(note, file=sys.stderr)
    data_spec = DataSpec.from_data(spec.task, data)
    sha256 = describe(make_run_plan(spec, data_spec, public, run, nodes), public).sha256
    print(f"The run is {group_digits(sha256)}: owners who approve runs see the same.", file=sys.stderr)


def unused_data_note(spec: RunSpec, data: DataSet) -> str:
    """Return a note about training examples in the server's own data, which are not used; empty: none."""
    unused = len(data.train)
    if not unused or spec.data.registered_name in DATA.builtin:
        return ""
    split = "data.test_fraction, or a column `split`, says which"
    tested = f"The run is tested on {len(data.test)} examples of {data.name}"
    return f"{tested}: the other {unused} are training examples, which a server does not use ({split})."


def _require_connected_nodes(admin: Admin) -> list[str]:
    names = sorted(admin.nodes(), key=natural_sort_key)
    if not names:
        raise DeployError(f"no node is connected to the server at {admin.server}")
    return names


def _abort_jobs(admin: Admin, run: str) -> None:
    """Abort earlier jobs of this run, which resumes from its last checkpoint.

    FLARE may report the jobs of a server that was killed as running for ever.
    """
    for job in admin.jobs():
        if job["name"] == run and not str(job["status"]).startswith("FINISHED"):
            print(f"Aborting the earlier job {job['job_id']}.", file=sys.stderr)
            with contextlib.suppress(DeployError):  # it is not running, whatever the server reports
                admin.abort(str(job["job_id"]))
                admin.wait(str(job["job_id"]), ABORT_TIMEOUT)


def _waiting_reason(admin: Admin, nodes: Sequence[str]) -> str:
    """Return why a job does not begin: a node may have disconnected just before it was submitted."""
    connected = admin.nodes()
    if absent := ", ".join(node for node in nodes if node not in connected):
        return f"waiting for {absent}, which has disconnected: stop with Ctrl+C to start the run without it"
    return "waiting: FLARE begins once all these nodes are free"


def _wait_for_job(
    admin: Admin, job: str, taking_part: Sequence[str], bars: ProgressBar, metrics: MetricsFollower
) -> str:
    """Wait for a job and report its progress; abort it if waiting is interrupted."""
    since, printed, asked, waits = time.monotonic(), "", 0.0, ""
    try:
        while not (status := admin.status(job)).startswith("FINISHED"):
            now = status.lower()
            if status == "SUBMITTED" and time.monotonic() - since > WAITING_DELAY:
                if time.monotonic() - asked > WAITING_INTERVAL:
                    waits, asked = _waiting_reason(admin, taking_part), time.monotonic()
                now = waits
            if now != printed:
                print(f"  {now}", file=sys.stderr)
                printed = now
            if now == "running" and time.monotonic() - asked > PROGRESS_INTERVAL:
                (snapshot, lines), asked = admin.progress_and_metrics(job, metrics.known), time.monotonic()
                metrics.append(lines)
                if snapshot is not None:
                    bars.show_snapshot(snapshot)
            time.sleep(1.0)
    except KeyboardInterrupt:
        with contextlib.suppress(DeployError):
            admin.abort(job)
        raise
    return status


def _collect_results(fetched: Path, out: Path, missing_error: str) -> dict[str, Any]:
    """Move the results of a job into the run's folder and return them."""
    found = [*sorted(fetched.rglob("result.json")), *sorted(fetched.rglob(f"fedstill/{STOPPED}"))]
    if not found:
        raise DeployError(f"{missing_error}: the server's log says why")
    served = found[0].parent
    raise_if_stopped(served, out)
    for path in served.iterdir():
        if path.is_file() and path.name not in ("config.toml", STOPPED):
            shutil.copy2(path, out / path.name)
    shutil.rmtree(out / "fetched")
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    (out / "result.json").unlink()  # the caller writes it, complete
    return result


# --- job files and errors ---


def write_run_job(
    spec: RunSpec, run: str, connected: Sequence[str], nodes: Sequence[str], folder: Path
) -> Path:
    """Write a run's job into an empty folder.

    All connected nodes must take part at the start; later the quorum decides how many may be lost.

    Args:
        connected: nodes that take part now.
        nodes: all nodes with which the run was started.
    """
    shutil.rmtree(folder, ignore_errors=True)
    job_args = {"config": server_config_toml(spec), "run": run, "nodes": list(nodes)}
    return write_job(folder, connected, job_args, name=run)


def server_config_toml(spec: RunSpec) -> str:
    """Return the part of a configuration that the server needs, as TOML, with absolute paths.

    It has no options of nodes, trackers and folders with code.
    """
    table = to_dict(spec)
    for theirs in ("nodes", "split", "paper", "track", "plugins"):
        table.pop(theirs, None)
    table["engine"]["startup_kit"] = ""
    for part, key in (("data", "name"), ("data", "root"), ("public", "name"), ("public", "root")):
        given = table[part][key]
        if given and Path(given).exists():
            table[part][key] = str(Path(given).resolve())
    if spec.student.encoder_weights and Path(spec.student.encoder_weights).exists():
        table["student"]["encoder_weights"] = str(Path(spec.student.encoder_weights).resolve())
    here = to_table(spec.features.in_folder(Path.cwd()))
    for key, path in here.items():
        if key in ("backbone", "weights", "cache") and path and Path(path.removeprefix(PREFIX)).exists():
            table["features"][key] = path
    return tomli_w.dumps(table)


def run_name(spec: RunSpec, out: Path) -> str:
    """Return the name of a run at the nodes, generated once and stored in the run's folder."""
    path = out / RUN
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["run"])
    name = f"{spec.name[:80]}-{spec.seed}-{secrets.token_hex(4)}"
    write_text(path, json.dumps({"run": name}) + "\n")
    return name


def raise_if_stopped(served: Path, out: Path) -> None:
    """Raise the error that stopped a run at the server, with the command that resumes it.

    Args:
        served: the run's folder at the server, or a downloaded copy.
        out: the run's own folder.
    """
    why = read_stop_reason(served)
    if why is None:
        return
    again = _resume_command(out)
    if why.is_refusal:
        raise FedstillError(f"the run is refused: {why.text}. Once that is changed there, {again} resumes it")
    if why.is_final:
        raise FedstillError(f"the run cannot be resumed as it is: {why.text}")
    raise FedstillError(f"the run stopped: {why.text}. To resume it: {again}")


def _resume_command(out: Path) -> str:
    return shlex.join(["fedstill", "run", "--resume", str(out)])


# --- rehearsal on this machine --------------------------------------------------------------------------

METRICS = "metrics.jsonl"
CONNECTION_TIMEOUT = 60.0  # seconds for the processes of a rehearsal to connect


def rehearse(spec: RunSpec, simulation: Simulation, out: Path, bars: ProgressBar) -> dict[str, Any]:
    """Run a simulation's nodes as separate processes on this machine.

    Args:
        spec: the run, with ``engine.backend`` ``flare`` or ``flare-poc``.
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
    if spec.engine.backend == "flare":
        print("Without --startup-kit this is a simulation, in FLARE's simulator.", file=sys.stderr)
    with lock_folder(out, "run"):
        home = out / "federation"
        names = [node.name for node in simulation.nodes]
        run = run_name(spec, out)
        if not (home / "nodes").exists():
            part = home / "nodes.part"
            shutil.rmtree(part, ignore_errors=True)
            write_nodes(spec, simulation, part)
            part.rename(home / "nodes")
        started = time.monotonic()
        served = home / "runs" / run
        if not (served / "result.json").exists():
            _link_metrics(served, out)
            with follow_file(served / PROGRESS_FILE, bars):
                if spec.engine.backend == "flare":
                    _run_simulator(spec, run, names, home)
                else:
                    _run_deployed(spec, run, names, home)
            raise_if_stopped(served, out)
        seconds = time.monotonic() - started
        return _evaluate_checkpoints(simulation, out, served, home / "nodes", run, seconds, bars)


def _write_server_rules(spec: RunSpec, folder: Path) -> None:
    """Write server rules that allow the resources which the run names.

    Args:
        folder: of the server.
    """
    table = parse_toml(server_config_toml(spec)) | {"plugins": spec.plugins}
    rules = server_rules.rules_allowing_run(table)
    write_text(folder / server_rules.FILE, tomli_w.dumps(to_table(rules)))


def _link_metrics(served: Path, out: Path) -> None:
    """Link the server's metrics into the run's own folder, for its report."""
    (out / METRICS).unlink(missing_ok=True)
    (out / METRICS).symlink_to(served.relative_to(out) / METRICS)


# --- a rehearsal's nodes ------------------------------------------------------------------------------


def write_nodes(spec: RunSpec, simulation: Simulation, folder: Path) -> None:
    """Write one folder per node like an owner's folder: node.toml, data, initial weights, secret.

    Args:
        simulation: built from the configuration, before any training.
        folder: parent of the nodes' folders.
    """
    parts = [node.data for node in simulation.setting.nodes]
    if spec.features:  # of which each node computes its own
        parts, _ = split_data(spec, load(spec.data, spec.task))
    for index, node in enumerate(simulation.nodes):
        node_folder = folder / node.name
        private_files.make_folder(folder)
        node_folder.mkdir(private_files.FOLDER_MODE)
        part = parts[index]
        tensors = {"inputs": part.inputs, "targets": part.targets}
        if part.groups is not None:
            tensors["groups"] = part.groups
        for name in ("data.safetensors", "model.safetensors"):
            private_files.create_empty(node_folder / name)
        save_file(
            {name: each.cpu().contiguous() for name, each in tensors.items()},
            node_folder / "data.safetensors",
        )
        model = simulation.setting.nodes[index].model
        model = (
            model[0] if isinstance(model, ClassMappedModel) else model
        )  # the node adds its class map again
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        if weights:  # a model that can only predict has none
            save_file(weights, node_folder / "model.safetensors")
        names, perceptual = spec.nodes.models, spec.nodes.perceptual
        weights_option = {"weights": "model.safetensors" if weights else "", "encoder_weights": ""}
        engine = spec.engine
        # Nodes of one machine share its cores.
        threads = engine.threads or max((os.cpu_count() or 1) // len(simulation.nodes), 1)
        file = NodeFile(
            name=node.name,
            seed=spec.seed,
            data=NodeDataConfig("tensors", "data.safetensors", group="groups" if "groups" in tensors else ""),
            model=NodeModelConfig(
                **(vars(parse_node_model(names[index % len(names)])) | weights_option),
                perceptual=perceptual if is_backbone(perceptual) else _absolute_path(perceptual),
                perceptual_weights=_absolute_path(spec.nodes.perceptual_weights),
            ),
            features=replace(spec.features, cache="").in_folder(Path.cwd()),
            local=spec.nodes.local,
            policy=_policy_allowing_run(spec),
            privacy=spec.nodes.privacy,
            compute=ComputeConfig(
                device=engine.device,
                precision=simulation.compute.precision,
                channels_last=engine.channels_last,
                threads=threads,
            ),
        )
        private_files.replace_file(node_folder / "node.toml", tomli_w.dumps(to_table(file)).encode())
        secret = f"{owner_folder.REHEARSAL_PREFIX}{simulation.secret(node.name)}\n"
        private_files.replace_file(node_folder / owner_folder.SECRET, secret.encode())
        private_files.create_empty(node_folder / SALT)  # the simulation has none


def _absolute_path(path: str) -> str:
    """Return an absolute path; an empty one is unchanged."""
    return str(Path(path).expanduser().resolve()) if path else ""


def _policy_allowing_run(spec: RunSpec) -> PolicyConfig:
    """Return the nodes' policy, which allows the method and the task of the rehearsal."""
    policy = spec.nodes.policy
    names = ((METHODS, method_name(spec.method)), (TASKS, spec.task.registered_name))
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
    if earlier := [each for each in checkpoint_query_numbers(folder) if each <= number]:
        return folder / checkpoint_name(max(earlier))
    learning = folder / TRAINING_STATE
    return learning if learning.exists() else None


# --- FLARE on this machine ----------------------------------------------------------------------------


def _run_simulator(spec: RunSpec, run: str, names: Sequence[str], home: Path) -> None:
    """Run in FLARE's simulator: a process for the server and one for each node, without certificates."""
    work = home / "simulator"
    shutil.rmtree(work, ignore_errors=True)
    job = write_run_job(spec, run, names, names, work / "job")
    _write_server_rules(spec, home)
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


def _run_deployed(spec: RunSpec, run: str, names: Sequence[str], home: Path) -> None:
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
    _write_server_rules(spec, deployed)
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
        job = admin.submit(write_run_job(spec, run, names, names, home / "job"))
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
