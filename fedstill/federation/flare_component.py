"""The component that FLARE runs in a site's process: it ends jobs, and refuses requests that no job needs.

FLARE makes this component because the site's own ``local/resources.json`` names it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply

from fedstill.core.errors import DeployError
from fedstill.core.startup_kit import KIT, StartupKit
from fedstill.core.text_format import clip
from fedstill.federation.connection_log import ServerConnection, watch
from fedstill.federation.flare_kit import CLIENT, Site
from fedstill.federation.flare_lost_nodes import LostNodeMonitor
from fedstill.federation.flare_site import JOB, end_jobs
from fedstill.node.security_log import SecurityLog, SecurityLogError

logger = logging.getLogger("fedstill.site")

# What a server may ask of a node's own process; queries go to the process of a job.
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
# And of a job's process.
JOB_TOPICS = frozenset({"abort", "abort_task", "check_status"})
DIAGNOSIS = "_net_manager"  # FLARE's channel for looking into other processes, and for ending them


class SiteComponent(FLComponent):  # type: ignore[misc,unused-ignore]
    """Is told by FLARE what goes on in its program of a site."""

    def __init__(self, role: str, folder: str) -> None:
        super().__init__()
        self._site = Site(role, Path(folder))
        self._security = SecurityLog(Path(folder))
        self._losses: LostNodeMonitor | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Called by FLARE."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            for ending in (signal.SIGTERM, signal.SIGINT):
                signal.signal(ending, lambda number, frame: self._end(0))
            if self._site.role == CLIENT:
                cell = fl_ctx.get_engine().get_cell()
                cell.core_cell.add_incoming_request_filter("*", "*", self._refusal)
                contact, every = (
                    ServerConnection(self._site.target, barred=self._barred),
                    self._site.heartbeat,
                )
                watch(contact, cell.core_cell, every, lambda: self._end(1))
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED and self._losses is None:  # it has a cell
            self._losses = LostNodeMonitor(fl_ctx.get_engine())
        elif event_type == EventType.JOB_COMPLETED and self._site.role == CLIENT:
            self._job_over(str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID)))

    def _refusal(self, message: Any) -> Any:
        return answered(refused(message), self._security, self._site.kit)

    def _barred(self, why: str) -> None:
        """The server does not let this node in."""
        with contextlib.suppress(SecurityLogError):
            asker = self._site.kit.authority_fingerprint
            self._security.write("certificate", asker, f"not let in: {clip(why)}")

    def _job_over(self, job: str) -> None:
        """Say so, and remove what the job left in the kit: its run is in ``runs/``."""
        if not JOB.fullmatch(job):
            return
        try:
            for config in (self._site.kit.folder / job).glob("app_*/config/config_fed_server.json"):
                (program,) = json.loads(config.read_text())["components"]
                logger.info("the job of run %s is over", clip(program["args"]["run"]))
        finally:  # whatever a server wrote into the job
            shutil.rmtree(self._site.kit.folder / job, ignore_errors=True)

    def _end(self, code: int) -> None:
        """End at once: FLARE leaves threads that would keep the process for half a minute."""
        end_jobs(self._site)
        logger.info("ended")
        os.truncate(self._site.pid, 0)  # not deleted: whoever starts the site just now waits for its lock
        os._exit(code)


def refused(message: Any) -> str | None:
    """What a request asks that no job needs, and the client refuses; None lets it through.

    It could do more: read files, shut down, change the log, show its settings. Whether that is allowed, FLARE
    decides by what the server writes beside the request, so a server with other software could have it all.

    Nor may a job be called as it likes: FLARE removes and writes the folder of that name in the kit, and
    ``startup`` and ``local``, which hold the node's key and its rules, are folders there, too.
    """
    channel = message.get_header(MessageHeaderKey.CHANNEL)
    if channel == CellChannel.CLIENT_MAIN:
        topic, job = message.payload.topic, message.payload.headers.get("job_id")
        if topic in TOPICS and (not job or (isinstance(job, str) and JOB.fullmatch(job))):
            return None
        return topic if topic not in TOPICS else f"{topic} of a job that is none"
    return "a look into this process" if channel == DIAGNOSIS else None


def answered(told: str | None, security: SecurityLog, kit: StartupKit) -> Any:
    """What FLARE replies to a refused request, once the security log says so; None lets it through."""
    if told is None:
        return None
    with contextlib.suppress(SecurityLogError):  # it stands in node.log
        security.refused(kit.authority_fingerprint, f"a node does not do that: {clip(told)}")
    logger.warning("refused the server %s", clip(told))
    return make_reply(ReturnCode.INVALID_REQUEST, error="a node does not do that")


def refused_in_job(message: Any) -> str | None:
    """What a request asks of a job's process, with data and model, that no job needs; None lets it through.

    A look into it, say, or that its log falls silent.
    """
    channel, topic = (message.get_header(key) for key in (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC))
    if channel == CellChannel.CLIENT_COMMAND and topic not in JOB_TOPICS:
        return str(topic)
    return "a look into this process" if channel == DIAGNOSIS else None


def guard_job(site: str, folder: Path) -> None:
    """Have this process, of a job at a node, refuse these, and write so into the node's security log.

    FLARE's own filter of a site is in the site's process alone; a server can call a job's by its name.

    Raises:
        DeployError: FLARE names this process's connections in another way than it did.
    """
    security = SecurityLog(folder)

    def filtered(message: Any) -> Any:
        return answered(refused_in_job(message), security, StartupKit(folder / KIT))

    # A simulation has all sites in one process.
    cells = [cell for name, cell in CoreCell.ALL_CELLS.items() if site in str(name).split(".")]
    for cell in cells:
        cell.add_incoming_request_filter("*", "*", filtered)
    if CoreCell.ALL_CELLS and not cells:
        raise DeployError(f"none of this process's connections is {clip(site)}'s: none would be guarded")
