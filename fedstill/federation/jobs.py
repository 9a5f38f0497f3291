"""The end of a job at a node: its log says so, and what the job left in the kit is removed.

Nothing of that is needed: what the job logged is in the node's log, and its run is in ``runs/``.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from fedstill.node.session import short

logger = logging.getLogger("fedstill.federation.site")

JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""What FLARE's server calls a job: a random number, which is the name of its folder in a kit."""


class JobFolders(FLComponent):  # type: ignore[misc,unused-ignore]
    """Removes a job's folder, as a part of FLARE's own program of the node.

    Args:
        kit: the node's startup kit.
    """

    def __init__(self, kit: str) -> None:
        super().__init__()
        self._kit = Path(kit)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Called by FLARE; the job's process is over by then, and how it ended has been reported."""
        if event_type == EventType.JOB_COMPLETED:
            job = str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID))
            try:
                for config in self._kit.glob(f"{job}/app_*/config/config_fed_server.json"):
                    (program,) = json.loads(config.read_text())["components"]
                    logger.info("the job of run %s is over", short(program["args"]["run"]))
            finally:  # whatever a server wrote into the job
                remove(self._kit, job)


def remove(kit: Path, job: str = "") -> None:
    """Remove the folder of a job from a kit, or of all its jobs, none of which may be at work."""
    for folder in kit.iterdir():
        if JOB.fullmatch(folder.name) and job in ("", folder.name):
            shutil.rmtree(folder, ignore_errors=True)
