"""A site of a federation as a process of this machine: run it, start it, stop it, see whether it runs.

A site is FLARE's own server or client program, run in the foreground of one process with the command
line that FLARE's ``sub_start.sh`` gives it; what is ours is around it: one process per folder, a log of
our own lines, and an end with everything that it began. FLARE runs each job in a process of its own,
and a job's process outlives its site by seconds or longer, so SIGTERM ends those first.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import logging.config
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fedstill.core.certificates import valid_until
from fedstill.core.errors import DeployError
from fedstill.federation.contact import Contact, watch
from fedstill.federation.provision import (
    HEARTBEAT,
    check_kit,
    check_node_kit,
    require_flare,
    write_node_rules,
)

# Of what FLARE logs at INFO: who came, who left, who is not let in.
_TELLING = re.compile("Client: New|Remove the dead|Re-activate|Client .* (en|dis)abled|Reject disabled")
# What it says again with every message while a link is down; a node's contact says it in its place.
_UNREACHABLE = re.compile("target_unreachable|cannot forward req: no path|no connection to server")
_HEARD = ("fedstill", "nvflare.private.fed", "nvflare.fuel.f3.sfm")
_LOG = logging.getLogger(__name__ if __name__ != "__main__" else "fedstill.federation.site")
# What a server may ask of a node's own process; questions go to the process of a job.
TOPICS = frozenset(
    {
        "scheduler.check_resource",
        "scheduler.cancel_resource",
        "train.start_job",
        "train.deploy",
        "train.abort",
        "train.abort_task",
        "train.delete_run",
        "train.check_status",
        "train.get_scopes",
        "train.notify_job_status",
    }
)
FOLDERS = "fedstill_job_folders"  # what removes them in FLARE's program of a node
PROGRAMS = ("fedstill", "fedstill.federation.site")  # that are sites
GRACE = 5.0  # seconds that a process has between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Site:
    """Where the parts of a site are.

    Args:
        role: ``server`` or ``client``, as FLARE calls them.
        folder: the owner's folder: of a node the one with node.toml, of a server the federation's.
    """

    role: str
    folder: Path

    @property
    def kit(self) -> Path:
        """The startup kit."""
        return self.folder / ("server" if self.role == "server" else "kit")

    @property
    def pid(self) -> Path:
        """The file that is locked as long as the site runs, and holds the number of its process."""
        return self.folder / ("server.pid" if self.role == "server" else "node.pid")

    @property
    def log(self) -> Path:
        """What the site did, one line each."""
        return self.folder / ("server.log" if self.role == "server" else "node.log")

    @property
    def job_module(self) -> str:
        """FLARE's program of one job."""
        return "server.runner_process" if self.role == "server" else "client.worker_process"


class Telling(logging.Filter):
    """Lets through what the owner of a site wants to read: our lines, errors, and who comes and goes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written; it names us by module, and FLARE, with its many, by its name."""
        ours, text = record.name.split(".")[0] == "fedstill", record.getMessage()
        record.part = record.name.rpartition(".")[2] if ours else "flare"
        if record.levelno >= logging.ERROR:
            return _UNREACHABLE.search(text) is None
        return ours or _TELLING.match(text) is not None


class Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the terminal, or to a pipe; where nobody reads that any more, the site goes on regardless."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say what is wrong with the log, unless it is only that."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)


def server(folder: Path) -> Site:
    """The server of the federation in this folder.

    Raises:
        DeployError: there is none.
    """
    return _site(Site("server", folder.resolve()), "fed_server.json", "make one with `fedstill server init`")


def node(folder: Path) -> Site:
    """The node in its owner's folder.

    Raises:
        DeployError: it has no kit.
    """
    hint = f"put the startup kit that you were given into {folder / 'kit'}"
    return _site(Site("client", folder.resolve()), "fed_client.json", hint)


def _site(site: Site, config: str, hint: str) -> Site:
    if not (site.kit / "startup" / config).is_file():
        raise DeployError(f"{site.folder} has no startup kit in {site.kit.name}/: {hint}")
    return site


