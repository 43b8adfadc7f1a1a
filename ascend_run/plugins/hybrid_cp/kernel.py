"""The exchange of heads around the ring, as an attention kernel of this package's contract."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.head_exchange import HeadExchange
from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.ops.attention.ring_attention.cut import Cut
from ascend_run.ops.attention.ring_attention.inner import lacking
from ascend_run.ops.attention.ring_attention.kernel import RingAttention
from ascend_run.plugin_api import AttentionKernel, AttentionResult, AttentionSpec, HookError


class HybridKernel(HeadExchange):
    """contracts.AttentionKernel on this rank's part of the sequence, [s, B, N, D].

    U neighbours give each other all that they hold together and a U-th of the heads; on those the
    ring of P / U attends.

    Raises:
        HookError: The inner kernel cannot compute the blocks of a ring.
    """

    def __init__(
        self,
        inner: AttentionKernel,
        heads: dist.ProcessGroup,
        window: dist.ProcessGroup,
        windows: dist.ProcessGroup,
        cut: Cut,
        *,
        kv_cache: KvCache = "none",
    ) -> None:
        if problems := lacking(inner):
            name = type(inner).__name__
            raise HookError(f"hybrid-cp cannot compute its blocks by {name}", problems)
        super().__init__(
            RingAttention(inner, window, cut, windows=windows, kv_cache=kv_cache), heads
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        return AttentionResult(*super().forward(q, k, v, spec))
