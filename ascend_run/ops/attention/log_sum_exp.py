"""Merges attention outputs over disjoint keys by their log-sum-exps.

Source: the online softmax of arXiv:1805.02867, as ring attention (arXiv:2310.01889) uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# S queries, B batch (absent in packed layout), N heads, E head width of v


def merge_into(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge attention over further keys, disjoint from the first ones, into ``out`` and ``lse``.

    Args:
        out: [S, B, N, E] or [S, N, E], normalised over its own keys; may be a view of some queries.
            Use at least float32 to keep the precision of the partial results.
        lse: [B, N, S] or [N, S]; -inf for a query that sees no key, whose row of ``out`` is zeros.
        more_out, more_lse: The same for the other keys; any dtype and strides.

    Numerics: one exponential of a difference, so large scores do not overflow.
    """
    more_lse = more_lse.to(lse.dtype)
    # Weight of the other keys, exp(b) / (exp(a) + exp(b)); (-inf) - (-inf) has none.
    share = torch.sigmoid(more_lse - lse).nan_to_num_(0.0)
    lse.copy_(torch.logaddexp(lse, more_lse))
    out.lerp_(more_out.to(out.dtype), as_column(share).to(out.dtype))


def as_column(lse: Tensor) -> Tensor:
    """Reshape [B, N, S] to [S, B, N, 1], or [N, S] to [S, N, 1], to scale an output's rows."""
    return lse.movedim(-1, 0).unsqueeze(-1)
