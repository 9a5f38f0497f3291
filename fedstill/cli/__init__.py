"""The command ``fedstill``: one short file a command, called by ``main``; no logic of its own.

May import everything. A newcomer adds a command here: a file with ``main(words)``, and a line in ``main``.
"""
