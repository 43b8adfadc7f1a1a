"""The padded vocabulary, and its output layer. Imports no torch."""

from __future__ import annotations

from ascend_run.types.config import FieldSection


def has_tied_output(model: FieldSection) -> bool:
    """Return whether the output layer is the embedding; a score head, which replaces it, is not."""
    return bool(model.share_embeddings_and_output_weights and not model.num_labels)


def padded_vocab_size(vocab_size: int, multiple: int, tp_size: int) -> int:
    """Round the vocabulary size up, so that all tensor-parallel ranks hold equally many rows."""
    unit = multiple * tp_size
    return (vocab_size + unit - 1) // unit * unit
