"""Gathered keys and values as an attention kernel of this package's contract."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.ops.attention.ring_attention.cut import Cut
from ascend_run.ops.attention.ring_attention.gathered import GatheredAttention
from ascend_run.ops.attention.ring_attention.inner import lacking
from ascend_run.plugin_api import AttentionKernel, AttentionResult, AttentionSpec, HookError


class GatheringKernel(GatheredAttention):
    """contracts.AttentionKernel on this rank's chunks of the sequence, [s, B, N, D].

    Raises:
        HookError: The inner kernel cannot compute blocks of the keys.
    """

    def __init__(
        self,
        inner: AttentionKernel,
        group: dist.ProcessGroup,
        cut: Cut,
        *,
        groups_at_once: int | None = None,
        kv_cache: KvCache = "none",
    ) -> None:
        if problems := lacking(inner):
            name = type(inner).__name__
            raise HookError(f"kv-allgather-cp cannot compute its blocks by {name}", problems)
        super().__init__(inner, group, cut, groups_at_once=groups_at_once, kv_cache=kv_cache)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        return AttentionResult(*super().forward(q, k, v, spec))
