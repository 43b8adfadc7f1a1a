"""The exchange as an attention kernel of this package's contract."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.head_exchange import HeadExchange
from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.plugin_api import AttentionKernel, AttentionResult, AttentionSpec

from .partition import UnevenParts


class UnalignedUlyssesKernel(HeadExchange):
    """contracts.AttentionKernel on this rank's part, by ``inner`` on the whole sequence and its
    share of the heads."""

    def __init__(
        self,
        inner: AttentionKernel,
        group: dist.ProcessGroup,
        partition: UnevenParts,
        *,
        kv_cache: KvCache = "full",
    ) -> None:
        rank, size = group.rank(), group.size()

        def lengths(held: int) -> Sequence[int]:
            whole = partition.whole_length(held, rank, size)
            known = whole in partition.uneven
            return partition.lengths(size, whole) if known else [held] * size

        super().__init__(inner, group, kv_cache=kv_cache, lengths=lengths)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        return AttentionResult(*super().forward(q, k, v, spec))
