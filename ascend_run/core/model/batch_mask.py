"""The mask of a micro-batch and the scale of its queries, as Megatron's layers pass them on."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

# S full sequence, s sequence on this rank, B micro-batch


@attrs.frozen(kw_only=True)
class BatchMask:
    """Mask of a micro-batch, in addition to the layer's own mask, and scale of its queries.

    Passed through Megatron's layers as ``packed_seq_params``.
    """

    document_ends: tuple[int, ...] | None = None
    """Where documents end in every sequence."""
    bias: Tensor | None = None
    """[B, 1, S, S] over the full sequence: 0 where a query sees a key, else -inf.

    Replaces the causal mask.
    """
    query_scale: Tensor | None = None
    """[s, B, 1, 1], or None for 1."""

    @classmethod
    def of(
        cls,
        document_ends: tuple[int, ...] | None,
        allowed_BSS: Tensor | None,
        query_scale: Tensor | None,
        dtype: torch.dtype,
    ) -> BatchMask | None:
        """Build the mask; return None if the batch has no documents, mask or scale."""
        if document_ends is None and allowed_BSS is None and query_scale is None:
            return None
        bias = None
        if allowed_BSS is not None:
            hidden = allowed_BSS.logical_not().unsqueeze(1)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias.masked_fill_(hidden, -torch.inf)
        return cls(document_ends=document_ends, bias=bias, query_scale=query_scale)
