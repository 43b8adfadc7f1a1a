"""The exchange as an attention kernel of this package's contract."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.head_exchange import HeadExchange
from ascend_run.ops.attention.key_roads import GatheredKeys
from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.plugin_api import AttentionKernel, AttentionResult, AttentionSpec


class UlyssesKernel(HeadExchange):
    """contracts.AttentionKernel on [s, B, N, D], by ``inner`` on [S, B, N/P, D]."""

    def __init__(
        self,
        inner: AttentionKernel,
        group: dist.ProcessGroup,
        *,
        kv_cache: KvCache = "full",
        gathers: bool = False,
    ) -> None:
        keys = GatheredKeys() if gathers else None
        super().__init__(inner, group, keys=keys, kv_cache=kv_cache)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        return AttentionResult(*super().forward(q, k, v, spec))
