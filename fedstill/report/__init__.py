"""Results of runs and comparisons for people: HTML pages, tables and figures.

``result`` reads the files of a run, and ``records`` makes one list of measured values of them, from which
tables, pages and files are made. ``run_tables``, ``privacy_section``, ``images`` and ``figures`` make the
parts of a run's page, and ``run_page`` fills the template. ``comparison_records`` reads a comparison with
the records of its runs, ``comparison_tables`` and ``comparison_page`` write its files. ``statistics``
compares methods with confidence intervals. ``tables`` defines one table for terminal, page, CSV, LaTeX and
Markdown, and numbers as text. ``terminal`` prints, ``model_card`` describes a student.

``live_page`` shows an unfinished run, and ``dashboard`` runs, a server and a node; ``page_server`` serves
these pages to browsers on this machine.

To add a section to a page, write a function that returns its table and a line in the page's template. This
package reads runs' files and may import ``compare`` and the packages below it.
"""

from fedstill.report.run_page import write_report
from fedstill.report.terminal import print_table

__all__ = ["print_table", "write_report"]
