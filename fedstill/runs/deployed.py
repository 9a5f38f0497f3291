"""Run at a deployed federation: submit a job, follow its progress, fetch its results."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.core.dataset import DataSet
from fedstill.core.errors import DataError, DeployError, FedstillError
from fedstill.core.hashing import group_digits
from fedstill.core.name_normalization import natural_sort_key
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import lock_folder, write_text
from fedstill.core.text_format import json_text
from fedstill.data.config import DATA
from fedstill.data.loading import load
from fedstill.data.public import load_public
from fedstill.data.splits import Dirichlet
from fedstill.federation.admin import STOPPED, Admin, read_stop_reason
from fedstill.federation.flare import write_job
from fedstill.protocol.run_plan import describe
from fedstill.runs.config import NodesConfig, RunConfig, read_toml, to_dict
from fedstill.track.tracker_group import TrackerGroup

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


def submit(config: RunConfig, out: Path, bars: ProgressBar, listeners: TrackerGroup) -> dict[str, Any]:
    """Run at a deployed federation with the connected nodes and their data, models and policies.

    A resumed run continues with the nodes with which it was started: a node that has connected since does not
    take part, and one that is missing must be connected again unless a quorum is.

    Args:
        config: the run; ``engine.startup_kit`` is an admin's kit.
        out: folder of the run, into which all results are downloaded.
        bars: progress bars.
        listeners: trackers that get the metrics; the caller closes them.

    Returns:
        The server's part of ``result.json``.

    Raises:
        FedstillError: the server cannot be reached, refuses the run, or stopped it; the run can be resumed.
        RunFolderError: another process is running the run.
    """
    if config.nodes != NodesConfig() or config.split != Dirichlet():
        print("Options of nodes and split are ignored: a deployed federation has its own.", file=sys.stderr)
    with lock_folder(out, "run"), Admin(Path(config.engine.startup_kit)) as admin:
        run = run_name(config, out)
        _abort_jobs(admin, run)
        try:
            listeners.start(out, config.method.title)
            job, taking_part = _submit_job(admin, config, run, out)
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


def _submit_job(admin: Admin, config: RunConfig, run: str, out: Path) -> tuple[str, list[str]]:
    """Submit a run's job for the nodes of the run; return its id and the nodes that take part."""
    connected = _require_connected_nodes(admin)
    names: list[str] = json.loads((out / RUN).read_text(encoding="utf-8")).get("nodes", connected)
    absent = [name for name in names if name not in connected]
    taking_part = [name for name in names if name in connected]
    if len(taking_part) < config.link.min_nodes(len(names)):
        raise DeployError(
            f"not connected to the server at {admin.server}: {', '.join(absent)}. The run was started with "
            f"{'this node' if len(absent) == 1 else 'these nodes'}: once enough are connected again, "
            f"{_resume_command(out)} resumes it"
        )
    write_text(out / RUN, json.dumps({"run": run, "nodes": names}) + "\n")
    _print_fingerprint(config, run, len(names))
    job = admin.submit(write_run_job(config, run, taking_part, names, out / "job"))
    print(f"Job {job} with {', '.join(taking_part)}.", file=sys.stderr)
    return job, taking_part


def _print_fingerprint(config: RunConfig, run: str, nodes: int) -> None:
    """Print the SHA-256 of the run's description, which nodes' owners approve, if the data are here."""
    from fedstill.runs.remote_run import make_run_plan

    config = read_toml(server_config_toml(config))  # as the server reads it
    try:
        data = load(config.data, config.task, train_needed=False)
        _, public = load_public(config.public, data, config.task)
    except DataError:  # the server logs it
        return
    if note := unused_data_note(config, data):
        print(note, file=sys.stderr)
    sha256 = describe(make_run_plan(config, data, public, run, nodes), public).sha256
    print(f"The run is {group_digits(sha256)}: owners who approve runs see the same.", file=sys.stderr)


def unused_data_note(config: RunConfig, data: DataSet) -> str:
    """Return a note about training examples in the server's own data, which are not used; empty: none."""
    unused = len(data.train)
    if not unused or config.data.registered_name in DATA.builtin:
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
    config: RunConfig, run: str, connected: Sequence[str], nodes: Sequence[str], folder: Path
) -> Path:
    """Write a run's job into an empty folder.

    All connected nodes must take part at the start; later the quorum decides how many may be lost.

    Args:
        connected: nodes that take part now.
        nodes: all nodes with which the run was started.
    """
    shutil.rmtree(folder, ignore_errors=True)
    job_args = {"config": server_config_toml(config), "run": run, "nodes": list(nodes)}
    return write_job(folder, connected, job_args, name=run)


def server_config_toml(config: RunConfig) -> str:
    """Return the part of a configuration that the server needs, as TOML, with absolute paths.

    It has no options of nodes, trackers and folders with code.
    """
    table = to_dict(config)
    for theirs in ("nodes", "split", "paper", "track", "plugins"):
        table.pop(theirs, None)
    table["engine"]["startup_kit"] = ""
    for part, key in (("data", "name"), ("data", "root"), ("public", "name"), ("public", "root")):
        given = table[part][key]
        if given and Path(given).exists():
            table[part][key] = str(Path(given).resolve())
    return tomli_w.dumps(table)


def run_name(config: RunConfig, out: Path) -> str:
    """Return the name of a run at the nodes, generated once and stored in the run's folder."""
    path = out / RUN
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["run"])
    name = f"{config.name[:80]}-{config.seed}-{secrets.token_hex(4)}"
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
