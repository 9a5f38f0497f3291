"""The server's program in FLARE's job: it runs a run and stores the results for download."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from fedstill.core.config_tables import parse_toml
from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.core.hashing import group_digits
from fedstill.core.name_normalization import check_run_name
from fedstill.core.private_files import lock_file
from fedstill.core.progress import PROGRESS_FILE, ProgressFile, ProgressSnapshot
from fedstill.core.registry import add_search_folders
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import to_printable_line
from fedstill.federation import server_rules
from fedstill.federation.admin import JOB, METRICS, PROGRESS_TOPIC, STOPPED
from fedstill.federation.flare import RUNS, SERVER_FOLDER, FlareLink, read_environment_variable
from fedstill.federation.flare_component import subscribe_to_lost_nodes
from fedstill.runs.remote_run import RemoteRun
from fedstill.runs.results import write_results
from fedstill.runs.spec import RunSpec, read_toml

logger = logging.getLogger("fedstill.server")
DESCRIPTION = "description.json"  # in a run's folder: the description that nodes' owners approve
MAX_LINES = 500  # lines of metrics in one progress reply
MAX_ERROR_LENGTH = 20_000  # characters of the reason why a run stopped
UNEXPECTED_ERROR = "unexpected error: see the server's log"


class ServerProgram:
    """The server's program of one run in FLARE's job.

    Args:
        config: the run's configuration as TOML; the server's owner restricts it
            (:mod:`fedstill.federation.server_rules`).
        run: name of the run; an interrupted run of this name is resumed.
        nodes: all nodes with which the run was started, also those that are not in this job. Default: the
            nodes of this job.

    Raises:
        ArgumentError: the run's name is invalid.
    """

    def __init__(self, config: str, run: str, nodes: Sequence[str] = ()) -> None:
        check_run_name(run)  # it names a folder
        self.config, self.run_name, self.nodes = config, run, list(nodes)
        self._active_run: RemoteRun | None = None
        self._link: FlareLink | None = None

    @collab.main  # type: ignore[untyped-decorator,unused-ignore]
    def main(self) -> None:
        """Run, and store the results in the job's workspace for download."""
        folder = Path(read_environment_variable(SERVER_FOLDER)) / RUNS / self.run_name
        engine = collab.fl_ctx.get_engine()

        def reply(topic: str, asked: Mapping[str, int], fl_ctx: object) -> dict[str, Any]:
            snapshot, known = ProgressSnapshot.read(folder / PROGRESS_FILE), asked[METRICS]
            lines = (
                []
                if self._active_run is None
                else self._active_run.records.metrics[known : known + MAX_LINES]
            )
            return {"note": "" if snapshot is None else snapshot.to_json(), METRICS: lines}

        engine.register_app_command(PROGRESS_TOPIC, reply)
        subscribe_to_lost_nodes(engine, self._drop_node)
        results_folder = Path(collab.workspace.get_run_dir(collab.fl_ctx.get_job_id())) / "fedstill"
        self._run_in_folder(folder, results_folder)

    def _drop_node(self, node: str) -> None:
        """Stop waiting for a node that FLARE does not let back into this job."""
        if self._link is not None:
            logger.warning("%s is connected, but its process for this run has ended", to_printable_line(node))
            self._link.drop_node(node)

    def _run_in_folder(self, folder: Path, results_folder: Path) -> None:
        """Run in a folder that is locked by this job.

        Args:
            folder: of the run, shared by all jobs of its name.
            results_folder: folder for this job's results.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / JOB).open("w") as job_lock:
            try:
                lock_file(job_lock.fileno())
            except BlockingIOError:
                results_folder.mkdir(parents=True)
                self._write_stop_reason(
                    results_folder, RunFolderError(f"{folder} is in use by another job of this run")
                )
                return
            (folder / STOPPED).unlink(missing_ok=True)
            # Other errors are raised to FLARE, which logs them; the client gets this text.
            failure: Exception | None = FedstillError(UNEXPECTED_ERROR)
            try:
                self._run(folder)
                failure = None
            except (FedstillError, OSError) as error:
                failure = error
            finally:
                if failure is not None:
                    self._write_stop_reason(folder, failure)
                ignored = shutil.ignore_patterns("state.safetensors*", f"{PROGRESS_FILE}*", JOB)
                shutil.copytree(folder, results_folder, ignore=ignored)

    def _write_stop_reason(self, folder: Path, error: Exception) -> None:
        """Write the reason why a run stopped."""
        reason = {"error": type(error).__name__, "text": to_printable_line(error, MAX_ERROR_LENGTH)}
        logger.error("run %s stopped: %s", self.run_name, reason["text"])
        write_text(folder / STOPPED, json.dumps(reason) + "\n")

    def _run(self, folder: Path) -> None:
        spec = self._read_config(folder.parent.parent)
        link = self._link = FlareLink(collab.clients, self.nodes)

        def log_progress(snapshot: ProgressSnapshot) -> None:
            logger.info("run %s: %s", self.run_name, snapshot.describe())

        bars = ProgressFile(folder / PROGRESS_FILE, on_update=log_progress, interval=60.0)
        run = self._active_run = RemoteRun(spec, link, self.run_name)
        write_text(folder / DESCRIPTION, run.description.text)
        logger.info("run %s begins; it is %s", self.run_name, group_digits(run.description.sha256))
        results = run.run(folder, bars=bars)
        self._link = None  # a node whose process ends now is not lost
        write_results(run, {**run.describe_run(), **results}, keep_state=True)
        logger.info("run %s is done", self.run_name)

    def _read_config(self, folder: Path) -> RunSpec:
        """Parse the run's configuration after checking it against the server's rules.

        Args:
            folder: of the server.
        """
        rules = server_rules.read_server_rules(folder)
        rules.require_allowed(parse_toml(self.config, "the run"), folder / server_rules.FILE)
        add_search_folders(rules.plugin_folders(folder))
        return read_toml(self.config)
