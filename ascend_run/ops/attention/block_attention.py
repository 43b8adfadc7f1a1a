"""An attention kernel made of torch operations, for any device."""

from __future__ import annotations

import attrs
from torch import Tensor

from ascend_run.types.attention import (
    AttentionFeatures,
    AttentionResult,
    AttentionSpec,
    CachedAttentionKernel,
    CachedKeys,
)

from .fused_attention import all_given, in_blocks_backward, in_blocks_forward
from .paged_attention import PagedAttention


class BlockAttention(CachedAttentionKernel[tuple[()]]):
    """``blockwise_attention`` by the contract of a kernel: all features, scores in float32.

    Shapes and dtypes: as in the contract. Numerics: exact softmax; float64 agrees with the formula
    to 1e-10.
    """

    features = attrs.evolve(AttentionFeatures.all_but(), cached=True)
    backward_reads = frozenset({"q", "k", "v", "out", "lse"})

    def __init__(self) -> None:
        self._paged = PagedAttention(None, self.forward)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> AttentionResult[tuple[()]]:
        return AttentionResult(*in_blocks_forward(q, k, v, spec))

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
        q, k, v, out, lse = all_given(q, k, v, out, lse)  # see backward_reads
        return in_blocks_backward(dout, q, k, v, out, lse, spec)
