"""A site (server or node) on this machine: its startup kit, and its process: run, start, stop, query.

The process is FLARE's own server or client program, with the command line of FLARE's ``sub_start.sh`` and one
component of fedstill (:mod:`fedstill.federation.flare_component`). This module ensures one process per
folder, a log file, and that stopping a site ends all its processes. FLARE runs each job in another process,
which outlives its site by seconds or longer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from fedstill.core.errors import DeployError, FedstillError
from fedstill.core.private_files import is_locked, lock_file
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.federation.provision import (
    HEARTBEAT,
    require_flare,
    require_minimal_kit,
    write_json,
    write_node_permissions,
)

SERVER, CLIENT = "server", "client"  # the roles, as FLARE calls them


@dataclass(frozen=True)
class Site:
    """Paths and settings of a site.

    Args:
        role: ``SERVER`` or ``CLIENT``.
        folder: the owner's folder: of a node the one with node.toml, of a server the federation's.
    """

    role: str
    folder: Path

    @property
    def kit(self) -> StartupKit:
        """FLARE's startup kit of the site."""
        return StartupKit(self.folder / ("server" if self.role == SERVER else KIT_FOLDER))

    @property
    def target(self) -> str:
        """Host and port of the server, from the kit."""
        return self.kit.server_address(self.role)

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats of a node."""
        return self.kit.heartbeat(HEARTBEAT)

    @property
    def pid_file(self) -> Path:
        """File with the number of the site's process, locked while it runs."""
        return self.folder / ("server.pid" if self.role == SERVER else "node.pid")

    @property
    def log_file(self) -> Path:
        """Log file of the site."""
        return self.folder / ("server.log" if self.role == SERVER else "node.log")


def server(folder: Path) -> Site:
    """Return the server of the federation in a folder.

    Raises:
        DeployError: there is none.
    """
    return _require_kit_file(
        Site(SERVER, folder.resolve()), "fed_server.json", "make one with `fedstill server init`"
    )


def node(folder: Path) -> Site:
    """Return the node in its owner's folder.

    Raises:
        DeployError: there is no such folder, or it has no kit.
    """
    if not folder.is_dir():
        raise DeployError(f"there is no folder {folder}: `fedstill node init {folder}` makes one")
    hint = f"put the startup kit that you were given into {folder / KIT_FOLDER}"
    return _require_kit_file(Site(CLIENT, folder.resolve()), "fed_client.json", hint)


def _require_kit_file(site: Site, config: str, hint: str) -> Site:
    if not site.kit.path(config).is_file():
        raise DeployError(f"{site.folder} has no startup kit in {site.kit.folder.name}/: {hint}")
    return site


def is_reachable(address: str) -> bool:
    """Return whether ``host:port`` accepts a connection; TLS verifies later that it is the server."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5.0):
            return True
    except OSError:
        return False


def require_free_port(site: Site) -> None:
    """Refuse to start a server whose port is taken, as FLARE would retry for ever without a message.

    Raises:
        DeployError: the port is taken, or this process may not open it.
    """
    if site.role != SERVER:
        return
    host, _, port = site.target.rpartition(":")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            probe.bind(("127.0.0.1" if host == "localhost" or host.startswith("127.") else "", int(port)))
    except OSError as error:
        raise DeployError(f"port {port} of this machine cannot be opened: {error.strerror}") from error


# --- the site's process ---------------------------------------------------------------------------------

logger = logging.getLogger("fedstill.site")

JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Id of a job at FLARE's server, which is also the name of its folder in a kit."""
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
# Log levels. FLARE's own messages about a lost connection are repetitive, so fedstill logs changes instead.
LOG_LEVELS = {
    "fedstill": "INFO",
    "nvflare": "ERROR",
    "nvflare.fuel": "CRITICAL",
    "nvflare.private.fed.server.client_manager": "INFO",  # nodes that connect or are refused
    "nvflare.private.fed.server.fed_server": "INFO",  # nodes that are gone
}


def run(site: Site) -> NoReturn:
    """Replace this process by the site's, until SIGTERM, SIGINT, or until FLARE ends it.

    Raises:
        DeployError: the site runs already, its kit is invalid or its port is taken, or nvflare is not
            installed.
    """
    os.umask(0o077)  # files of this process and its jobs are readable by the owner only
    _require_valid_kit(site)
    lock = _lock(site)
    require_free_port(site)
    end_jobs(site)  # of a site that was killed
    _write_location_settings(site)
    until = f"{site.kit.valid_until:%Y-%m-%d}"
    logger.info("started as process %d; certificate valid until %s", os.getpid(), until)
    variable = "FEDSTILL_SERVER" if site.role == SERVER else "FEDSTILL_NODE"
    environment = {**_environment(os.environ), variable: str(site.folder)}
    os.set_inheritable(lock.fileno(), True)
    os.execve(sys.executable, _command(site), environment)


def start(site: Site, **options: Any) -> subprocess.Popen[bytes]:
    """Start a site in another process and return the process.

    Args:
        site: the site.
        options: arguments of :class:`subprocess.Popen`, such as ``stdout``.

    Raises:
        DeployError: see :func:`run`; or the process ends at once.
    """
    _require_valid_kit(site)
    if (number := process_id(site)) is not None:
        raise DeployError(f"{site.folder} runs already, as process {number}")
    require_free_port(site)
    environment = _environment(options.pop("env", None) or os.environ)
    words = [sys.executable, "-u", "-m", "fedstill.federation.flare_site", site.role, str(site.folder)]
    process = subprocess.Popen(words, env=environment, **options)
    while process_id(site) != process.pid:  # until then, stop() would not know of it
        if process.poll() is not None:
            raise DeployError(f"{site.folder} did not start: its process ended with {process.returncode}")
        time.sleep(0.05)
    return process


