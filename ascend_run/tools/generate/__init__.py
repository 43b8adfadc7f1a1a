"""``ascend-run generate``: continue prompts with a stored model."""

from typing import Final

SUMMARY: Final = "Continue prompts with a stored model."
