"""A run at a deployed federation: handed in as a job, watched, and its results fetched."""

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
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import lock_folder, write_text
from fedstill.core.text_format import json_text
from fedstill.data.config import DATA
from fedstill.data.loading import load
from fedstill.data.public import load_public
from fedstill.data.splits import Dirichlet
from fedstill.federation.admin import Admin
from fedstill.federation.flare_job import write_job
from fedstill.federation.node_order import natural_sort_key
from fedstill.federation.run_status import STOPPED, read_stop_reason
from fedstill.protocol.run_plan import describe
from fedstill.runs.config import NodesConfig, RunConfig, read_toml, to_dict
from fedstill.track.tracker_group import TrackerGroup

RUN = "live.json"  # in the run's folder: its name among the nodes, and at a deployed federation their names
ENDING = 20.0  # seconds for a job that was ended to be over
SLOW, LATE = 15.0, 10.0  # seconds until it is said that a job waits, and between two looks for whom
EVERY = 2.0  # seconds between two looks how far it is


def reach(kit: Path) -> None:
    """See whether a run could begin at a deployed federation: the kit is let in, and a node is there.

    Raises:
        DeployError: it could not.
    """
    with Admin(kit) as admin:
        _connected(admin)


def submit(config: RunConfig, out: Path, bars: ProgressBar, listeners: TrackerGroup) -> dict[str, Any]:
    """Run at a deployed federation, with the nodes that are there; data, models and policies are theirs.

    The nodes with which a run begins are those with which it goes on: a node that has come since has no part
    in it, and one that is away is waited for by whoever resumes it.

    Args:
        config: the run; ``engine.startup_kit`` is an admin's kit.
        out: the run's folder, into which all results are fetched.
        listeners: hear its metrics as they come; that it is over is the caller's to tell them.

    Returns:
        What the server found out, as ``result.json`` holds it.

    Raises:
        FedstillError: the server cannot be reached, refuses or stopped; the run can go on.
        RunFolderError: another process is at work on the run.
    """
    if config.nodes != NodesConfig() or config.split != Dirichlet():
        print("What this run says of nodes and split is not used: these are the nodes' own.", file=sys.stderr)
    with lock_folder(out, "run"), Admin(Path(config.engine.startup_kit)) as admin:
        run = run_name(config, out)
        _end_jobs(admin, run)
        try:
            listeners.start(out, config.method.title)
            job, taking_part = _begin(admin, config, run, out)
            heard = MetricsFollower(out / "metrics.jsonl", listeners)
            try:
                with bars:
                    status = _waited(admin, job, taking_part, bars, heard)
                fetched = admin.download(job, out / "fetched")
            except DeployError as error:
                raise DeployError(f"{error}. To go on with the run: {_resuming(out)}") from error
            result = _taken_home(fetched, out, f"job {job} ended as {status} and left no result")
            heard.rest()
        except BaseException:  # Ctrl-C, too
            listeners.close(None)
            raise
        return result


