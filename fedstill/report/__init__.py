"""Results of runs and comparisons for people: HTML pages, tables and figures.

``run_files`` loads the files of a run, ``result`` and ``result_records`` its result. ``table_formats``
defines one table for terminal, page, CSV, LaTeX and Markdown. ``model_scores``, ``run_tables``,
``privacy_section``, ``leakage_section`` and ``communication_time`` make the tables of a run.
``compare_reader`` reads a comparison into its ``compare_summary``; ``compare_table``,
``comparison_figure_data`` and ``compare_csv`` make its tables, ``compare_files`` writes all files.
``significance`` and ``paired_difference`` compare methods with confidence intervals.

``run_page`` and ``compare_page`` fill the templates. ``run_progress``, ``runs_page`` and ``node_page`` are
live pages, which ``page_server`` shows to browsers on this machine. ``plotting`` defines the style of
figures; ``run_figures`` and ``compare_figures`` plot them, ``image_panels`` shows images. ``run_text`` and
``metric_text`` write sentences and numbers.

To add a section to a page, write a function that returns its table and a line in the page's template. This
package reads runs' files and may import ``compare`` and the packages below it.
"""

from fedstill.report.model_scores import print_table
from fedstill.report.run_page import write_report

__all__ = ["print_table", "write_report"]
