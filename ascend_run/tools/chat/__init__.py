"""``ascend-run chat``: talk to a stored model."""

from typing import Final

SUMMARY: Final = "Talk to a stored model."
