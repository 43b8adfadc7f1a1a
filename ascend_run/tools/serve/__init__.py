"""``ascend-run serve``: answer requests of OpenAI's API with a stored model."""

from typing import Final

SUMMARY: Final = "Answer requests of OpenAI's API with a stored model."
