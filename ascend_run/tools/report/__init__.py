"""``ascend-run report``: write an HTML page of one or several runs, from their run folders."""

from typing import Final

SUMMARY: Final = "Write report.html for a finished, failed or running run."
