"""``ascend-run preprocess``: tokenize text to Megatron's token files."""

from typing import Final

SUMMARY: Final = "Tokenize text, conversations and other samples to Megatron's token files."
