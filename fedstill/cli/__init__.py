"""The command ``fedstill``: a file a command or a few that belong together, called by ``main``.

``main`` has the help and names the commands; ``arguments`` and ``options`` read words by it, ``console``
writes tables. ``run``, ``compare``, ``reproduce``, ``attack``, ``list_command``: runs and what was found;
``page``: what goes on.
``server`` and ``node``, with ``node_check`` and ``node_facts``: a real federation. ``offline``: by files.
``privacy`` with ``privacy_plan`` and ``privacy_audit``: what a run will cost. ``audit_log``: what has left.

May import everything. A newcomer adds a command here: a function of what was ``ParsedArgs``, and two lines in
``main``: its name, and in the help its usage, by which ``arguments`` reads its words.
"""

import os

# Read once, as torch is imported. A thread that waits for others spins for some microseconds, then sleeps: by
# default it spins on, and beside other work a run takes many times as long; one that sleeps at once makes a
# run that has the machine to itself nearly twice as long (benchmarks/busy.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
