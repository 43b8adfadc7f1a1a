"""``ascend-run preprocess``: tokenize text to Megatron's token files."""

from typing import Final

SUMMARY: Final = "Tokenize text to Megatron's token files."
