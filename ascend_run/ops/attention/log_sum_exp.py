"""Attention over some keys, joined with attention over others by their log-sum-exps.

Source: the online softmax of arXiv:1805.02867, as ring attention (arXiv:2310.01889) uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# S queries, B batch (absent in packed layout), N heads, E head width of v


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, which must not overlap.

    Args:
        out: [S, B, N, E] or [S, N, E], normalised over its own keys.
        lse: [B, N, S] or [N, S]; -inf for a query that saw no key, whose row of ``out`` is zeros.
        more_out, more_lse: The same for the other keys; any dtype and strides.

    Returns:
        Output and log-sum-exp, in the dtypes of ``out`` and ``lse``: float32 at least, if the sum
        shall not lose what the parts have.

    Numerics: one exponential of a difference, so nothing overflows whatever the scores are.
    """
    merged_out, merged_lse = out.clone(), lse.clone()
    merge_into(merged_out, merged_lse, more_out, more_lse)
    return merged_out, merged_lse


def merge_into(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """``merge``, written into ``out`` and ``lse``, which may be views of some queries."""
    more_lse = more_lse.to(lse.dtype)
    # The share of the other keys, exp(b) / (exp(a) + exp(b)); (-inf) - (-inf) has none.
    share = torch.sigmoid(more_lse - lse).nan_to_num_(0.0)
    lse.copy_(torch.logaddexp(lse, more_lse))
    out.lerp_(more_out.to(out.dtype), as_column(share).to(out.dtype))


def as_column(lse: Tensor) -> Tensor:
    """[B, N, S] -> [S, B, N, 1], or [N, S] -> [S, N, 1]: a factor for an output's rows."""
    return lse.movedim(-1, 0).unsqueeze(-1)
