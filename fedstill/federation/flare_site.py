"""A site of a federation as a process of this machine: run it, start it, stop it, see whether it runs.

It is FLARE's own server or client program, with the command line that FLARE's ``sub_start.sh`` gives it
and one component of ours (:mod:`fedstill.federation.flare_component`). What is ours around it: one process
per folder, a log, and an end with everything that it began. FLARE runs each job in a process of its own, and
a job's process outlives its site by seconds or longer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from fedstill.core.errors import DeployError
from fedstill.core.private_files import is_locked, lock
from fedstill.federation.flare_kit import CLIENT, SERVER, Site, check_port, node, server
from fedstill.federation.flare_permissions import check_node_kit, write_json, write_node_rules
from fedstill.federation.provision import require_flare
from fedstill.node.security_log import SecurityLog, account

logger = logging.getLogger("fedstill.site")

JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""What FLARE's server calls a job: a random number, which is the name of its folder in a kit."""
GRACE = 5.0  # seconds that a process has between SIGTERM and SIGKILL
# What is logged, and from which severity on: a node's contact says in two lines what FLARE's messages say
# again and again while a link is down.
LEVELS = {
    "fedstill": "INFO",
    "nvflare": "ERROR",
    "nvflare.fuel": "CRITICAL",
    "nvflare.private.fed.server.client_manager": "INFO",  # who comes, who is not let in
    "nvflare.private.fed.server.fed_server": "INFO",  # who is gone
}


def run(site: Site) -> NoReturn:
    """Become the site's process, in the foreground, until SIGTERM, SIGINT, or until FLARE ends it.

    Raises:
        DeployError: the site runs already, its kit is not good or its port is taken, or nvflare is not
            installed.
    """
    os.umask(0o077)  # of this process and the jobs that it begins: what they write is the owner's alone
    _check(site)
    lock = _lock(site)
    check_port(site)
    end_jobs(site)  # of a site that was killed
    _settle(site)
    until = f"{site.kit.valid_until:%Y-%m-%d}"
    logger.info("started as process %d; certificate valid until %s", os.getpid(), until)
    told = "FEDSTILL_SERVER" if site.role == SERVER else "FEDSTILL_NODE"
    environment = {**_environment(os.environ), told: str(site.folder)}
    os.set_inheritable(lock.fileno(), True)
    os.execve(sys.executable, _command(site), environment)


def start(site: Site, **options: Any) -> subprocess.Popen[bytes]:
    """The site in a process of its own; `options` are those of Popen, as stdout.

    Raises:
        DeployError: see :func:`run`; or it ends at once.
    """
    _check(site)
    if (number := running(site)) is not None:
        raise DeployError(f"{site.folder} runs already, as process {number}")
    check_port(site)
    environment = _environment(options.pop("env", None) or os.environ)
    words = [sys.executable, "-u", "-m", "fedstill.federation.flare_site", site.role, str(site.folder)]
    process = subprocess.Popen(words, env=environment, **options)
    while running(site) != process.pid:  # until then, stop() would not know of it
        if process.poll() is not None:
            raise DeployError(f"{site.folder} did not start: its process ended with {process.returncode}")
        time.sleep(0.05)
    return process


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
            if not any(str(site.folder) in word for word in process.cmdline()):
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
    return int(site.pid.read_text() or 0) if is_locked(site.pid) else None


def end_jobs(site: Site) -> None:
    """End the processes of the site's jobs: SIGTERM first, SIGKILL after a second."""
    import psutil

    jobs = list(jobs_of(site))
    for job in jobs:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.terminate()
    for job in psutil.wait_procs(jobs, timeout=1.0)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.kill()


def jobs_of(site: Site) -> Iterator[Any]:
    """Processes of FLARE's job program that were given this site's kit."""
    import psutil

    program = "server.runner_process" if site.role == SERVER else "client.worker_process"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            words = process.cmdline()
            if f"nvflare.private.fed.app.{program}" in words and str(site.kit.folder) in words:
                yield process


def python_path(given: str) -> str:
    """With the folder of a fedstill that is not installed, so that FLARE's job processes find it."""
    here = str(Path(__file__).parents[2])
    if here == sysconfig.get_paths()["purelib"]:
        return given
    return os.pathsep.join([here, *(path for path in given.split(os.pathsep) if path and path != here)])


def _environment(given: Any) -> dict[str, str]:
    return {**given, "PYTHONPATH": python_path(given.get("PYTHONPATH", ""))}


def _check(site: Site) -> None:
    require_flare()
    try:
        site.kit.require_in_force()
        if site.role == CLIENT:
            check_node_kit(site.kit)
    except DeployError as error:
        if site.role == CLIENT:
            SecurityLog(site.folder).write("certificate", account(), str(error))
        raise


def _command(site: Site) -> list[str]:
    """The command line in the kit's ``sub_start.sh``, which whoever made the kit could have changed."""
    program = f"nvflare.private.fed.app.{site.role}.{site.role}_train"
    words = [sys.executable, "-u", "-m", program, "-m", str(site.kit.folder), "-s", f"fed_{site.role}.json"]
    words += ["--set", "secure_train=true", "config_folder=config", "org=fedstill"]
    if site.role == SERVER:
        return words
    return [*words, f"uid={site.kit.name}", f"heart_beat_interval={site.heartbeat}"]


def _settle(site: Site) -> None:
    """Write into the kit what depends on where it is: the log, our component, where the server keeps its
    jobs, and that a node keeps none."""
    file = {"class": "logging.handlers.WatchedFileHandler", "filename": str(site.log), "formatter": "line"}
    console = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "line"}
    handlers = {"console": console, "file": file}
    line = {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s", "datefmt": "%Y-%m-%d %H:%M:%S"}
    log = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": handlers,
        "root": {"level": "ERROR", "handlers": list(handlers)},
        "loggers": {name: {"level": level} for name, level in LEVELS.items()},
    }
    logging.config.dictConfig(log)
    local = site.kit.folder / "local"
    write_json(local / "log_config.json", log)
    (site.kit.folder / "transfer").mkdir(exist_ok=True)
    for folder in site.kit.folder.iterdir():  # of jobs whose site was killed
        if JOB.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    path = "fedstill.federation.flare_component.SiteComponent"
    ours = {"id": "fedstill", "path": path, "args": {"role": site.role, "folder": str(site.folder)}}
    if site.role == CLIENT:
        write_node_rules(site.kit.folder, ours)
        return
    (site.folder / "runs").mkdir(exist_ok=True)
    resources = json.loads((local / "resources.json").read_text())
    snapshots = site.kit.folder / "snapshots"
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(snapshots)
    components = [part for part in resources["components"] if part["id"] != ours["id"]]
    for component in components:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(site.kit.folder / "jobs")
    write_json(local / "resources.json", {**resources, "components": [*components, ours]})


def _lock(site: Site) -> IO[str]:
    """The lock of the site's folder: the system frees it however the process ends that holds it."""
    file = site.pid.open("a+")
    try:
        lock(file.fileno())
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
