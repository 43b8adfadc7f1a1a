"""Attention on the CPU: torch's fused kernel where it can, exact arithmetic in blocks elsewhere.

The fused kernel is ``_scaled_dot_product_flash_attention_for_cpu`` (torch, aten/src/ATen/native/
cpu/FlashAttentionKernel.cpp), forward and backward, for the rectangles that ``visibility`` cuts.
Bias, softcap and dropout change the scores in ways it cannot follow in backward: those run in
``blockwise``. Sinks are a correction of the log-sum-exp, and cost nothing more.
"""

# S sequence, B batch, N query heads, G key-value heads, D width of q and k, E width of v

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_run.plugin_api import AttentionFeatures, AttentionResult, AttentionSpec

from . import blockwise
from .visibility import Rectangle, Shape, rectangles

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class FusedCpuAttention:
    """The platform's attention kernel.

    Shapes and dtypes: as in the contract; float64, float32, bfloat16 and float16. Sums of the
    fused kernel are float32 for the half precisions, and so is the log-sum-exp.
    Numerics: exact softmax (no approximation); float64 agrees with the formula to 1e-10.
    A query that sees no key gives zeros, a log-sum-exp of -inf (or the sink) and no gradient.
    """

    features = AttentionFeatures(
        window=True,
        documents=True,
        bias=True,
        sinks=True,
        softcap=True,
        dropout=True,
        packed=True,
        unequal_lengths=True,
        unequal_widths=True,
    )
    backward_reads = frozenset({"q", "k", "v", "out", "lse"})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        if q.dim() == 3:
            result = self.forward(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), spec)
            return AttentionResult(result.out.squeeze(1), result.lse.squeeze(0))
        compute = blockwise.forward if _needs_scores(spec) else _fused_forward
        out_BNSE, lse_BNS = compute(_heads_first(q), _heads_first(k), _heads_first(v), spec)
        if spec.sinks is not None:
            with_sink = torch.logaddexp(lse_BNS, spec.sinks.to(lse_BNS.dtype)[:, None])
            out_BNSE = (out_BNSE * (lse_BNS - with_sink).exp().unsqueeze(-1)).to(q.dtype)
            lse_BNS = with_sink
        return AttentionResult(_sequence_first(out_BNSE), lse_BNS)

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
        tensors = [_heads_first(t) for t in (dout, q, k, v, out)]
        compute = blockwise.backward if _needs_scores(spec) else _fused_backward
        dq, dk, dv, *extras = compute(*tensors, lse, spec)
        if spec.sinks is not None:
            extras.append(_sink_gradient(tensors[0], tensors[4], lse, spec.sinks))
        return (*(_sequence_first(t) for t in (dq, dk, dv)), *extras)


def _needs_scores(spec: AttentionSpec) -> bool:
    return spec.bias is not None or spec.softcap is not None or spec.dropout is not None


def _heads_first(x_SBND: Tensor) -> Tensor:
    x_BNSD = x_SBND.permute(1, 2, 0, 3)
    # The fused kernel takes any strides but the last one's, which it assumes to be 1.
    return x_BNSD if x_BNSD.stride(-1) == 1 else x_BNSD.contiguous()


def _sequence_first(x_BNSD: Tensor) -> Tensor:
    return x_BNSD.permute(2, 0, 1, 3)


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink takes ``exp(sink - lse)`` and gives no value, so it only lowers the others."""
    dot_BNS = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    probability_BNS = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(probability_BNS * dot_BNS).sum((0, 2)).to(sinks.dtype)


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    parts = rectangles(spec.mask, q.shape[2], k.shape[2])
    width = v.shape[-1]
    q, k, v = _one_width(q, k, v)
    if _covers_all(parts, q, k):
        out, lse = _forward(q, k, v, **_options(parts[0], q, spec.scale))
        return out[..., :width], lse
    out = q.new_zeros((*q.shape[:3], width))
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype)
    for part in parts:
        some, keys = q[:, :, part.queries], (k[:, :, part.keys], v[:, :, part.keys])
        part_out, part_lse = _forward(some, *keys, **_options(part, q, spec.scale))
        out[:, :, part.queries] = part_out[..., :width]
        lse[:, :, part.queries] = part_lse
    return out, lse


def _fused_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    parts = rectangles(spec.mask, q.shape[2], k.shape[2])
    q_width, v_width = q.shape[-1], v.shape[-1]
    dtype = q.dtype
    q, k, v = _one_width(q, k, v)
    dout, out = (
        F.pad(t, (0, q.shape[-1] - v_width)) if q.shape[-1] > v_width else t for t in (dout, out)
    )
    if _covers_all(parts, q, k):
        dq, dk, dv = _call_backward(dout, q, k, v, out, lse, parts[0], spec.scale)
        return dq[..., :q_width], dk[..., :q_width], dv[..., :v_width]
    # Several rectangles may share keys, so their gradients add up, in float32 at least.
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=sums), torch.zeros_like(v, dtype=sums)
    for part in parts:
        queries, keys = part.queries, part.keys
        part_dq, part_dk, part_dv = _call_backward(
            dout[:, :, queries],
            q[:, :, queries],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, queries],
            lse[:, :, queries].contiguous(),
            part,
            spec.scale,
        )
        dq[:, :, queries] = part_dq
        dk[:, :, keys] += part_dk
        dv[:, :, keys] += part_dv
    return dq[..., :q_width], dk[..., :q_width].to(dtype), dv[..., :v_width].to(dtype)


def _call_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Rectangle,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _options(part, q, scale)
    return _backward(dout, q, k, v, out, lse, 0.0, options.pop("is_causal"), **options)


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fused kernel wants one width: zeros beside q and k change no score, beside v no sum."""
    difference = q.shape[-1] - v.shape[-1]
    if difference > 0:
        return q, k, F.pad(v, (0, difference))
    if difference < 0:
        return F.pad(q, (0, -difference)), F.pad(k, (0, -difference)), v
    return q, k, v


def _covers_all(parts: tuple[Rectangle, ...], q: Tensor, k: Tensor) -> bool:
    """Whether one rectangle is the whole score matrix; a causal one may leave late keys out."""
    if len(parts) != 1:
        return False
    (part,) = parts
    whole_keys = part.keys == slice(0, k.shape[2])
    return part.queries == slice(0, q.shape[2]) and whole_keys


def _options(part: Rectangle, q: Tensor, scale: float) -> dict[str, Any]:
    options: dict[str, Any] = {"is_causal": part.shape is Shape.CAUSAL, "scale": scale}
    if part.shape is Shape.BAND:
        options["attn_mask"] = blockwise.band(part, q)
    return options