def run(site: Site) -> int:
    """Be the site, in the foreground, until SIGTERM, SIGINT, or until FLARE ends it.

    Returns:
        The exit code of FLARE's program, 0 after a signal.

    Raises:
        DeployError: the site runs already, its kit is not good or its port is taken, or nvflare is not
            installed.
    """
    os.umask(0o077)  # of this process and the jobs that it begins: what they write is the owner's alone
    require_flare()
    check_kit(site.kit)
    if site.role == "client":
        check_node_kit(site.kit)
    with _alone(site):
        check_port(site)
        end_jobs(site)  # of a site that was killed
        _settle(site)
        until = f"{valid_until(site.kit):%Y-%m-%d}"
        _LOG.info("started as process %d; certificate valid until %s", os.getpid(), until)
        os.environ["FEDSTILL_RUNS" if site.role == "server" else "FEDSTILL_NODE"] = str(
            site.folder / "runs" if site.role == "server" else site.folder
        )
        os.environ["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH", ""))
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, _end)
        if site.role == "client":
            _narrow()
            watch(Contact(_target(site)))
        sys.argv = _command(site)
        try:
            runpy.run_module(f"nvflare.private.fed.app.{site.role}.{site.role}_train", run_name="__main__")
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        finally:
            end_jobs(site)
        _LOG.info("ended")
        os.truncate(site.pid, 0)  # not deleted: whoever starts the site just now waits for its lock
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(code)  # FLARE leaves threads that would keep the process for half a minute


def start(site: Site, **options: Any) -> subprocess.Popen[bytes]:
    """The site in a process of its own; `options` are those of Popen, as stdout.

    Raises:
        DeployError: see :func:`run`; or it ends at once.
    """
    require_flare()
    check_kit(site.kit)
    if site.role == "client":
        check_node_kit(site.kit)
    if (number := running(site)) is not None:
        raise DeployError(f"{site.folder} runs already, as process {number}")
    check_port(site)
    environment = dict(options.pop("env", None) or os.environ)
    environment["PYTHONPATH"] = python_path(environment.get("PYTHONPATH", ""))
    words = [sys.executable, "-u", "-m", "fedstill.federation.site", site.role, str(site.folder)]
    process = subprocess.Popen(words, env=environment, **options)
    while running(site) != process.pid:  # until then, stop() would not know of it
        if process.poll() is not None:
            raise DeployError(f"{site.folder} did not start: its process ended with {process.returncode}")
        time.sleep(0.05)
    return process


