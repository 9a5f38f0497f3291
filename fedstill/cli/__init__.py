"""The command ``fedstill``: one short file a command, called by ``main``; no logic of its own.

May import everything. A newcomer adds a command here: a function of what was ``Given``, and two lines in
``main``: its name, and in the help its usage, by which ``usage`` reads its words.
"""

import os

# Read once, as torch is imported. A thread that waits for others sleeps: by default it spins, and beside one
# other busy process a run then takes twenty times as long (benchmarks/busy.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
