"""``ascend-run diff``: find the first step in which two runs differ, and possible causes."""

from typing import Final

SUMMARY: Final = "Show the first step in which two runs differ, and possible causes."
