"""What a run found, for people: pages, tables and figures of runs and of comparisons.

``run`` loads a run's files once; ``result`` and ``result_parts`` are what its result says. ``page`` writes
a run's page, ``table`` its lines in the terminal, ``run_figures`` its figures; files that begin with
``compare`` do the same for comparisons, ``leakage`` for attacks. ``drawing`` is how all figures look.
``sentence`` says in plain words what happened and what left.

Reads a run's files; may import compare and what lies below. A newcomer adds a section: a template and what
fills it.
"""

from fedstill.report.page import write_report
from fedstill.report.table import print_table

__all__ = ["print_table", "write_report"]