def start_server(folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """The server of the federation in this folder, in a process of its own; see :func:`start`."""
    return start(server(folder), **options)


def start_node(folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """The node in its owner's folder, in a process of its own; see :func:`start`."""
    return start(node(folder), **options)


def stop(site: Site, grace: float = GRACE) -> bool:
    """End the site with all that it began.

    Returns:
        Whether it ran.

    Raises:
        DeployError: what the site's file names is another's process.
    """
    import psutil

    number = running(site)
    if number is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(number)
            if not any(Path(word).name in PROGRAMS for word in process.cmdline()):
                raise DeployError(f"process {number}, which {site.pid} names, is no site: end it by hand")
            process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(2 * grace)
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
    end_jobs(site)
    return number is not None


def running(site: Site) -> int | None:
    """The number of the site's process, or None if it does not run.

    Any number may ask at once: their locks are shared, and only the site's own excludes them.
    """
    import fcntl

    try:
        with site.pid.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return int(file.read() or 0)
    except FileNotFoundError:
        pass
    return None


def check_port(site: Site) -> None:
    """Refuse to start a server whose port is taken: FLARE itself would try for ever, and say nothing.

    Raises:
        DeployError: it is taken, or not for us to open.
    """
    if site.role != "server":
        return
    host, _, port = _target(site).rpartition(":")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what waits to be forgotten is free
            probe.bind(("127.0.0.1" if host == "localhost" or host.startswith("127.") else "", int(port)))
    except OSError as error:
        raise DeployError(f"port {port} of this machine cannot be opened: {error.strerror}") from error


def _target(site: Site) -> str:
    """Host and port of the server, as the kit names them."""
    config = json.loads((site.kit / "startup" / f"fed_{site.role}.json").read_text())
    return str(config["servers"][0]["service"]["target"])


def end_jobs(site: Site, grace: float = 1.0) -> None:
    """End the processes of the site's jobs: SIGTERM first, SIGKILL after `grace` seconds."""
    import psutil

    jobs = list(_jobs(site))
    for job in jobs:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.terminate()
    for job in psutil.wait_procs(jobs, timeout=grace)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.kill()


def _jobs(site: Site) -> Iterator[Any]:
    """Processes of FLARE's job program that were given this site's kit."""
    import psutil

    module = f"nvflare.private.fed.app.{site.job_module}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            words = process.cmdline()
            if module in words and str(site.kit) in words:
                yield process


def _command(site: Site) -> list[str]:
    """The command line in the kit's ``sub_start.sh``."""
    words = [f"{site.role}_train", "-m", str(site.kit), "-s", f"fed_{site.role}.json", "--set"]
    words += ["secure_train=true", "config_folder=config"]
    if site.role == "server":
        return [*words, "org=fedstill"]
    config = json.loads((site.kit / "startup" / "fed_client.json").read_text())
    name = config["client"]["fqsn"]
    try:
        heartbeat = json.loads((site.kit / "local" / "fedstill.json").read_text())["heartbeat"]
    except FileNotFoundError:  # a kit that FLARE's tools made alone
        heartbeat = HEARTBEAT
    return [*words, f"uid={name}", "org=fedstill", f"heart_beat_interval={heartbeat}"]


def _narrow() -> None:
    """Leave FLARE's client only the requests that jobs need, of jobs only.

    It has more: to read files, to shut down, to change the log. Whether one is allowed, FLARE decides by
    what the server writes beside the request, so a server with other software could have them all.

    Nor may a job be called as it likes: FLARE removes and writes the folder of that name in the kit, and
    ``startup`` and ``local``, which hold the node's key and its rules, are folders there, too.
    """
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

    processors = ClientRequestProcessors.request_processors
    processors[:] = [copy.copy(item) for item in processors if set(item.get_topics()) <= TOPICS]
    for item in processors:
        item.process = _of_a_job(item.process)


def _of_a_job(process: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What answers a request, for requests that name no job, or one as FLARE's own server names them."""
    from nvflare.private.admin_defs import error_reply
    from nvflare.private.defs import RequestHeader

    from fedstill.federation.jobs import JOB

    def checked(request: Any, engine: Any) -> Any:
        job = request.get_header(RequestHeader.JOB_ID)
        if job and not (isinstance(job, str) and JOB.fullmatch(job)):
            _LOG.warning("refused %s of a job that is none", request.topic)
            return error_reply("a job's id is a UUID")
        return process(request, engine)

    return checked


def _settle(site: Site) -> None:
    """Write into the kit what depends on where it is: the log, where the server keeps its jobs, and that a
    node keeps none."""
    from fedstill.federation.jobs import remove

    line = {"format": "%(asctime)s %(levelname)s %(part)s: %(message)s", "datefmt": "%Y-%m-%d %H:%M:%S"}
    both = {"formatter": "line", "filters": ["telling"]}
    log = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "filters": {"telling": {"()": "fedstill.federation.site.Telling"}},
        "handlers": {
            "console": {"class": "fedstill.federation.site.Console", "stream": "ext://sys.stdout", **both},
            "file": {"class": "logging.handlers.WatchedFileHandler", "filename": str(site.log), **both},
        },
        "root": {"level": "ERROR", "handlers": ["console", "file"]},
        "loggers": {name: {"level": "INFO"} for name in _HEARD},
    }
    logging.config.dictConfig(log)
    local = site.kit / "local"
    (local / "log_config.json").write_text(json.dumps(log, indent=2) + "\n")
    (site.kit / "transfer").mkdir(exist_ok=True)
    remove(site.kit)  # of jobs whose site was killed
    if site.role == "server":
        resources = json.loads((local / "resources.json").read_text())
        (site.folder / "runs").mkdir(exist_ok=True)
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(site.kit / "snapshots")
        for component in resources["components"]:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = str(site.kit / "jobs")
        (local / "resources.json").write_text(json.dumps(resources, indent=2) + "\n")
    else:
        path = "fedstill.federation.jobs.JobFolders"
        write_node_rules(site.kit, {"id": FOLDERS, "path": path, "args": {"kit": str(site.kit)}})


@contextlib.contextmanager
def _alone(site: Site) -> Iterator[None]:
    """Hold the lock of the site's folder: the system frees it however this process ends."""
    import fcntl

    with site.pid.open("a+") as file:
        end = time.monotonic() + 1  # whoever asks whether it runs, holds the lock for a moment
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    file.seek(0)
                    number = file.read().strip()
                    raise DeployError(f"{site.folder} runs already, as process {number}") from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def python_path(given: str) -> str:
    """With the folder of a fedstill that is not installed, so that FLARE's job processes find it."""
    here = str(Path(__file__).parents[2])
    if here == sysconfig.get_paths()["purelib"]:
        return given
    return os.pathsep.join([here, *(path for path in given.split(os.pathsep) if path and path != here)])


def _main(role: str, folder: str) -> None:
    try:
        sys.exit(run((server if role == "server" else node)(Path(folder))))
    except DeployError as error:
        sys.exit(f"fedstill: {error}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
