"""Slowdown of a run by other processes, with threads that sleep or spin while they wait.

    python benchmarks/busy.py --preset digits-fedavg --busy 1

Runs the preset alone and next to busy processes, once per wait policy; the policies alternate. ``ours`` is
the default of the command ``fedstill``: spin briefly, then sleep. ``PASSIVE`` sleeps immediately, ``ACTIVE``
spins, and ``default`` is OpenMP's behavior without a setting.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from statistics import median

BUSY = "while True: pass"
POLICIES = ("ours", "PASSIVE", "ACTIVE", "default")


def seconds(preset: str, policy: str, busy: int, options: list[str]) -> float:
    """Return the seconds of a run next to a number of busy processes."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    start = [sys.executable, "-m", "fedstill"]
    if policy == "default":  # imports torch before the command can set the wait policy
        start = [sys.executable, "-c", "import torch; from fedstill.cli.main import main; main()"]
    elif policy != "ours":
        environment["OMP_WAIT_POLICY"] = policy
    with ExitStack() as undo:
        out = undo.enter_context(tempfile.TemporaryDirectory())
        for _ in range(busy):
            other = subprocess.Popen([sys.executable, "-c", BUSY])
            undo.callback(other.wait)
            undo.callback(other.kill)
        begin = time.perf_counter()
        words = [*start, "run", preset, "--quiet", "--out", f"{out}/run", *options]
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin


def main() -> None:
    """Print a Markdown table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="digits-fedavg")
    parser.add_argument("--busy", type=int, default=1, help="processes that only compute")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(POLICIES), choices=POLICIES)
    chosen, options = parser.parse_known_args()
    timings: dict[tuple[str, int], list[float]] = {}
    for _ in range(chosen.rounds):
        for policy in chosen.ways:
            for busy in (0, chosen.busy):
                timings.setdefault((policy, busy), []).append(seconds(chosen.preset, policy, busy, options))
    print(f"`fedstill run {' '.join([chosen.preset, *options])}`, medians of {chosen.rounds}, seconds\n")
    print(f"| wait policy | alone | with {chosen.busy} busy | ratio |\n|---|---|---|---|")
    for policy in chosen.ways:
        alone, loaded = (median(timings[policy, count]) for count in (0, chosen.busy))
        print(f"| {policy} | {alone:.1f} | {loaded:.1f} | {loaded / alone:.1f} |")


if __name__ == "__main__":
    main()
