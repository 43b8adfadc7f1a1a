"""Wrong: a feature of the attention kernel that is used and not declared."""

from __future__ import annotations

from typing import Any

import attrs

from ascend_run.plugin_api import AttentionFeatures, Numerics, hookimpl

from .base import Listens, declared


class Capped:
    """An attention kernel inside, called with a softcap."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.features = attrs.evolve(inner.features, softcap=False)
        self.backward_reads = inner.backward_reads

    def forward(self, q: Any, k: Any, v: Any, spec: Any) -> Any:
        return self.inner.forward(q, k, v, attrs.evolve(spec, softcap=0.5))

    def backward(self, *arguments: Any) -> Any:
        *others, spec = arguments
        return self.inner.backward(*others, attrs.evolve(spec, softcap=0.5))


class MissesItsNeed(Listens):
    manifest = declared(
        "misses-its-need",
        numerics=Numerics.MODEL,
        attention=AttentionFeatures.all_but("softcap"),
    )

    @hookimpl
    def ascend_attention(self) -> Any:
        return Capped
