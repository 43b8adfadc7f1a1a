"""``ascend-run plan``: plugins, hooks and layout of a run, and its estimated cost per rank."""

from typing import Final

SUMMARY: Final = "Show what a run would do, without running it."
