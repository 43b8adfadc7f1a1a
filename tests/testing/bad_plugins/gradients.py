"""Wrong: a backward that is not the derivative of its forward."""

from __future__ import annotations

from typing import Any

import attrs

from ascend_run.plugin_api import AttentionFeatures, Numerics, hookimpl

from .base import Listens, declared

CAP = 0.5
"""Low enough for the scores of a tiny model."""


class CappedKernel:
    """An attention kernel inside: its scores are capped in the forward only."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.features = attrs.evolve(inner.features, softcap=False)
        self.backward_reads = inner.backward_reads

    def forward(self, q: Any, k: Any, v: Any, spec: Any) -> Any:
        return self.inner.forward(q, k, v, attrs.evolve(spec, softcap=CAP))

    def backward(self, *arguments: Any) -> Any:
        return self.inner.backward(*arguments)


class ForgetsTheCap(Listens):
    manifest = declared(
        "forgets-the-cap",
        numerics=Numerics.MODEL,
        attention=AttentionFeatures.all_but("softcap"),
        attention_needs=AttentionFeatures(softcap=True),
    )

    @hookimpl
    def ascend_attention(self) -> Any:
        return CappedKernel


class DetachesTheRouter(Listens):
    """The loss still depends on the router's weights, but gives it no gradient; the auxiliary loss
    does."""

    manifest = declared("detaches-the-router", numerics=Numerics.MODEL)

    def change(self, weights: Any, selected: Any) -> Any:
        return weights.detach()

    @hookimpl
    def ascend_moe_layer(self) -> Any:
        def wrap(layer: Any) -> Any:
            layer.router.register_forward_hook(
                lambda module, inputs, out: (0 * out[0] + self.change(*out), out[1])
            )
            return layer

        return wrap


class IgnoresTheRouter(DetachesTheRouter):
    """Every selected expert has the same weight, so that the loss does not reach the router."""

    manifest = declared("ignores-the-router", numerics=Numerics.MODEL)

    def change(self, weights: Any, selected: Any) -> Any:
        return selected.to(weights.dtype) / 2
