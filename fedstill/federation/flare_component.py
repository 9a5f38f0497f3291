"""Component that FLARE runs in a site's process: ends jobs, and refuses requests that no job needs.

FLARE creates this component because the site's own ``local/resources.json`` names it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.private.defs import CellChannelTopic, CellMessageHeaderKeys

from fedstill.core.errors import DeployError, FedstillError
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.core.text_format import format_seconds, to_printable_line
from fedstill.federation.flare_site import CLIENT, JOB_ID, Site, end_jobs

if TYPE_CHECKING:
    from fedstill.node.folder_log import SecurityEvents

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
        self._await_reply_handling: Callable[[], None] = lambda: None

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
                self._await_reply_handling = update_connection_on_replies(
                    contact, cell.core_cell, every, lambda: self._end(1)
                )
        elif event_type == EventType.AFTER_CLIENT_REGISTER and self._site.role == CLIENT:
            self._await_reply_handling()  # FLARE would not wait until a refusal is recorded
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
            _security_events(self._site.folder).write_once(
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
        record_repeats(self._site.folder)
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


@cache  # it knows which events this process has written already
def _security_events(folder: Path) -> SecurityEvents:
    """Return a node's security events for this process; the first call loads torch."""
    from fedstill.node.folder_log import SecurityEvents

    return SecurityEvents(folder)


def record_repeats(folder: Path) -> None:
    """Write the numbers of refusals of this process that the node's audit log does not hold yet."""
    if _security_events.cache_info().currsize:  # else nothing was refused, and torch is not loaded
        try:
            _security_events(folder).record_repeats()
        except (FedstillError, OSError) as fault:
            logger.error("the audit log cannot be written: %s", fault)


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


# --- a node's connection to its server ------------------------------------------------------------------

REPLY_SECONDS = 6.0  # seconds that the server may take for its reply to a heartbeat
FIRST_REMINDER, MAX_REMINDER_INTERVAL = 60.0, 3600.0  # seconds between warnings while it is unreachable
RETRYING = "retrying every 10 s until it answers or this process is ended"


