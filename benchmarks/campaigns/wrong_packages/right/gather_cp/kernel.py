"""The kernel around the inner one; imports torch."""

# S = sequence on this rank, T = full sequence, B = batch, N = query heads, G = key-value heads

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.plugin_api import AttentionKernel, AttentionResult, AttentionSpec


class GatheringKernel:
    """Attention of this rank's queries to the keys of all ranks."""

    def __init__(self, inner: AttentionKernel, group: dist.ProcessGroup) -> None:
        self.inner, self.group = inner, group
        self.features = attrs.evolve(
            inner.features,
            **dict.fromkeys(("documents", "bias", "position_bias", "sinks"), False),
            **dict.fromkeys(("dropout", "packed", "unequal_lengths"), False),
        )
        self.backward_reads = inner.backward_reads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        k, v = self._gathered(k), self._gathered(v)
        out, lse, saved = self.inner.forward(q, k, v, self._local(spec, q.shape[0]))
        return AttentionResult(out, lse, saved)

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: Any,
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        k = None if k is None else self._gathered(k)
        v = None if v is None else self._gathered(v)
        local = self._local(spec, dout.shape[0])
        dq, dk, dv, *extras = self.inner.backward(dout, q, k, v, out, lse, saved, local)
        return dq, self._summed(dk), self._summed(dv), *extras

    def _local(self, spec: AttentionSpec, length: int) -> AttentionSpec:
        """The spec with the position of this rank's first query."""
        mask = attrs.evolve(spec.mask, query_start=self.group.rank() * length)
        return attrs.evolve(spec, mask=mask)

    def _gathered(self, x: Tensor) -> Tensor:
        """[S, B, G, D] -> [T, B, G, D]."""
        full = x.new_empty((self.group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(full, x.contiguous(), group=self.group)
        return full

    def _summed(self, gradient: Tensor) -> Tensor:
        """[T, B, G, D], each rank's share -> [S, B, G, D], the sum over ranks."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=self.group)
        return torch.chunk(gradient, self.group.size())[self.group.rank()]
