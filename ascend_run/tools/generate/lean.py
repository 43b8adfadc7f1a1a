"""Packed weights and lean layers in a model that is built to generate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
from torch import nn

from ascend_run.ops.experts.packed_experts import PackedExperts
from ascend_run.ops.generation.cached_attention import CachedForward
from ascend_run.ops.generation.lean_layer import LeanLayer, LeanLinear, StepAngles
from ascend_run.ops.linear.packed_linear import DTYPES, PackedWeight, packed_link, unavailable
from ascend_run.types.forward import Forward, ForwardLink

if TYPE_CHECKING:
    from ascend_run.core.model.gpt import GPT

_UNREAD: Final = (
    "attention_mask",
    "attention_bias",
    "context",
    "context_mask",
    "inference_context",
    "padding_mask",
    "sequence_len_offset",
)
"""Arguments that a step does not have; with one of them the modules compute."""


def asks_more(options: Mapping[str, Any]) -> bool:
    """Return whether a call of a layer or its attention has an argument that a step has not."""
    of_batch = options.get("packed_seq_params")
    has_mask = of_batch is not None and (
        of_batch.bias is not None or of_batch.document_ends is not None
    )
    return has_mask or any(options.get(name) is not None for name in _UNREAD)


@attrs.define(eq=False)
class LeanModel:
    """Links of the linears and layers of a model, and its experts; they take effect with
    ``prepare``."""

    forward: CachedForward
    weights: dict[nn.Module, PackedWeight] = attrs.field(factory=dict)
    experts: PackedExperts = attrs.field(factory=PackedExperts)
    layers: dict[nn.Module, LeanLayer] = attrs.field(factory=dict)
    _seen: list[nn.Module] = attrs.field(factory=list)

    def linear_link(self, linear: nn.Module) -> ForwardLink:
        """Return a link that computes a linear by its packed weight."""
        weight = self.weights[linear] = PackedWeight(linear.weight)  # type: ignore[arg-type]
        return packed_link(linear, weight)

    def layer_link(self, layer: nn.Module) -> ForwardLink:
        """Return a link that computes steps of a layer by the lean one."""
        self._seen.append(layer)

        def wrap(inner: Forward) -> Forward:
            def forward(*arguments: Any, **options: Any) -> Any:
                lean = self.layers.get(layer)
                if lean is None or self.forward.step is None or arguments or asks_more(options):
                    return inner(*arguments, **options)
                of_batch = options.get("packed_seq_params")
                scale = None if of_batch is None else of_batch.query_scale.squeeze(1)
                hidden_TH = options["hidden_states"].squeeze(1)
                out_TH = lean(hidden_TH, options.get("rotary_pos_emb"), scale)
                return out_TH.unsqueeze(1), None

            return forward

        return ForwardLink(wrap=wrap, compilable=False)

    def prepare(self, model: GPT, read: Collection[nn.Module] = ()) -> None:
        """Pack the weights of a filled model, and use lean layers from now on.

        It can no longer be trained, filled or saved: the plain weights are freed. On several ranks
        it is this rank's part. With sequence parallelism only experts are packed and no layer is
        lean, since a rank has a share of the tokens.

        Args:
            read: Linears whose plain weights others read.
        """
        import structlog

        from ascend_run.core.model.experts import Experts

        from .recognition import lean_layer

        dtype = model.config.params_dtype
        packs = not model.config.sequence_parallel
        if packs and dtype in DTYPES and (reason := unavailable(dtype)) is not None:
            log = structlog.get_logger()
            log.warning("generate.unpacked", reason=reason, effect="slower for few tokens")
        for linear, weight in self.weights.items() if packs else ():
            weight.pack(keep_plain=linear in read)
        for module in model.modules():
            if isinstance(module, Experts) and module.compute is self.experts:
                self.experts.pack(module.fc1)
                self.experts.pack(module.fc2)
        angles = StepAngles(model.config.rotary_interleaved)
        for layer in self._seen:
            if (lean := lean_layer(layer, self.weights, angles)) is not None:
                self.layers[layer] = lean
        if model.post_process and packs and not model.normalizes_rows:
            self.forward.output = self._output(model)

    def _output(self, model: GPT) -> LeanLinear:
        tied = model._other_weight()
        weight = PackedWeight(model.output_layer.weight if tied is None else tied)
        weight.pack(keep_plain=tied is not None)  # the embedding reads it
        return LeanLinear(weight, model.output_layer.bias)
