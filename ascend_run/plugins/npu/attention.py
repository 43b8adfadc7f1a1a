"""Attention on the NPU by its fused operator, forward and backward.

Rectangles of visible scores run one by one in layout SBH, which is the contract's own memory
layout; a batch of whole documents is one call in layout TND. The operator answers the largest
score and the sum of exponentials of each query; their log-sum-exp goes back in as the largest
score with a sum of 1, which is the same probabilities, and so may be one that was merged.
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T packed tokens

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ascend_run.ops import pieced_attention
from ascend_run.ops.blockwise_attention import needs_scores
from ascend_run.ops.visibility import Rectangle, Shape
from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionResult,
    AttentionSpec,
    Mask,
    PlatformError,
)

from . import operators
from .operators import Sparsity

MOST_DOCUMENTS: Final = 1024
"""Documents of one call in layout TND; the operator's limit."""


class FusedNpuAttention:
    """The platform's attention kernel.

    Shapes and dtypes: as in the contract; float32, bfloat16 and float16, the log-sum-exp float32.
    Numerics: exact softmax, statistics in float32. A query that sees no key gives zeros, a
    log-sum-exp of -inf (or the sink) and no gradient.
    Source: torch_npu's npu_fusion_attention.
    """

    features = AttentionFeatures(
        window=True,
        documents=True,
        sinks=True,
        packed=True,
        unequal_lengths=True,
        unequal_widths=True,
    )
    backward_reads = frozenset({"q", "k", "v", "out", "lse"})

    def __init__(self) -> None:
        self._rectangles = _Rectangles()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        _refuse_scores(spec)
        if q.dim() == 3:
            result = self.forward(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), spec)
            return AttentionResult(result.out.squeeze(1), result.lse.squeeze(0))
        if ends := _documents(q, k, spec.mask):
            out, lse = self._documents_forward(q, k, v, spec.scale, ends)
        else:
            out, lse = pieced_attention.forward(self._rectangles, q, k, v, spec.mask, spec.scale)
        if spec.sinks is not None:
            out, lse = pieced_attention.with_sinks(out, lse, spec.sinks, axis=0)
        return AttentionResult(out, lse)

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[Tensor, ...],
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        assert not any(t is None for t in (q, k, v, out, lse))  # see backward_reads
        if q.dim() == 3:
            packed = (t.unsqueeze(1) for t in (dout, q, k, v, out))
            dq, dk, dv, *extras = self.backward(*packed, lse.unsqueeze(0), saved, spec)
            return dq.squeeze(1), dk.squeeze(1), dv.squeeze(1), *extras
        if ends := _documents(q, k, spec.mask):
            gradients = self._documents_backward(dout, q, k, v, out, lse, spec.scale, ends)
        else:
            gradients = pieced_attention.backward(
                self._rectangles, dout, q, k, v, out, lse, spec.mask, spec.scale
            )
        if spec.sinks is None:
            return gradients
        return *gradients, pieced_attention.sink_gradient(dout, out, lse, spec.sinks, axis=0)

    def _documents_forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        width = v.shape[-1]
        tensors = [_tokens_first(t) for t in pieced_attention.one_width(q, k, v)]
        answer = operators.fusion_attention(
            *tensors,
            heads=q.shape[2],
            layout="TND",
            scale=scale,
            sparsity=self._rectangles.documents(ends, q.device),
        )
        lse_TN = _log_sum_exp(answer)
        return answer.out[..., :width].unsqueeze(1), lse_TN.t().unsqueeze(0)

    def _documents_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        ends: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_width, v_width = q.shape[-1], v.shape[-1]
        padded = pieced_attention.one_width(q, k, v)
        missing = padded[0].shape[-1] - v_width
        dout, out = (torch.nn.functional.pad(t, (0, missing)) for t in (dout, out))
        tensors = [_tokens_first(t) for t in (*padded, dout)]
        largest, total = _statistics(lse.squeeze(0).t())
        dq, dk, dv = operators.fusion_attention_grad(
            *tensors,
            heads=q.shape[2],
            layout="TND",
            scale=scale,
            sparsity=self._rectangles.documents(ends, q.device),
            out=_tokens_first(out),
            softmax_max=largest,
            softmax_sum=total,
        )
        return tuple(
            t[..., :w].unsqueeze(1) for t, w in ((dq, q_width), (dk, q_width), (dv, v_width))
        )


