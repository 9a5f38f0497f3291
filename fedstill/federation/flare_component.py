"""Component that FLARE runs in a site's process: ends jobs, and refuses requests that no job needs.

FLARE creates this component because the site's own ``local/resources.json`` names it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply

from fedstill.core.errors import DeployError, FedstillError
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.core.text_format import to_printable_line
from fedstill.federation.connection_log import ServerConnection, update_connection_on_replies
from fedstill.federation.flare_kit import CLIENT, Site
from fedstill.federation.flare_lost_nodes import LostNodeMonitor
from fedstill.federation.flare_site import JOB_ID, end_jobs

if TYPE_CHECKING:
    from fedstill.node.security_events import SecurityEvents

logger = logging.getLogger("fedstill.site")

# Requests that a node's main process accepts from the server; queries go to the process of a job.
ALLOWED_TOPICS = frozenset(
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
# Requests that a job's process accepts.
ALLOWED_JOB_TOPICS = frozenset({"abort", "abort_task", "check_status"})
DIAGNOSIS = "_net_manager"  # FLARE's channel for inspecting and ending other processes


class SiteComponent(FLComponent):  # type: ignore[misc,unused-ignore]
    """Handles FLARE's events in the process of a site.

    Args:
        role: server or client.
        folder: of the site.
    """

    def __init__(self, role: str, folder: str) -> None:
        super().__init__()
        self._site = Site(role, Path(folder))
        self._lost_nodes: LostNodeMonitor | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Called by FLARE."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            for ending in (signal.SIGTERM, signal.SIGINT):
                signal.signal(ending, lambda number, frame: self._end(0))
            if self._site.role == CLIENT:
                cell = fl_ctx.get_engine().get_cell()
                cell.core_cell.add_incoming_request_filter("*", "*", self._filter_request)
                contact, every = (
                    ServerConnection(self._site.target, on_refused=self._log_refusal_by_server),
                    self._site.heartbeat,
                )
                update_connection_on_replies(contact, cell.core_cell, every, lambda: self._end(1))
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED and self._lost_nodes is None:  # it has a cell
            self._lost_nodes = LostNodeMonitor(fl_ctx.get_engine())
        elif event_type == EventType.JOB_COMPLETED and self._site.role == CLIENT:
            self._clean_up_job(str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID)))

    def _filter_request(self, message: Any) -> Any:
        return refusal_reply(refusal_reason(message), self._site.kit, self._site.folder)

    def _log_refusal_by_server(self, why: str) -> None:
        """Write to the audit log that the server refused this node."""
        asker = self._site.kit.authority_fingerprint
        try:
            _security_events(self._site.folder).write(
                "certificate", asker, f"not let in: {to_printable_line(why)}"
            )
        except FedstillError as fault:
            logger.error("the audit log cannot be written: %s", fault)

    def _clean_up_job(self, job: str) -> None:
        """Log the end of a job and delete its files in the kit; its run is in ``runs/``."""
        if not JOB_ID.fullmatch(job):
            return
        try:
            for config in (self._site.kit.folder / job).glob("app_*/config/config_fed_server.json"):
                (program,) = json.loads(config.read_text())["components"]
                logger.info("the job of run %s is over", to_printable_line(program["args"]["run"]))
        finally:  # also if the job's files are malformed
            shutil.rmtree(self._site.kit.folder / job, ignore_errors=True)

    def _end(self, code: int) -> None:
        """End the process at once: FLARE's threads would keep it alive for half a minute."""
        end_jobs(self._site)
        logger.info("ended")
        os.truncate(self._site.pid_file, 0)  # not deleted, as another start of the site may wait for its lock
        os._exit(code)


def refusal_reason(message: Any) -> str | None:
    """Return why a node refuses a request, or None to accept it.

    FLARE's client can also read files, shut down, change its log and show its settings. FLARE authorizes
    these by what the server writes in the request, so a server with modified software could use them all.

    The name of a job is checked, too: FLARE deletes and writes the folder of that name in the kit, which also
    has the folders ``startup`` and ``local`` with the node's key and rules.
    """
    channel = message.get_header(MessageHeaderKey.CHANNEL)
    if channel == CellChannel.CLIENT_MAIN:
        topic, job = message.payload.topic, message.payload.headers.get("job_id")
        if topic in ALLOWED_TOPICS and (not job or (isinstance(job, str) and JOB_ID.fullmatch(job))):
            return None
        return topic if topic not in ALLOWED_TOPICS else f"{topic} of a job that is none"
    return "a look into this process" if channel == DIAGNOSIS else None


@cache
def _security_events(folder: Path) -> SecurityEvents:
    """Return a node's security events for this process; the first call loads torch."""
    from fedstill.node.security_events import SecurityEvents

    return SecurityEvents(folder)


def refusal_reply(reason: str | None, kit: StartupKit, folder: Path) -> Any:
    """Write a refused request to the audit log and return FLARE's reply; None if it is accepted."""
    if reason is None:
        return None
    try:
        _security_events(folder).record_refusal(
            kit.authority_fingerprint, f"a node does not do that: {to_printable_line(reason)}"
        )
    except FedstillError as fault:
        logger.error("the audit log cannot be written: %s", fault)
    logger.warning("refused the server %s", to_printable_line(reason))
    return make_reply(ReturnCode.INVALID_REQUEST, error="a node does not do that")


def job_request_refusal_reason(message: Any) -> str | None:
    """Return why a job's process, which holds data and model, refuses a request; None to accept it.

    Refused are, for example, requests to inspect the process or to change its log level.
    """
    channel, topic = (message.get_header(key) for key in (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC))
    if channel == CellChannel.CLIENT_COMMAND and topic not in ALLOWED_JOB_TOPICS:
        return str(topic)
    return "a look into this process" if channel == DIAGNOSIS else None


def install_job_request_filter(site: str, folder: Path) -> None:
    """Make this process of a job at a node refuse such requests and record them in the node's audit log.

    FLARE filters requests only in the site's process, but a server can address a job's process by its name.

    Raises:
        DeployError: FLARE does not name this process's connections as expected.
    """

    def filtered(message: Any) -> Any:
        return refusal_reply(job_request_refusal_reason(message), StartupKit(folder / KIT_FOLDER), folder)

    # A simulation has all sites in one process.
    cells = [cell for name, cell in CoreCell.ALL_CELLS.items() if site in str(name).split(".")]
    for cell in cells:
        cell.add_incoming_request_filter("*", "*", filtered)
    if CoreCell.ALL_CELLS and not cells:
        raise DeployError(
            f"none of this process's connections is {to_printable_line(site)}'s: none would be guarded"
        )
