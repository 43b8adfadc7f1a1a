"""``ascend-run convert``: convert checkpoints between formats."""

from typing import Final

SUMMARY: Final = "Convert a checkpoint to another format."
