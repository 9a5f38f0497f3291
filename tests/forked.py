"""Processes that begin with the heavy modules in memory: real ones, without seconds of imports for each."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKING = multiprocessing.get_context("forkserver")
# torch loads the last of these with the first optimiser, for seconds.
FORKING.set_forkserver_preload(
    [
        "fedstill.cli.main",
        "fedstill.runs.run",
        "fedstill.runs.remote_run",
        "fedstill.node.host",
        "sklearn.datasets",
        "torch._dynamo",
    ]
)


def command(
    words: Sequence[object], here: Path, search: Sequence[Path], timeout: float, begin: str = ""
) -> tuple[int, str]:
    """What ``fedstill`` with these words, as a process of its own, ends with and prints.

    Args:
        words: of the command line, after ``fedstill``.
        here: the folder to work in.
        search: where Python looks for modules before all else, also in what the command starts.
        timeout: seconds.
        begin: Python that the process does first.
    """
    printed = here / ".printed"
    path = os.pathsep.join([*map(str, search), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    process = FORKING.Process(target=_command, args=([*map(str, words)], here, given, search, printed, begin))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"fedstill {words} took over {timeout} s: {printed.read_text()}")
    return process.exitcode, printed.read_text()


def _command(
    words: list[str],
    here: Path,
    given: Mapping[str, str],
    search: Sequence[Path],
    printed: Path,
    begin: str,
) -> None:
    os.chdir(here)
    os.environ.clear()
    os.environ.update(given)
    sys.path[:0] = map(str, [here, *search])
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    from fedstill.cli.main import main

    torch.set_num_threads(1)
    exec(begin, {})
    sys.argv = ["fedstill", *words]
    main(words)
