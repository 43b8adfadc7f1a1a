"""Record which features the innermost attention kernel of a run was called with."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    AttentionResult,
    AttentionSpec,
    Manifest,
    Wrapper,
    hookimpl,
)


@attrs.define(eq=False)
class AttentionUse:
    """A plugin that records what the kernel inside it is called with.

    As the first of a run's plugins it is the innermost wrapper, around the provided kernel.
    """

    manifest: ClassVar = Manifest(
        name="attention-use", summary="record the features that attention is called with"
    )
    features: set[str] = attrs.field(factory=set)
    """The features of all calls so far."""

    @hookimpl
    def ascend_attention(self) -> Wrapper[AttentionKernel]:
        return lambda inner: _WatchedKernel(inner, self)

    def add(self, q: Any, k: Any, v: Any, spec: AttentionSpec) -> None:
        """Add the features of one call."""
        used = AttentionFeatures(
            window=spec.mask.window is not None,
            documents=spec.mask.document_ends is not None,
            bias=spec.bias is not None,
            position_bias=spec.position_bias is not None,
            sinks=spec.sinks is not None,
            softcap=spec.softcap is not None,
            dropout=spec.dropout is not None,
            packed=q.dim() == 3,
            unequal_lengths=q.shape[0] != k.shape[0],
            unequal_widths=k.shape[-1] != v.shape[-1],
        )
        self.features |= used.names()


class _WatchedKernel:
    """The kernel that it has inside; its forward is recorded."""

    def __init__(self, inner: Any, use: AttentionUse) -> None:
        self._inner, self._use = inner, use

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, q: Any, k: Any, v: Any, spec: AttentionSpec) -> AttentionResult:
        self._use.add(q, k, v, spec)
        result: AttentionResult = self._inner.forward(q, k, v, spec)
        return result