class _Rectangles:
    """ops.pieced_attention.FusedKernel on [S, B, N, D]."""

    sequence_axis = 0
    band_block = None  # its bands are two numbers, of any length

    def __init__(self) -> None:
        self._mask: Tensor | None = None

    def cut(self, part: Rectangle) -> Sequence[Rectangle]:
        """It takes them all: its causal mode counts from the upper left corner."""
        return (part,)

    def documents(self, ends: Sequence[int], device: torch.device) -> Sparsity:
        """Causal within each document."""
        mask = self._triangle(device)
        return Sparsity(operators.LEFT_UP_CAUSAL, mask, query_ends=ends, key_ends=ends)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor]:
        answer = operators.fusion_attention(
            _heads_joined(q),
            _heads_joined(k),
            _heads_joined(v),
            heads=q.shape[2],
            layout="SBH",
            scale=scale,
            sparsity=self._sparsity(part, q.device),
        )
        return answer.out.view(*q.shape[:3], -1), _log_sum_exp(answer)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: Rectangle,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        largest, total = _statistics(lse)
        dq, dk, dv = operators.fusion_attention_grad(
            _heads_joined(q),
            _heads_joined(k),
            _heads_joined(v),
            _heads_joined(dout),
            heads=q.shape[2],
            layout="SBH",
            scale=scale,
            sparsity=self._sparsity(part, q.device),
            out=_heads_joined(out),
            softmax_max=largest,
            softmax_sum=total,
        )
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

    def _sparsity(self, part: Rectangle, device: torch.device) -> Sparsity:
        if part.shape is Shape.FULL:
            return Sparsity()
        mask = self._triangle(device)
        if part.shape is Shape.CAUSAL:
            return Sparsity(operators.LEFT_UP_CAUSAL, mask)
        # The operator counts a band from the lower right corner, a rectangle from the upper left.
        shift = part.num_keys - part.num_queries
        return Sparsity(
            operators.BAND, mask, pre_tokens=shift - part.low, next_tokens=part.high - shift
        )

    def _triangle(self, device: torch.device) -> Tensor:
        """The mask of every causal and banded call; one for all layers."""
        if self._mask is None or self._mask.device != device:
            side = operators.COMPRESSED_MASK_SIZE
            self._mask = torch.ones(side, side, dtype=torch.bool, device=device).triu(1)
        return self._mask


def _refuse_scores(spec: AttentionSpec) -> None:
    """What ``features`` does not declare and ``ascend_check`` could not see."""
    if needs_scores(spec):
        named = [name for name in ("bias", "softcap", "dropout") if getattr(spec, name) is not None]
        raise PlatformError(
            f"platform npu: its fused attention has no {' and no '.join(named)}; leave that out, "
            "or run on another platform: --platform cpu"
        )


def _documents(q: Tensor, k: Tensor, mask: Mask) -> tuple[int, ...] | None:
    """Where the documents of one packed sequence end, if one call can take them all."""
    length = q.shape[0]
    aligned = k.shape[0] == length and mask.query_start == mask.key_start
    plain = mask.causal and mask.window is None
    if mask.document_ends is None or not aligned or not plain or q.shape[1] != 1:
        return None
    shifted = {end - mask.query_start for end in mask.document_ends}
    ends = (*sorted(end for end in shifted if 0 < end < length), length)
    return ends if 1 < len(ends) <= MOST_DOCUMENTS else None


def _heads_joined(x_SBND: Tensor) -> Tensor:
    return x_SBND.flatten(2).contiguous()


def _tokens_first(x_S1ND: Tensor) -> Tensor:
    return x_S1ND.squeeze(1).contiguous()


def _log_sum_exp(answer: operators.AttentionOut) -> Tensor:
    return answer.softmax_max[..., 0] + answer.softmax_sum[..., 0].log()


def _statistics(lse: Tensor) -> tuple[Tensor, Tensor]:
    """(largest score, sum of exponentials) in the operator's shape, of the same probabilities."""
    shape = (*lse.shape, operators.STATISTICS_WIDTH)
    largest = lse.unsqueeze(-1).expand(shape).contiguous()
    return largest, torch.ones_like(largest)
