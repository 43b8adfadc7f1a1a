"""Record which features the innermost attention kernel of a run was called with."""

from __future__ import annotations

from typing import Any

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import AttentionFeatures, AttentionResult, AttentionSpec

_KERNEL = "ascend_attention_kernel"


@attrs.define
class AttentionUse:
    """The features of all calls so far."""

    features: set[str] = attrs.field(factory=set)

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


def record_attention(hooks: Hooks) -> AttentionUse:
    """Record the calls of every kernel that these hooks provide from now on."""
    use, inner = AttentionUse(), hooks.require_named

    def require_named(hook: str, **arguments: Any) -> tuple[str, Any]:
        plugin, found = inner(hook, **arguments)
        return plugin, _WatchedKernel(found, use) if hook == _KERNEL else found

    hooks.require_named = require_named  # type: ignore[method-assign]
    return use
