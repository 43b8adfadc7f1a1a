"""Attention on the CPU: torch's fused kernel, and exact arithmetic in blocks as the fallback.

The fused kernel is ``_scaled_dot_product_flash_attention_for_cpu`` (torch,
aten/src/ATen/native/cpu/FlashAttentionKernel.cpp), forward and backward, for the rectangles of
``ops.attention.visibility``; causal squares are split further, see ``halved_attention`` there.
Biases, softcap and dropout change the scores in ways that its backward does not support: those run
in ``blockwise_attention``. Sinks are a correction of the log-sum-exp, at no extra cost.
"""

# S sequence, B batch, N query heads, G key-value heads, D width of q and k, E width of v

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ascend_run.ops.attention import blockwise_attention, fused_attention
from ascend_run.ops.attention.paged_attention import PagedAttention
from ascend_run.ops.attention.shared_bands import SharedBands
from ascend_run.ops.attention.visibility import BAND_BLOCK, Rectangle, Shape
from ascend_run.plugin_api import AttentionFeatures, AttentionResult, AttentionSpec
from ascend_run.plugin_api.contracts import CachedAttentionKernel, CachedKeys

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """ops.attention.paged_attention.FullKernel."""
    out, lse = _forward(q, k, v, scale=scale)
    return out, lse


class _Fused:
    """ops.attention.pieced_attention.FusedKernel on [B, N, S, D]."""

    sequence_axis = 2
    band_block = BAND_BLOCK

    def __init__(self, masks: SharedBands | None) -> None:
        self._band = blockwise_attention.band if masks is None else masks.of

    def cut(self, part: Rectangle) -> Sequence[Rectangle]:
        """Return the rectangle itself: the kernel's causal mask starts at the top left corner."""
        return (part,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, **self._options(part, q, scale))
        return out, lse

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
        options = self._options(part, q, scale)
        result: tuple[Tensor, Tensor, Tensor] = _backward(
            dout, q, k, v, out, lse, 0.0, options.pop("is_causal"), **options
        )
        return result

    def _options(self, part: Rectangle, q: Tensor, scale: float) -> dict[str, object]:
        options: dict[str, object] = {"is_causal": part.shape is Shape.CAUSAL, "scale": scale}
        if part.shape is Shape.BAND:
            options["attn_mask"] = self._band(part, q)
        return options


class FusedCpuAttention(CachedAttentionKernel[tuple[()]]):
    """The attention kernel of the CPU platform.

    Shapes and dtypes: as in the contract; float64, float32, bfloat16 and float16. The fused kernel
    accumulates half precisions in float32, and their log-sum-exp is float32. Numerics: exact
    softmax (no approximation); float64 agrees with the formula to 1e-10. A query that sees no key
    returns zeros, a log-sum-exp of -inf (or the sink) and no gradient.

    Args:
        in_blocks: Never use the fused kernel.
        masks: Shared masks of bands; default: built for each call.
        wide_backward: Compute the fused backward of bfloat16 tensors in float32; the gradients are
            rounded once. ``blockwise_attention`` computes in float32 anyway.
    """

    features = attrs.evolve(AttentionFeatures.all_but(), cached=True)
    backward_reads = frozenset({"q", "k", "v", "out", "lse"})

    def __init__(
        self,
        *,
        in_blocks: bool = False,
        masks: SharedBands | None = None,
        wide_backward: bool = False,
    ) -> None:
        self.in_blocks, self.wide_backward = in_blocks, wide_backward
        self._fused = _Fused(masks)
        self._paged = PagedAttention(None if in_blocks else _unmasked, self.forward)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> AttentionResult[tuple[()]]:
        return AttentionResult(
            *fused_attention.forward(
                self._fused, q, k, v, spec, in_blocks=self._runs_in_blocks(spec), by_halves=True
            )
        )

    def forward_cached(self, q: Tensor, keys: CachedKeys, spec: AttentionSpec) -> Tensor:
        return self._paged(q, keys, spec)

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[()],
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        q, k, v, out, lse = fused_attention.all_given(q, k, v, out, lse)  # see backward_reads
        in_blocks, dtype = self._runs_in_blocks(spec), q.dtype
        if self.wide_backward and dtype is torch.bfloat16 and not in_blocks:
            dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        dq, dk, dv, *extras = fused_attention.backward(
            self._fused, *(dout, q, k, v, out, lse), spec, in_blocks=in_blocks, by_halves=True
        )
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), *extras

    def _runs_in_blocks(self, spec: AttentionSpec) -> bool:
        return self.in_blocks or blockwise_attention.needs_scores(spec)
