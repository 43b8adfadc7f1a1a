"""``report.html``: one page that shows a run, or several side by side, from their folders alone."""

from .page import write_report
from .run_folder import RunData, read_run

__all__ = ["RunData", "read_run", "write_report"]
