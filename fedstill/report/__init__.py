"""What a run found, for people: pages, tables and figures of runs and of comparisons.

``run_files`` loads a run's files once; ``result`` and ``result_parts`` are what its result says.
``table_formats`` is the one table that terminal, page, CSV, LaTeX and Markdown write; ``run_levels``,
``run_tables``, ``privacy_section``, ``leakage_section`` and ``link_costs`` make a run's; ``compare_reader``
reads a comparison into its ``compare_summary``, of which ``compare_table``, ``compare_points`` and
``compare_csv`` make tables and ``compare_files`` all files; ``paired`` tells an order from chance.
``run_page`` and ``compare_page`` fill the templates. What goes on is a ``live_page``, which a
``page_server`` shows to browsers of this machine: ``node_page`` and ``runs_page``; ``so_far`` is a run that
is not finished. ``paired_difference`` says how far two models are apart
on the same cases. ``drawing`` is how all figures look, ``run_figures`` and ``compare_figures`` are the
figures, ``pictures`` shows images. ``run_text`` and ``metric_text`` say in plain words what happened.

Reads a run's files; may import compare and what lies below. A newcomer adds a section: a function that makes
its table, and a line in the page's template.
"""

from fedstill.report.model_scores import print_table
from fedstill.report.run_page import write_report

__all__ = ["print_table", "write_report"]
