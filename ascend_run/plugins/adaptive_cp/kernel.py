"""The exchange by rounds as an attention kernel of this package's contract."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.adaptive.kernel import AdaptiveAttention
from ascend_run.ops.attention.ring_attention.cut import Cut
from ascend_run.ops.attention.ring_attention.inner import lacking
from ascend_run.plugin_api import AttentionKernel, AttentionResult, AttentionSpec, HookError


class AdaptiveKernel(AdaptiveAttention):
    """contracts.AttentionKernel on this rank's chunks of the sequence, [s, B, N, D].

    Raises:
        HookError: The inner kernel cannot compute blocks of the keys.
    """

    def __init__(self, inner: AttentionKernel, group: dist.ProcessGroup, cut: Cut) -> None:
        if problems := lacking(inner):
            name = type(inner).__name__
            raise HookError(f"adaptive-cp cannot compute its blocks by {name}", problems)
        super().__init__(inner, group, cut)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        return AttentionResult(*super().forward(q, k, v, spec))
