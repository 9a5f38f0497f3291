"""The command line.

``main`` is the entry point, and ``commands`` the table of all commands with their help. ``arguments`` parses
words by a command's usage, ``options`` reads options of a configuration, and ``console`` prints tables. The
other modules hold the functions of the commands.
"""

import os

# Read once, when torch is imported. A waiting thread spins for some microseconds, then sleeps. By default it
# spins on, which makes a run many times slower when the machine has other work; a thread that sleeps at once
# makes a run nearly twice as slow when it has the machine to itself (benchmarks/busy.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