def stop(site: Site, grace: float = GRACE) -> bool:
    """Stop a site and its jobs.

    Returns:
        Whether it was running.

    Raises:
        DeployError: the process named in the site's file is not the site's.
    """
    import psutil

    number = process_id(site)
    if number is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(number)
            if not any(str(site.folder) in word for word in process.cmdline()):
                raise DeployError(
                    f"process {number}, which {site.pid_file} names, is no site: end it by hand"
                )
            process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(2 * grace)
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
    end_jobs(site)
    return number is not None


def process_id(site: Site) -> int | None:
    """Return the id of the site's process, or None if it does not run.

    Any number of processes may call it at once.
    """
    return int(site.pid_file.read_text() or 0) if is_locked(site.pid_file) else None


def end_jobs(site: Site) -> None:
    """End the processes of the site's jobs with SIGTERM, and with SIGKILL after a second."""
    import psutil

    jobs = list(job_processes(site))
    for job in jobs:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.terminate()
    for job in psutil.wait_procs(jobs, timeout=1.0)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.kill()


def job_processes(site: Site) -> Iterator[Any]:
    """Yield the processes of FLARE's job program that use this site's kit."""
    import psutil

    program = "server.runner_process" if site.role == SERVER else "client.worker_process"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            words = process.cmdline()
            if f"nvflare.private.fed.app.{program}" in words and str(site.kit.folder) in words:
                yield process


def python_path(given: str) -> str:
    """Return a PYTHONPATH with the folder of a fedstill that is not installed, for FLARE's job processes."""
    here = str(Path(__file__).parents[2])
    if here == sysconfig.get_paths()["purelib"]:
        return given
    return os.pathsep.join([here, *(path for path in given.split(os.pathsep) if path and path != here)])


def _environment(given: Any) -> dict[str, str]:
    return {**given, "PYTHONPATH": python_path(given.get("PYTHONPATH", ""))}


def _require_valid_kit(site: Site) -> None:
    require_flare()
    try:
        site.kit.require_valid()
        if site.role == CLIENT:
            require_minimal_kit(site.kit)
    except DeployError as error:
        if site.role == CLIENT:
            _record_invalid_kit(site.folder, error)
        raise


def _record_invalid_kit(folder: Path, error: DeployError) -> None:
    # Loads torch, which this process needs for nothing else.
    from fedstill.node.audit_entries import CERTIFICATE
    from fedstill.node.folder_log import SecurityEvents, process_user_name

    try:
        with contextlib.closing(SecurityEvents(folder)) as events:
            events.write(CERTIFICATE, process_user_name(), str(error))
    except FedstillError as fault:
        logger.error("the audit log cannot be written: %s", fault)


def _command(site: Site) -> list[str]:
    """Return the command line of the kit's ``sub_start.sh``; that file itself could have been modified."""
    program = f"nvflare.private.fed.app.{site.role}.{site.role}_train"
    words = [sys.executable, "-u", "-m", program, "-m", str(site.kit.folder), "-s", f"fed_{site.role}.json"]
    words += ["--set", "secure_train=true", "config_folder=config", "org=fedstill"]
    if site.role == SERVER:
        return words
    return [*words, f"uid={site.kit.node_name}", f"heart_beat_interval={site.heartbeat}"]


def _write_location_settings(site: Site) -> None:
    """Write settings that depend on the kit's location: log file, fedstill's component, and the folder of
    jobs."""
    file = {
        "class": "logging.handlers.WatchedFileHandler",
        "filename": str(site.log_file),
        "formatter": "line",
    }
    console = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "line"}
    handlers = {"console": console, "file": file}
    line = {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s", "datefmt": "%Y-%m-%d %H:%M:%S"}
    log = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": handlers,
        "root": {"level": "ERROR", "handlers": list(handlers)},
        "loggers": {name: {"level": level} for name, level in LOG_LEVELS.items()},
    }
    logging.config.dictConfig(log)
    local = site.kit.folder / "local"
    write_json(local / "log_config.json", log)
    (site.kit.folder / "transfer").mkdir(exist_ok=True)
    for folder in site.kit.folder.iterdir():  # left by jobs of a site that was killed
        if JOB_ID.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    path = "fedstill.federation.flare_component.SiteComponent"
    site_component = {"id": "fedstill", "path": path, "args": {"role": site.role, "folder": str(site.folder)}}
    if site.role == CLIENT:
        write_node_permissions(site.kit.folder, site_component)
        return
    (site.folder / "runs").mkdir(exist_ok=True)
    resources = json.loads((local / "resources.json").read_text())
    snapshots = site.kit.folder / "snapshots"
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(snapshots)
    components = [part for part in resources["components"] if part["id"] != site_component["id"]]
    for part in components:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(site.kit.folder / "jobs")
    write_json(local / "resources.json", {**resources, "components": [*components, site_component]})


def _lock(site: Site) -> IO[str]:
    """Lock the site's folder; the operating system releases the lock when the process ends in any way."""
    file = site.pid_file.open("a+")
    try:
        lock_file(file.fileno())
    except BlockingIOError:
        file.seek(0)
        number = file.read().strip()
        file.close()
        raise DeployError(f"{site.folder} runs already, as process {number}") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _main(role: str, folder: str) -> None:
    try:
        run((server if role == SERVER else node)(Path(folder)))
    except DeployError as error:
        sys.exit(f"fedstill: {error}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