class MetricsFollower:
    """What the server has measured so far: in the run's folder, for its page, and told to its listeners.

    Args:
        path: the file, of which a new one begins: a run that goes on tells all anew.
    """

    def __init__(self, path: Path, listeners: TrackerGroup) -> None:
        self._path, self._listeners, self.known = path, listeners, 0
        path.unlink(missing_ok=True)

    def take(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Some more lines."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json_text(line, indent=None) + "\n" for line in lines)
        self.known += len(lines)
        self._listeners.log(lines)

    def rest(self) -> None:
        """What the file has now beside these, the server's own having taken its place."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        self._listeners.log([json.loads(line) for line in lines[self.known :]])


def _begin(admin: Admin, config: RunConfig, run: str, out: Path) -> tuple[str, list[str]]:
    """Hand in a run's job, for the nodes with which the run began; and which of them take part."""
    there = _connected(admin)
    names: list[str] = json.loads((out / RUN).read_text(encoding="utf-8")).get("nodes", there)
    absent = [name for name in names if name not in there]
    taking_part = [name for name in names if name in there]
    if len(taking_part) < config.link.min_nodes(len(names)):
        raise DeployError(
            f"not connected to the server at {admin.server}: {', '.join(absent)}. The run began with "
            f"{'this node' if len(absent) == 1 else 'these nodes'}: once enough are there again, "
            f"{_resuming(out)} goes on"
        )
    write_text(out / RUN, json.dumps({"run": run, "nodes": names}) + "\n")
    _say_what(config, run, len(names))
    job = admin.submit(write_run_job(config, run, taking_part, names, out / "job"))
    print(f"Job {job} with {', '.join(taking_part)}.", file=sys.stderr)
    return job, taking_part


def _say_what(config: RunConfig, run: str, nodes: int) -> None:
    """Print by which SHA-256 nodes' owners know what they are asked to approve, if the data are here."""
    from fedstill.runs.remote_run import plan_of

    config = read_toml(server_config_toml(config))  # as the server reads it
    try:
        data = load(config.data, config.task, train_needed=False)
        _, public = load_public(config.public, data, config.task)
    except DataError:  # the server's log has it
        return
    if told := unused_data_note(config, data):
        print(told, file=sys.stderr)
    sha256 = describe(plan_of(config, data, public, run, nodes), public).sha256
    print(f"The run is {group_digits(sha256)}: owners who approve runs see the same.", file=sys.stderr)


def unused_data_note(config: RunConfig, data: DataSet) -> str:
    """What of the server's own file it does not test on, which whoever wrote it may not expect; empty:
    nothing."""
    rest = len(data.train)
    if not rest or config.data.registered_name in DATA.builtin:
        return ""
    split = "data.test_fraction, or a column `split`, says which"
    told = f"The run is tested on {len(data.test)} examples of {data.name}"
    return f"{told}: the other {rest} are its training part, which a server does not use ({split})."


def _connected(admin: Admin) -> list[str]:
    names = sorted(admin.nodes(), key=natural_sort_key)
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


def _waits_for(admin: Admin, nodes: Sequence[str]) -> str:
    """Why a job does not begin: a node may have left just before it was handed in."""
    there = admin.nodes()
    if absent := ", ".join(node for node in nodes if node not in there):
        return f"waiting for {absent}, which has left: Ctrl+C ends this, and the run can be begun without"
    return "waiting: FLARE begins once all these nodes are free"


def _waited(
    admin: Admin, job: str, taking_part: Sequence[str], bars: ProgressBar, heard: MetricsFollower
) -> str:
    """Wait for a job and report its progress; the job ends where waiting is interrupted."""
    since, said, asked, waits = time.monotonic(), "", 0.0, ""
    try:
        while not (status := admin.status(job)).startswith("FINISHED"):
            now = status.lower()
            if status == "SUBMITTED" and time.monotonic() - since > SLOW:
                if time.monotonic() - asked > LATE:
                    waits, asked = _waits_for(admin, taking_part), time.monotonic()
                now = waits
            if now != said:
                print(f"  {now}", file=sys.stderr)
                said = now
            if now == "running" and time.monotonic() - asked > EVERY:
                (progress_bars, lines), asked = admin.progress(job, heard.known), time.monotonic()
                heard.take(lines)
                if progress_bars is not None:
                    bars.show_snapshot(progress_bars)
            time.sleep(1.0)
    except KeyboardInterrupt:
        with contextlib.suppress(DeployError):
            admin.abort(job)
        raise
    return status


def _taken_home(fetched: Path, out: Path, otherwise: str) -> dict[str, Any]:
    """Take the results out of what a job left, into the run's folder."""
    found = [*sorted(fetched.rglob("result.json")), *sorted(fetched.rglob(f"fedstill/{STOPPED}"))]
    if not found:
        raise DeployError(f"{otherwise}: the server's log says why")
    served = found[0].parent
    raise_if_stopped(served, out)
    for path in served.iterdir():
        if path.is_file() and path.name not in ("config.toml", STOPPED):
            shutil.copy2(path, out / path.name)
    shutil.rmtree(out / "fetched")
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    (out / "result.json").unlink()  # until the report's caller writes it, whole
    return result


# --- what a job is told, and why it stopped ---


def write_run_job(
    config: RunConfig, run: str, there: Sequence[str], nodes: Sequence[str], folder: Path
) -> Path:
    """Write a run's job into a folder, anew.

    All that are there are mandatory, and only at the start: how many may be lost is the quorum's to say.

    Args:
        there: nodes that take part now.
        nodes: all with which the run began.
    """
    shutil.rmtree(folder, ignore_errors=True)
    told = {"config": server_config_toml(config), "run": run, "nodes": list(nodes)}
    return write_job(folder, there, told, name=run)


def server_config_toml(config: RunConfig) -> str:
    """What of a run its server has to know, as TOML: nothing of nodes, trackers or folders with code, and
    whole paths."""
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
    """The name by which nodes know a run, made up once and kept in the run's folder."""
    path = out / RUN
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["run"])
    name = f"{config.name[:80]}-{config.seed}-{secrets.token_hex(4)}"
    write_text(path, json.dumps({"run": name}) + "\n")
    return name


def raise_if_stopped(served: Path, out: Path) -> None:
    """Pass on why a run stopped at the server, with the command that goes on.

    Args:
        served: the run's folder at the server, or what was fetched of it.
    """
    why = read_stop_reason(served)
    if why is None:
        return
    again = _resuming(out)
    if why.refused:
        raise FedstillError(f"the run is refused: {why.text}. Once that is changed there, {again} goes on")
    if why.final:
        raise FedstillError(f"the run cannot go on as it is: {why.text}")
    raise FedstillError(f"the run stopped: {why.text}. To go on: {again}")


def _resuming(out: Path) -> str:
    return shlex.join(["fedstill", "run", "--resume", str(out)])
