"""The padded vocabulary. Imports no torch."""

from __future__ import annotations


def padded_vocab_size(vocab_size: int, multiple: int, tp_size: int) -> int:
    """Round the vocabulary size up, so that all tensor-parallel ranks hold equally many rows."""
    unit = multiple * tp_size
    return (vocab_size + unit - 1) // unit * unit
