"""The command ``fedstill``: one short file a command, called by ``main``; no logic of its own.

May import everything. A newcomer adds a command here: a function of what was ``Given``, and two lines in
``main``: its name, and in the help its usage, by which ``usage`` reads its words.
"""

import os

# Read once, as torch is imported. A thread that waits for others spins for some microseconds, then sleeps: by
# default it spins on, and beside other work a run takes many times as long; one that sleeps at once makes a
# run that has the machine to itself nearly twice as long (benchmarks/busy.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
