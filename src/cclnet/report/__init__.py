"""Reports: one self-contained HTML page per run and per comparison, the same in Markdown, and the terminal output."""

from cclnet.report.comparison import write_comparison
from cclnet.report.html import write_report

__all__ = ["write_comparison", "write_report"]
