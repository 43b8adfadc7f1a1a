"""``ascend-run report``: one page that shows a run, or several, from their folders alone."""

from .page import write_report
from .run_folder import RunData, read_run

__all__ = ["RunData", "read_run", "write_report"]
