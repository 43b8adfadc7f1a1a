"""Fused attention, forward and backward, in both versions of the operator.

Version 2 computes a position bias itself, from one slope per head, and takes any other bias after
the scale; version 1 takes a bias before the scale only. Their other arguments are the same, except
for the spelling of two.
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T tokens

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

STATISTICS_WIDTH: Final = 8
"""The softmax statistics are repeated this many times along a last axis."""
COMPRESSED_MASK_SIZE: Final = 2048
"""Side of the triangular mask that all causal and banded calls share."""
COMPRESSED_BIAS_ROWS: Final = 1024
"""For a longer position bias under a causal mask, these last rows suffice."""
ALL_TOKENS: Final = 2**31 - 1
"""Value of ``pre_tockens`` and ``next_tockens`` (the operator's spelling) that masks nothing."""

FULL, WHOLE_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = 0, 1, 2, 3, 4
"""Values of ``sparse_mode``: no mask, or one given by the token counts; a full mask; a diagonal
from the top left or to the bottom right corner; a band whose bounds count from the bottom right
corner."""

AFTER_SCALE, BEFORE_SCALE, SLOPES, ROOT_SLOPES = 0, 1, 2, 3
"""Values of ``pse_type``: a bias added to the scaled scores, or to the scores before the scale;
slopes times the distance between query and key, or times its square root, subtracted after the
scale."""

LAYOUTS: Final = ("SBH", "BSH", "BSND", "BNSD")
"""Layouts of queries, keys and values in one call; packed documents use ``TND``."""


class Drawn(NamedTuple):
    """Dropout state of a call, for its backward."""

    seed: int = 0
    offset: int = 0
    numels: int = 0
    """Number of entries of the dropout mask."""


class AttentionOut(NamedTuple):
    """The results of the attention's forward that are used."""

    out: Tensor
    softmax_max: Tensor
    """Maximum score of each query, repeated 8 times, float32: [B, N, S, 8], or [T, N, 8]."""
    softmax_sum: Tensor
    """Sum of ``exp(score - max)`` of each query, in the same shape."""
    drawn: Drawn


class Sparsity(NamedTuple):
    """The scores that the attention computes."""

    mode: int = FULL
    mask: Tensor | None = None
    """bool, True where masked: [2048, 2048], above the diagonal, in every mode from
    ``LEFT_UP_CAUSAL`` on; [S, J] in the modes before."""
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS
    query_ends: Sequence[int] | None = None
    """Cumulative query lengths, with layout TND."""
    key_ends: Sequence[int] | None = None


class Bias(NamedTuple):
    """A bias that is added to the scores."""

    pse: Tensor
    """[B, N, S, J], [1, N, S, J] or [B, N, 1, J] in q's dtype; with slopes [N] float32. For a
    position bias under a causal mask, the last 1024 rows suffice: [1, N, 1024, J]."""
    kind: int = BEFORE_SCALE
    query_start: int = 0
    """Position of the first query, with slopes."""
    key_start: int = 0


class Call(NamedTuple):
    """Arguments of one call, the same in forward and backward."""

    heads: int
    """Number of query heads, N."""
    layout: str
    """One of ``LAYOUTS``, or ``TND``."""
    scale: float
    sparsity: Sparsity = Sparsity()
    bias: Bias | None = None
    keep_probability: float = 1.0
    """Probability that dropout keeps an attention weight; above 0."""
    version: int = 1
    """Version of the operator."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the operator's version."""
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
    """Compute ``dropout(softmax(scale * q @ k.T + bias)) @ v``.

    Dropout is drawn from the device's generator.

    Args:
        query: [S, B, N * D] with layout SBH, [B, S, N * D] with BSH, and so on; [T, N, D] with TND.
        key: [J, B, G * D] and so on; value alike.
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
    """Return the gradients of query, key and value; a bias gets none.

    They are computed from the forward's output, statistics and dropout state (an empty ``Drawn``
    without dropout).
    """
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
