"""The command ``fedstill``: one short file a command, called by ``main``; no logic of its own.

May import everything. A newcomer adds a command here: a file with ``main(words)``, and a line in ``main``.
"""

import os

# Read once, as torch is imported. A thread that waits for others sleeps: by default it spins, and beside one
# other busy process a run then takes twenty times as long (benchmarks/busy.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
