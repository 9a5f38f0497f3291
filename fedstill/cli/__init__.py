"""The command line.

``main`` is the entry point, with the list of all commands. A command is a function whose parameters are its
arguments and whose docstring is its help (cyclopts); each group of commands has a module. ``arguments`` has
types of arguments that several commands share and reads options of a configuration, and ``console`` prints
tables.
"""

import os

# Read once, when torch is imported. A waiting thread spins for some microseconds, then sleeps. By default it
# spins on, which makes a run many times slower when the machine has other work; a thread that sleeps at once
# makes a run nearly twice as slow when it has the machine to itself (benchmarks/busy.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
