"""Processes that begin with the heavy modules in memory: real ones, without seconds of imports for each."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE = 600.0
"""Seconds that a test waits for a process, which takes up to 250 on a slow and busy machine."""

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "fedstill.cli.main",
        "fedstill.report",
        "fedstill.runs.run",
        "matplotlib.backends.backend_svg",
        "sklearn.datasets",
        "tests.federation.sites",  # what these processes begin with
        "torch._dynamo",  # torch loads it with the first optimizer, for seconds
    ]
)


class Command:
    """``fedstill`` with some words, as a process of its own.

    Args:
        words: of the command line, after ``fedstill``.
        here: the folder to work in.
        search: where Python looks for modules before all else, also in what the command starts.
        begin: Python that the process does first.
    """

    def __init__(self, words: Sequence[object], here: Path, search: Sequence[Path], begin: str = "") -> None:
        self._printed = here / ".printed"
        path = os.pathsep.join([*map(str, search), os.environ.get("PYTHONPATH", "")])
        given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        output = ([*map(str, words)], here, given, search, self._printed, begin)
        self._process = FORKING.Process(target=_command, args=output)
        self._process.start()

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> int | None:
        """SIGKILL, unless it has ended; what it ended with."""
        self._process.kill()
        self._process.join(10)
        return self._process.exitcode

    def end(self) -> tuple[int, str]:
        """What it ends with and prints; killed after ``PATIENCE``.

        Raises:
            TimeoutError: it had to be killed.
        """
        self._process.join(PATIENCE)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"it took over {PATIENCE} s: {self._printed.read_text()}")
        return self._process.exitcode, self._printed.read_text()


def _command(
    words: list[str], here: Path, given: Mapping[str, str], search: Sequence[Path], printed: Path, begin: str
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
