"""Attention on the NPU by its fused operator, forward and backward.

Rectangles of visible scores run one by one, by default in layout SBH, which is the contract's
memory layout; a batch of complete documents is one call in layout TND. The operator returns the
maximum score and the sum of exponentials of each query. Backward passes their log-sum-exp as the
maximum, with a sum of 1, which gives the same probabilities; so it can also pass a merged one. The
operator draws dropout from the device's generator, which is seeded for it; the seed and offset that
it returns are passed to backward. A softcap, which no operator supports, runs in exact blocks of
torch operations.
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T packed tokens

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from ascend_run.ops.attention import blockwise_attention, fused_attention, pieced_attention
from ascend_run.ops.attention.blockwise_attention import learned_bias
from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    AttentionResult,
    AttentionSpec,
    Mask,
)

from .attention_pieces import Pieces, SavedDraws, drawing_from, log_sum_exp, statistics
from .masks import SharedMasks

MOST_DOCUMENTS: Final = 1024
"""Maximum documents per call in layout TND; the operator's limit."""


class FusedNpuAttention(AttentionKernel[SavedDraws | tuple[()]]):
    """The attention kernel of the NPU platform.

    Shapes and dtypes: as in the contract; float32, bfloat16 and float16, the log-sum-exp float32.
    Numerics: exact softmax, statistics in float32; a bias is rounded to q's dtype. A query that
    sees no key returns zeros, a log-sum-exp of -inf (or the sink) and no gradient. Source:
    torch_npu's npu_fusion_attention and npu_fusion_attention_v2.

    Args:
        version: Version of the operator; 2 computes position biases itself, from slopes.
        layout: Layout of q, k and v in a call, one of ``operators.LAYOUTS``.
        in_blocks: Never use the operator.
        masks: One compressed mask for all calls, or a full mask for each call shape.
    """

    features = AttentionFeatures.all_but()
    backward_reads = frozenset({"q", "k", "v", "out", "lse"})

    def __init__(
        self,
        *,
        version: int = 1,
        layout: str = "SBH",
        in_blocks: bool = False,
        masks: Literal["compressed", "whole"] = "compressed",
    ) -> None:
        self.version, self.layout, self.in_blocks = version, layout, in_blocks
        self.masks = SharedMasks(compressed=masks == "compressed")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> AttentionResult[SavedDraws | tuple[()]]:
        if self.in_blocks or _beyond_the_operator(spec):
            return AttentionResult(*fused_attention.in_blocks_forward(q, k, v, spec))
        if q.dim() == 3:
            result = self.forward(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), spec)
            return AttentionResult(result.out.squeeze(1), result.lse.squeeze(0), result.saved)
        pieces = self._pieces(spec)
        with drawing_from(spec.dropout, q.device):
            if ends := _documents(q, k, spec):
                out, lse = _documents_forward(pieces, q, k, v, ends)
            else:
                out, lse = pieced_attention.forward(pieces, q, k, v, spec.mask, spec.scale)
        if spec.sinks is not None:
            out, lse = pieced_attention.with_sinks(out, lse, spec.sinks, axis=0)
        return AttentionResult(out, lse, pieces.saved())

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: SavedDraws | tuple[()],
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        q, k, v, out, lse = fused_attention.all_given(q, k, v, out, lse)  # see backward_reads
        if self.in_blocks or _beyond_the_operator(spec):
            return fused_attention.in_blocks_backward(dout, q, k, v, out, lse, spec)
        if q.dim() == 3:
            dout, q, k, v, out = (t.unsqueeze(1) for t in (dout, q, k, v, out))
            lse = lse.unsqueeze(0)
            dq, dk, dv, *extras = self.backward(dout, q, k, v, out, lse, saved, spec)
            return dq.squeeze(1), dk.squeeze(1), dv.squeeze(1), *extras
        pieces = self._pieces(spec, saved)
        if ends := _documents(q, k, spec):
            gradients = _documents_backward(pieces, dout, q, k, v, out, lse, ends)
        else:
            gradients = pieced_attention.backward(
                pieces, dout, q, k, v, out, lse, spec.mask, spec.scale
            )
        extras = []
        if learned_bias(spec) is not None:  # the operator returns none
            extras.append(_bias_gradient(dout, q, k, v, out, lse, spec))
        if spec.sinks is not None:
            extras.append(pieced_attention.sink_gradient(dout, out, lse, spec.sinks, axis=0))
        return *gradients, *extras

    def _pieces(self, spec: AttentionSpec, saved: SavedDraws | tuple[()] = ()) -> Pieces:
        return Pieces(spec, self.masks, version=self.version, layout=self.layout, saved=saved)


def _beyond_the_operator(spec: AttentionSpec) -> bool:
    """Return whether the operator does not support a spec.

    It does not support softcap, a dropout probability of 1, or dropout with the gradient of a bias.
    """
    dropout = spec.dropout
    drops_all = dropout is not None and dropout.probability >= 1.0
    learns = dropout is not None and learned_bias(spec) is not None
    return spec.softcap is not None or drops_all or learns


def _bias_gradient(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> Tensor:
    dout, q, k, v, out = (t.permute(1, 2, 0, 3) for t in (dout, q, k, v, out))
    return blockwise_attention.bias_gradient(dout, q, k, v, out, lse, spec)


def _documents_forward(
    pieces: Pieces, q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int]
) -> tuple[Tensor, Tensor]:
    width = v.shape[-1]
    q, k, v = (_tokens_first(t) for t in pieced_attention.one_width(q, k, v))
    packed = pieces.packed(q, k, v, ends)
    return packed.out[..., :width].unsqueeze(1), log_sum_exp(packed).t().unsqueeze(0)


def _documents_backward(
    pieces: Pieces,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    q_width, v_width = q.shape[-1], v.shape[-1]
    q, k, v = pieced_attention.one_width(q, k, v)
    missing = q.shape[-1] - v_width
    dout, out = (torch.nn.functional.pad(t, (0, missing)) for t in (dout, out))
    dout, q, k, v, out = (_tokens_first(t) for t in (dout, q, k, v, out))
    dq, dk, dv = pieces.packed_backward(
        dout,
        q,
        k,
        v,
        out,
        statistics(lse.squeeze(0).t()),
        ends,
    )
    return (
        dq[..., :q_width].unsqueeze(1),
        dk[..., :q_width].unsqueeze(1),
        dv[..., :v_width].unsqueeze(1),
    )


def _documents(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[int, ...] | None:
    """Return the ends of the documents of a packed sequence if one call can take them all."""
    length, mask = q.shape[0], spec.mask
    if mask.document_ends is None or not _is_plain(mask) or q.shape[1] != 1:
        return None
    if k.shape[0] != length or spec.bias is not None or spec.position_bias is not None:
        return None
    shifted = {end - mask.query_start for end in mask.document_ends}
    ends = (*sorted(end for end in shifted if 0 < end < length), length)
    return ends if 1 < len(ends) <= MOST_DOCUMENTS else None


def _is_plain(mask: Mask) -> bool:
    return mask.causal and mask.window is None and mask.query_start == mask.key_start


def _tokens_first(x_S1ND: Tensor) -> Tensor:
    return x_S1ND.squeeze(1).contiguous()
