"""The exchange of heads around that of keys, as an attention kernel of this package's contract."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.adaptive.kernel import AdaptiveAttention
from ascend_run.ops.attention.head_exchange import HeadExchange
from ascend_run.ops.attention.ring_attention.cut import Cut
from ascend_run.ops.attention.ring_attention.inner import lacking
from ascend_run.plugin_api import AttentionKernel, AttentionResult, AttentionSpec, HookError


class HybridAdaptiveKernel(HeadExchange):
    """contracts.AttentionKernel on this rank's part of the sequence, [s, B, N, D].

    U neighbours give each other all that they hold together and a U-th of the heads; on those the
    P / U groups of them attend to each other's keys, as far as the mask asks for them.

    Raises:
        HookError: The inner kernel cannot compute blocks of the keys.
    """

    def __init__(
        self,
        inner: AttentionKernel,
        heads: dist.ProcessGroup,
        keys: dist.ProcessGroup,
        cut: Cut,
    ) -> None:
        if problems := lacking(inner):
            name = type(inner).__name__
            raise HookError(f"hybrid-adaptive-cp cannot compute its blocks by {name}", problems)
        super().__init__(AdaptiveAttention(inner, keys, cut), heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        return AttentionResult(*super().forward(q, k, v, spec))
