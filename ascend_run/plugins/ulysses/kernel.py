"""The exchange as an attention kernel of this package's contract."""

from __future__ import annotations

from torch import Tensor

from ascend_run.ops.head_exchange import HeadExchange
from ascend_run.plugin_api import AttentionResult, AttentionSpec


class UlyssesKernel(HeadExchange):
    """contracts.AttentionKernel on [s, B, N, D], by ``inner`` on [S, B, N/P, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        return AttentionResult(*super().forward(q, k, v, spec))
