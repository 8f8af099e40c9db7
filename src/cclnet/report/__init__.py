"""Reports that people like to read: one self-contained page a run, one a comparison."""

from cclnet.report.comparison import write_comparison
from cclnet.report.html import write_report

__all__ = ["write_comparison", "write_report"]
