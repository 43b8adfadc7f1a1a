"""Wrong: a backward that is not the derivative of its forward."""

from __future__ import annotations

from typing import Any

from ascend_run.plugin_api import AttentionFeatures, Numerics, hookimpl

from .attention import Capped
from .base import Listens, declared


class CappedForward(Capped):
    """Its backward forgets the cap."""

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
        return CappedForward


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
