"""Linears whose weight oneDNN has packed once, for models that only compute forward.

oneDNN reads a weight in blocks of its own. From a plain weight it makes them in every call, which
for a few tokens costs more than the product. Packed for 16 rows, one packing is fast for a single
token, for a batch of sequences and for chunks of prompts.

Source: torch, aten/src/ATen/native/mkldnn/Linear.cpp, as ``torch.compile`` uses it in freezing.
"""

# T rows (tokens), K inputs, N outputs

from __future__ import annotations

from functools import cache, partial
from typing import Final

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ascend_run.types.forward import ForwardLink

from .parallel_linear import LinearCollectives, LinearImplementation, linear_link, parallel_linear
from .plain_matmuls import Group

ROWS: Final = 16
_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest difference of a sum of 64 products of normal numbers, by the dtypes that are packed."""
DTYPES: Final = (*_TOLERANCES,)


class PackedWeight:
    """A weight [N, K] of a model that is not trained, and its products.

    Until ``pack`` they are those of torch. Numerics: float32 and bfloat16 by oneDNN, accumulated in
    float32; other dtypes, and what this machine cannot pack, by torch.
    """

    def __init__(self, weight_NK: Tensor) -> None:
        self.plain_NK = weight_NK
        self.packed: Tensor | None = None

    def pack(self, *, keep_plain: bool = False) -> None:
        """Pack the values as they are now, if this machine can.

        Args:
            keep_plain: Keep the memory of the plain weight, for other readers; else it is freed,
                and what reads the weight nevertheless reads NaN.
        """
        weight = self.plain_NK
        if weight.dtype not in DTYPES or unavailable(weight.dtype) is not None:
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        if not keep_plain:
            weight.data = weight.new_full((1, 1), torch.nan).expand(weight.shape)

    def __call__(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Return the product [T, N] of any leading dims, with the bias."""
        if self.packed is None:
            return nn.functional.linear(x_TK, self.plain_NK, bias_N)
        return _product(x_TK, self.packed, bias_N)


def packed_link(linear: nn.Module, weight: PackedWeight) -> ForwardLink:
    """Return a link that computes Megatron's linear by its packed weight, forward only.

    Raises:
        ValueError: See ``linear_link``.
    """
    return linear_link(linear, adapted=partial(_parallel, weight))


@cache
def unavailable(dtype: torch.dtype) -> str | None:
    """Return why this machine packs no weights of one of ``DTYPES``, or None; tried once."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bfloat16 in oneDNN"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), ROWS)
        for rows in (1, 2 * ROWS + 1):
            x = torch.randn(rows, 64, generator=generator)
            got = _product(x.to(dtype), packed, None).float()
            difference = float((got - torch.mm(x, weight.t())).abs().max())
            if not difference <= _TOLERANCES[dtype]:
                return f"its product with a packed weight is off by {difference:.2g}"
    except (AttributeError, RuntimeError, TypeError) as problem:  # private operators of torch
        return f"torch {torch.__version__} cannot: {str(problem).splitlines()[0]}"
    return None


def _product(x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, packed, bias_N, "none", [], "")
    return product


def _parallel(
    own: PackedWeight,
    x: Tensor,
    weight_NK: Tensor | None,
    collectives: LinearCollectives,
    group: Group | None,
    implementation: LinearImplementation,
) -> Tensor:
    """Compute ``parallel_linear`` by the packed weight where that is the linear's weight."""
    is_sequence = collectives in (LinearCollectives.COLUMN_SEQUENCE, LinearCollectives.ROW_SEQUENCE)
    if own.packed is None or weight_NK is not own.plain_NK or is_sequence:
        return parallel_linear(x, weight_NK, collectives, group, implementation)
    out = own(x)
    if collectives is LinearCollectives.ROW:
        dist.all_reduce(out, group=group)
    return out
