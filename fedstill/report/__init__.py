"""What a run found, for people: pages, tables and figures of runs and of comparisons.

``run`` loads a run's files once; ``result`` and ``result_parts`` are what its result says. ``tables`` is the
one table that terminal, page, CSV, LaTeX and Markdown write; ``run_tables``, ``privacy``, ``leakage`` and
``link`` make a run's, ``compare_table`` a comparison's from its ``summary``. ``page`` and ``compare_page``
fill the templates; ``drawing`` is how all figures look. ``sentence`` says in plain words what happened.

Reads a run's files; may import compare and what lies below. A newcomer adds a section: a function that makes
its table, and a line in the page's template.
"""

from fedstill.report.run_levels import print_table
from fedstill.report.run_page import write_report

__all__ = ["print_table", "write_report"]
