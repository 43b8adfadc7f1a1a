"""Shared experts that the token dispatcher has computed between its stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor


class DeferredExperts:
    """The shared experts of one layer, computed later than the layer calls them.

    Args:
        layer: Megatron's MoELayer, whose ``shared_experts_compute`` is replaced. It then adds
            nothing to what the dispatcher returns, which includes their output.
    """

    def __init__(self, layer: Any) -> None:
        self._compute: Callable[[Tensor], Tensor] = layer.shared_experts_compute
        self._call: Callable[[], Tensor] | None = None
        layer.shared_experts_compute = self._defer

    def _defer(self, hidden: Tensor) -> None:
        self._call = partial(self._compute, hidden)

    def output(self) -> Tensor:
        """Compute them, of what the layer has called them with."""
        assert self._call is not None
        call, self._call = self._call, None
        return call()
