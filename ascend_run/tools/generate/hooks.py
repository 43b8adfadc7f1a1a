"""The hooks by which a built model computes steps with cached keys and values."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ascend_run.ops.generation.cached_attention import (
    CachedAttention,
    CachedForward,
    selected_rows,
)
from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    LinkPlace,
    Manifest,
    ModuleWrapper,
    RunConfig,
    Wrapper,
    hookimpl,
)
from ascend_run.plugin_api.contracts import ExpertsKernel

from .latents import LatentModel
from .lean import LeanModel


@attrs.frozen(eq=False)
class GenerationHooks:
    """A plugin that a tool adds to those of the model.

    As the first one it is the innermost wrapper of attention, around the platform's kernel.
    """

    manifest: ClassVar = Manifest(
        name="generation",
        summary="compute steps with cached keys and values",
        attention_needs=AttentionFeatures(unequal_lengths=True),
        forward_links={
            "linear": LinkPlace.OWN,
            "self_attention": LinkPlace.OWN,
            "layer": LinkPlace.OWN,
            "output_layer": LinkPlace.AROUND,
        },
    )
    forward: CachedForward
    lean: LeanModel
    latents: LatentModel

    @hookimpl
    def ascend_linear(self) -> ModuleWrapper:
        return self.lean.linear_link

    @hookimpl
    def ascend_self_attention(self, config: RunConfig) -> ModuleWrapper | None:
        return self.latents.link if config.model.multi_latent_attention else None

    @hookimpl
    def ascend_experts(self) -> ExpertsKernel:
        return self.lean.experts

    @hookimpl
    def ascend_layer(self) -> ModuleWrapper:
        return self.lean.layer_link

    @hookimpl
    def ascend_attention(self, layer_index: int) -> Wrapper[AttentionKernel]:
        return lambda inner: CachedAttention(inner, layer_index, self.forward)

    @hookimpl
    def ascend_output_layer(self) -> ModuleWrapper:
        return selected_rows(self.forward)