class ServerConnection:
    """State of a node's connection to its server, with a log line for each change and reminders while it is
    down.

    Args:
        server: its address.
        clock: returns seconds.
        on_refused: called with the reason when the server refuses the node.
    """

    def __init__(
        self,
        server: str,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._on_refused = on_refused
        self._server, self._clock = server, clock
        self._state, self._was_connected = "", False  # "", "in", "gone" or "refused"
        self._since, self._next = clock(), 0.0

    def set_connected(self) -> None:
        """Record that the server accepted this node."""
        if self._state == "in":
            return
        after = f", after {format_seconds(self._clock() - self._since)}" if self._state else ""
        again = " again" if self._was_connected else ""
        logger.info("connected to the server at %s%s%s", self._server, again, after)
        self._state, self._was_connected = "in", True

    def set_unreachable(self) -> None:
        """Record that the server cannot be reached or did not reply in time."""
        now = self._clock()
        if self._state == "gone":
            if now >= self._next:
                waited = now - self._since
                self._next = now + min(max(waited, FIRST_REMINDER), MAX_REMINDER_INTERVAL)
                logger.warning("no answer from %s for %s; %s", self._server, format_seconds(waited), RETRYING)
            return
        if self._state:
            logger.warning("lost the connection to the server at %s; %s", self._server, RETRYING)
        else:
            why = "is the server up, may this machine reach it, and is the kit from this federation?"
            logger.warning("no answer from %s; %s. %s", self._server, RETRYING, why.capitalize())
        self._state, self._since, self._next = "gone", now, now + FIRST_REMINDER

    def set_refused(self, reason: str) -> None:
        """Record that the server refused this node, and why."""
        if self._state != "refused":
            revoked = "it has revoked this node" if "is disabled" in reason else reason
            logger.warning("the server at %s refuses this node: %s", self._server, revoked)
            self._state, self._since = "refused", self._clock()
            self._on_refused(revoked)


def update_connection_on_replies(
    contact: ServerConnection, cell: Any, heartbeat: float, leave: Callable[[], None]
) -> Callable[[], None]:
    """Update a connection from the server's replies in this process of FLARE.

    Recording a refusal loads torch, which may outlast FLARE's patience with a reply.

    Args:
        contact: the connection.
        cell: FLARE's communication endpoint.
        heartbeat: seconds between two heartbeats.
        leave: ends the process of a node that is refused. FLARE would end it too, with a traceback.

    Returns:
        A function that waits until replies that have arrived are handled.
    """
    from nvflare.fuel.f3.cellnet.defs import CellChannelTopic, MessageHeaderKey, ReturnCode

    last = time.monotonic()
    lock = threading.Lock()

    def on_reply(reply: Any) -> None:
        nonlocal last
        topic = reply.get_header(MessageHeaderKey.TOPIC)
        if topic not in (CellChannelTopic.Register, CellChannelTopic.HEART_BEAT):
            return
        with lock:
            code = reply.get_header(MessageHeaderKey.RETURN_CODE)
            if code == ReturnCode.UNAUTHENTICATED:
                if topic == CellChannelTopic.Register:  # FLARE gives up meanwhile, with a traceback
                    sys.stdout = sys.stderr = io.StringIO()
                try:
                    contact.set_refused(str(reply.get_header(MessageHeaderKey.ERROR)))
                finally:
                    if topic == CellChannelTopic.Register:
                        leave()
            elif code == ReturnCode.OK:
                contact.set_connected()
            last = time.monotonic()

    def listen() -> None:
        while True:
            time.sleep(1.0)
            with lock:
                if time.monotonic() - last > heartbeat + REPLY_SECONDS:
                    contact.set_unreachable()

    def await_handling() -> None:
        with lock:
            pass

    cell.add_incoming_reply_filter("*", "*", on_reply)
    threading.Thread(target=listen, daemon=True).start()
    return await_handling


# --- nodes whose process for a job has ended ------------------------------------------------------------

CHANNEL, TOPIC = "fedstill", "lost"  # of the notification to a job


class LostNodeMonitor:
    """Watches heartbeats in the server's main process and notifies jobs of lost nodes.

    Args:
        engine: FLARE's engine with its jobs.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._cell = engine, engine.get_cell().core_cell
        self._active: set[tuple[str, str]] = set()  # (job, node) that were seen working
        self._notified: set[tuple[str, str]] = set()
        self._cell.add_incoming_request_filter(CellChannel.SERVER_MAIN, "*", self.check_heartbeat)

    def check_heartbeat(self, message: Any) -> None:
        """Check one message; FLARE has authenticated its sender."""
        if message.get_header(MessageHeaderKey.TOPIC) != CellChannelTopic.HEART_BEAT:
            return
        keys = CellMessageHeaderKeys
        node, token, active_jobs = map(message.get_header, (keys.CLIENT_NAME, keys.TOKEN, keys.JOB_IDS))
        for job, process in list(self._engine.run_processes.items()):
            participants = process.get(RunProcessKey.PARTICIPANTS) or {}
            tokens = {client.name: known for known, client in participants.items()}
            if job in (active_jobs or ()):
                self._active.add((job, node))
            # A new job may not have reached the node yet; a restarted node has another token.
            elif node in tokens and (tokens[node] != token or (job, node) in self._active):
                self._notify(job, node)

    def _notify(self, job: str, node: str) -> None:
        if (job, node) not in self._notified:
            self._notified.add((job, node))
            target = FQCN.join([FQCN.ROOT_SERVER, job])
            self._cell.fire_and_forget(CHANNEL, TOPIC, target, new_cell_message({}, {"node": node}))


def subscribe_to_lost_nodes(engine: Any, on_lost: Callable[[str], None]) -> None:
    """Call a function in the process of a job at the server for each node that the job has lost.

    Args:
        engine: FLARE's engine.
        on_lost: called with the name of the node.
    """

    def on_message(message: Any) -> Any:
        if message.get_header(MessageHeaderKey.ORIGIN) == FQCN.ROOT_SERVER:
            on_lost(str(message.payload["node"]))
        return make_reply("ok")

    engine.get_cell().core_cell.register_request_cb(CHANNEL, TOPIC, on_message)
