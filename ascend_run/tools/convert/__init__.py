"""``ascend-run convert``: convert checkpoints to Hugging Face format and back."""

from typing import Final

SUMMARY: Final = "Convert a checkpoint to Hugging Face format, or back."
