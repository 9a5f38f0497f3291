"""What a run found, for people: the HTML page of a run and the table in the terminal."""

from fedstill.report.page import write_report
from fedstill.report.table import print_table

__all__ = ["print_table", "write_report"]
