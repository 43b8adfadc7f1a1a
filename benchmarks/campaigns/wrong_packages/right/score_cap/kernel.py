"""The kernel around the inner one."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from ascend_run.plugin_api import AttentionKernel, AttentionResult, AttentionSpec


class CappedKernel:
    """An attention kernel whose scores are capped."""

    def __init__(self, inner: AttentionKernel, cap: float) -> None:
        self.inner, self.cap = inner, cap
        self.features = attrs.evolve(inner.features, softcap=False)
        self.backward_reads = inner.backward_reads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        return self.inner.forward(q, k, v, self._capped(spec))

    def backward(self, dout: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *saved, spec = arguments
        return self.inner.backward(dout, *saved, self._capped(spec))

    def _capped(self, spec: AttentionSpec) -> AttentionSpec:
        return attrs.evolve(spec, softcap=self.cap)
