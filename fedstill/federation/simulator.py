"""FLARE's simulator as a process of its own: it changes the process that it runs in beyond repair."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from fedstill.federation.provision import NODE_CLASSES, SERVER_CLASSES


def simulate(job: str, workspace: str, nodes: Sequence[str]) -> int:
    """Run a job's folder, every node in a process of its own.

    Args:
        job: the folder.
        workspace: where FLARE works; new.
        nodes: names of the sites.

    Returns:
        FLARE's exit code.
    """
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

    local = Path(workspace) / "local"
    local.mkdir(parents=True)
    allowed = {"format_version": 2, "class_allow_list": [*SERVER_CLASSES, *NODE_CLASSES]}
    (local / "resources.json").write_text(json.dumps(allowed), encoding="utf-8")
    runner = SimulatorRunner(
        job_folder=job, workspace=workspace, clients=",".join(nodes), threads=len(nodes), log_config="concise"
    )
    logging.getLogger().setLevel(logging.ERROR)
    return int(runner.run() or 0)


if __name__ == "__main__":
    sys.exit(simulate(sys.argv[1], sys.argv[2], sys.argv[3:]))
