"""Fused MLPs for inference: dense or by experts, in floating point, int8, or with int8 weights.

No backward; ``expert_mlp`` is the trainable one. An expert's tokens are contiguous; ``experts`` has
the rows of each, or their cumulative sums (``cumulative``).

Source: MindSpeed's operator documentation, ffn; torch_npu's documentation of npu_ffn.
"""

# M tokens, H hidden size, F intermediate size (2F before a gated activation), X experts

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_run.ops.elementwise.activations import activate
from ascend_run.ops.kernels.forward_only import refuse_gradient

from .group_lists import group_sizes
from .quantised_matmul import antiquantised, products, spread, to_int8


def ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    experts: Sequence[int] | None = None,
    cumulative: bool = False,
) -> Tensor:
    """Compute ``act(x @ weight1 + bias1) @ weight2 + bias2`` in x's dtype.

    Args:
        x: [..., H]; [M, H] with experts.
        weight1: [H, F], or [X, H, F] with experts; weight2 [F, H] or [X, F, H]. Biases [F] and [H],
            or [X, F] and [X, H].
        activation: See ``activations``; with a gated one the first weight and bias have 2F for F.
        experts: Rows of each expert, on the host; cumulative sums if ``cumulative``.

    Numerics: in float32 (float64 for float64).

    Raises:
        RuntimeError: If a gradient is required.
    """
    refuse_gradient("ffn", x, weight1, weight2, bias1, bias2)
    wide = torch.promote_types(x.dtype, torch.float32)
    sizes = expert_sizes(experts, cumulative, x)
    hidden = _linear(x.to(wide), weight1.to(wide), bias1, sizes)
    return _linear(activate(hidden, activation), weight2.to(wide), bias2, sizes).to(x.dtype)


def quantised_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    scale: Tensor,
    offset: Tensor,
    deq_scale1: Tensor,
    deq_scale2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    experts: Sequence[int] | None = None,
    cumulative: bool = False,
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Compute ``(int8(act((x @ w1 + b1) * deq1) * scale + offset) @ w2 + b2) * deq2``.

    Args:
        x, weight1, weight2: int8, in the shapes of ``ffn``. Biases int32.
        scale: [1] or [F], [X] or [X, F] with experts; offset [1] or [X]: quantisation of the
            activation, which rounds to nearest (ties to even) and saturates.
        deq_scale1: [F] or [X, F]; deq_scale2: [H] or [X, H].

    Numerics: in float64, which holds the integer matmuls exactly.

    Raises:
        RuntimeError: If a gradient is required.
    """
    refuse_gradient("quantised_ffn", scale, offset, deq_scale1, deq_scale2)
    sizes = expert_sizes(experts, cumulative, x)
    hidden = _linear(x.double(), weight1.double(), bias1, sizes) * _by_row(deq_scale1, sizes)
    active = activate(hidden, activation)
    level = to_int8(active * _by_row(scale, sizes) + _by_row(offset, sizes))
    y = _linear(level.double(), weight2.double(), bias2, sizes) * _by_row(deq_scale2, sizes)
    return y.to(output_dtype)


def weight_quantised_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    antiquant_scale1: Tensor,
    antiquant_scale2: Tensor,
    antiquant_offset1: Tensor | None = None,
    antiquant_offset2: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    experts: Sequence[int] | None = None,
    cumulative: bool = False,
) -> Tensor:
    """Compute ``ffn`` with ``(weight + antiquant_offset) * antiquant_scale`` for each int8 weight.

    Args:
        antiquant_scale1: [F] or [X, F], the offset alike; antiquant_scale2: [H] or [X, H].

    Raises:
        RuntimeError: If a gradient is required.
    """
    refuse_gradient("weight_quantised_ffn", x, antiquant_scale1, antiquant_scale2, bias1, bias2)
    wide = torch.promote_types(x.dtype, torch.float32)
    first = antiquantised(weight1, antiquant_scale1, antiquant_offset1, wide)
    second = antiquantised(weight2, antiquant_scale2, antiquant_offset2, wide)
    y = ffn(
        x.to(wide),
        first,
        second,
        activation,
        bias1=bias1,
        bias2=bias2,
        experts=experts,
        cumulative=cumulative,
    )
    return y.to(x.dtype)


def expert_sizes(
    experts: Sequence[int] | None, cumulative: bool, x: Tensor
) -> tuple[int, ...] | None:
    return None if experts is None else group_sizes(experts, cumulative, x.shape[0])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int] | None) -> Tensor:
    y = x @ weight if sizes is None else products(x, weight, sizes)
    return y if bias is None else y + _by_row(bias, sizes)


def _by_row(x: Tensor, sizes: Sequence[int] | None) -> Tensor:
    """Expand [X, F] to [M, F], or [X] to [M, 1], by each token's expert; x itself without
    experts."""
    if sizes is None:
        return x
    rows = spread(x, sizes)
    return rows.unsqueeze(-1) if rows.dim() == 1 else rows
