"""Fused attention, forward and backward, in both versions of the operator.

The second makes a bias of positions itself, from one slope a head, and takes any other bias after
the scale; the first takes a bias before the scale only. Their arguments are the same otherwise,
but for the spelling of two.
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T tokens

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

STATISTICS_WIDTH: Final = 8
"""The softmax statistics are repeated so often along a last axis."""
COMPRESSED_MASK_SIZE: Final = 2048
"""Side of the one triangular mask that every causal or banded call is given."""
COMPRESSED_BIAS_ROWS: Final = 1024
"""Of a bias of positions under a causal mask, longer ones may give these last rows alone."""
ALL_TOKENS: Final = 2**31 - 1
"""``pre_tockens`` and ``next_tockens`` that hide nothing (the operator's spelling)."""

FULL, WHOLE_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = 0, 1, 2, 3, 4
"""Values of ``sparse_mode``: no mask, or one that hides what the token counts hide; a whole mask;
diagonal from the upper left or to the lower right corner; a band whose borders are counted from the
lower right corner."""

AFTER_SCALE, BEFORE_SCALE, SLOPES, ROOT_SLOPES = 0, 1, 2, 3
"""Values of ``pse_type``: a bias that is added to the scaled scores, or to the scores before they
are scaled; slopes, times the distance of query and key, or times its root, subtracted after."""

LAYOUTS: Final = ("SBH", "BSH", "BSND", "BNSD")
"""Of queries, keys and values in one call, beside ``TND`` for packed documents."""


class Drawn(NamedTuple):
    """What the operator's dropout was drawn from, for the backward of the same call."""

    seed: int = 0
    offset: int = 0
    numels: int = 0
    """Entries of its mask."""


class AttentionOut(NamedTuple):
    """What the attention's forward answers, as far as it is used."""

    out: Tensor
    softmax_max: Tensor
    """Largest score of each query, repeated 8 times, float32: [B, N, S, 8], or [T, N, 8]."""
    softmax_sum: Tensor
    """Sum of ``exp(score - max)`` of each query, alike."""
    drawn: Drawn


class Sparsity(NamedTuple):
    """Which scores the attention computes."""

    mode: int = FULL
    mask: Tensor | None = None
    """bool, True where hidden: [2048, 2048], above the diagonal, in every mode from
    ``LEFT_UP_CAUSAL`` on; [S, J] in the modes before."""
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS
    query_ends: Sequence[int] | None = None
    """Running totals of query lengths, with layout TND."""
    key_ends: Sequence[int] | None = None


class Bias(NamedTuple):
    """What is added to the scores."""

    pse: Tensor
    """[B, N, S, J], [1, N, S, J] or [B, N, 1, J] in q's dtype; with slopes [N] float32. Of a bias
    of positions under a causal mask the last 1024 rows, [1, N, 1024, J]."""
    kind: int = BEFORE_SCALE
    query_start: int = 0
    """Position of the first query, with slopes."""
    key_start: int = 0


class Call(NamedTuple):
    """What one call computes, the same in forward and backward."""

    heads: int
    """N."""
    layout: str
    """One of ``LAYOUTS``, or ``TND``."""
    scale: float
    sparsity: Sparsity = Sparsity()
    bias: Bias | None = None
    keep_probability: float = 1.0
    """Of a probability, in dropout; above 0."""
    version: int = 1
    """Of the operator."""

    def arguments(self) -> dict[str, Any]:
        """As the operator's version has them."""
        sparsity, bias = self.sparsity, self.bias
        tokens = "tockens" if self.version == 1 else "tokens"
        given = {
            "atten_mask": sparsity.mask,
            "sparse_mode": sparsity.mode,
            f"pre_{tokens}": sparsity.pre_tokens,
            f"next_{tokens}": sparsity.next_tokens,
            "actual_seq_qlen": None if sparsity.query_ends is None else list(sparsity.query_ends),
            "actual_seq_kvlen": None if sparsity.key_ends is None else list(sparsity.key_ends),
            "softmax_layout": "TND" if self.layout == "TND" else "",
            "keep_prob": self.keep_probability,
            "pse": None if bias is None else bias.pse,
        }
        if self.version == 1:
            assert bias is None or bias.kind == BEFORE_SCALE
            return given
        if bias is None:
            return given
        given["pse_type"] = bias.kind
        if bias.kind in (SLOPES, ROOT_SLOPES):
            given |= {"q_start_idx": [bias.query_start], "kv_start_idx": [bias.key_start]}
        return given


def fusion_attention(query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOut:
    """``dropout(softmax(scale * q @ k.T + bias)) @ v``.

    Args:
        query: [S, B, N * D] with layout SBH, [B, S, N * D] with BSH, and so on; [T, N, D] with TND.
        key: [J, B, G * D] and so on; value alike.

    Dropout is drawn from the device's generator.
    """
    operator = (
        torch.ops.npu.npu_fusion_attention
        if call.version == 1
        else torch.ops.npu.npu_fusion_attention_v2
    )
    out, softmax_max, softmax_sum, _, *drawn = operator(
        query, key, value, call.heads, call.layout, scale=call.scale, **call.arguments()
    )
    return AttentionOut(out, softmax_max, softmax_sum, Drawn(*drawn))


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor,
    call: Call,
    *,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    drawn: Drawn,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the forward's output, statistics and dropout (an
    empty ``Drawn`` without); a bias gets none from it."""
    operator = (
        torch.ops.npu.npu_fusion_attention_grad
        if call.version == 1
        else torch.ops.npu.npu_fusion_attention_grad_v2
    )
    dq, dk, dv, *_ = operator(
        query,
        key,
        value,
        dout,
        call.heads,
        call.layout,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        attention_in=out,
        scale_value=call.scale,
        **drawn._asdict(),
        **call.arguments(),
    )
    return dq, dk, dv
