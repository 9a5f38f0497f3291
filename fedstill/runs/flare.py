"""The server's half of a run in FLARE's job: it asks the nodes and leaves its results to be fetched."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from fedstill.core import toml
from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.core.hashing import group_digits
from fedstill.core.names import check_run_name
from fedstill.core.private_files import lock_file
from fedstill.core.progress import PROGRESS_FILE, ProgressFile, ProgressSnapshot
from fedstill.core.registry import add_search_folders
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import clip_text
from fedstill.federation import server_rules
from fedstill.federation.flare import RUNS, SERVER_FOLDER, FlareLink, read_environment
from fedstill.federation.flare_lost_nodes import watch_lost_nodes
from fedstill.federation.run_status import JOB, METRICS, PROGRESS_TOPIC, STOPPED
from fedstill.runs.config import RunConfig, read_toml
from fedstill.runs.remote_run import RemoteRun

logger = logging.getLogger("fedstill.server")
DESCRIPTION = "description.json"  # in a run's folder: what nodes' owners were asked to approve
MANY = 500  # lines of metrics in one answer to whoever waits for the run
LONGEST = 20_000  # letters of why a run stopped
UNFORESEEN = "it failed where it should not: the server's log says how"


class ServerProgram:
    """The server's half of one run, as FLARE's job runs it.

    Args:
        config: the run's configuration, as TOML; what it may name at this server its owner says
            (:mod:`fedstill.federation.server_rules`).
        run: its name; a run of this name that was stopped goes on.
        nodes: with which the run began, also those that are not in this job; none is those that are.

    Raises:
        ArgumentError: the run's name is no name.
    """

    def __init__(self, config: str, run: str, nodes: Sequence[str] = ()) -> None:
        check_run_name(run)  # it names a folder
        self.config, self.run_name, self.nodes = config, run, list(nodes)
        self._at_work: RemoteRun | None = None
        self._link: FlareLink | None = None

    @collab.main  # type: ignore[untyped-decorator,unused-ignore]
    def main(self) -> None:
        """Run, and leave the results in the job's workspace, from where they are fetched."""
        folder = Path(read_environment(SERVER_FOLDER)) / RUNS / self.run_name
        engine = collab.fl_ctx.get_engine()

        def told(topic: str, asked: Mapping[str, int], fl_ctx: object) -> dict[str, Any]:
            progress_bars, known = ProgressSnapshot.read(folder / PROGRESS_FILE), asked[METRICS]
            lines = [] if self._at_work is None else self._at_work.records.metrics[known : known + MANY]
            return {"note": "" if progress_bars is None else progress_bars.to_json(), METRICS: lines}

        engine.register_app_command(PROGRESS_TOPIC, told)
        watch_lost_nodes(engine, self._lose)
        kept = Path(collab.workspace.get_run_dir(collab.fl_ctx.get_job_id())) / "fedstill"
        self._work(folder, kept)

    def _lose(self, node: str) -> None:
        """Wait no longer for a node that FLARE does not let back into this job."""
        if self._link is not None:
            logger.warning("%s is there, and its process for this run is not", clip_text(node))
            self._link.drop_node(node)

    def _work(self, folder: Path, kept: Path) -> None:
        """Run in a folder that is this job's alone meanwhile.

        Args:
            folder: of the run, shared by all jobs of its name.
            kept: where this job's results are to be.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / JOB).open("w") as held:
            try:
                lock_file(held.fileno())
            except BlockingIOError:
                kept.mkdir(parents=True)
                self._stopped(kept, RunFolderError(f"{folder} is in use: another job is at work on this run"))
                return
            (folder / STOPPED).unlink(missing_ok=True)
            # Any other error goes on to FLARE, which logs it; who waits for the run is told this much.
            wrong: Exception | None = FedstillError(UNFORESEEN)
            try:
                self._run(folder)
                wrong = None
            except (FedstillError, OSError) as error:
                wrong = error
            finally:
                if wrong is not None:
                    self._stopped(folder, wrong)
                left = shutil.ignore_patterns("state.safetensors*", f"{PROGRESS_FILE}*", JOB)
                shutil.copytree(folder, kept, ignore=left)

    def _stopped(self, folder: Path, error: Exception) -> None:
        """Leave word of why a run stopped."""
        told = {"error": type(error).__name__, "text": clip_text(error, LONGEST)}
        logger.error("run %s stopped: %s", self.run_name, told["text"])
        write_text(folder / STOPPED, json.dumps(told) + "\n")

    def _run(self, folder: Path) -> None:
        config = self._read(folder.parent.parent)
        link = self._link = FlareLink(collab.clients, self.nodes)

        def tell(progress_bars: ProgressSnapshot) -> None:
            logger.info("run %s: %s", self.run_name, progress_bars.describe())

        bars = ProgressFile(folder / PROGRESS_FILE, on_update=tell, interval=60.0)
        run = self._at_work = RemoteRun(config, link, self.run_name)
        write_text(folder / DESCRIPTION, run.description.text)
        logger.info("run %s begins; it is %s", self.run_name, group_digits(run.description.sha256))
        results = run.run(folder, bars=bars)
        self._link = None  # whose process ends now is not lost
        run.finish({**run.about(), **results}, keep_state=True)
        logger.info("run %s is done", self.run_name)

    def _read(self, folder: Path) -> RunConfig:
        """The run's configuration, once the server's rules let in what it names.

        Args:
            folder: the server's.
        """
        rules = server_rules.read(folder)
        rules.check(toml.parse(self.config, "the run"), folder / server_rules.FILE)
        add_search_folders(rules.plugin_folders(folder))
        return read_toml(self.config)
