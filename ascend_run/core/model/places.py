"""Places of layers: what a pipeline deals out, of which plugins may leave some empty.

``model.num_layers`` counts places. The layers are numbered without the empty ones, and those
numbers are in the names of parameters: initial weights, checkpoints and conversions do not depend
on where the empty places are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.config import RunConfig

LayerNumbers: TypeAlias = tuple[int | None, ...]
"""For each place of the whole model the number of its layer, from 0; None where it is empty."""

_PLACE: Final = re.compile(r"(^|\.)decoder\.layers\.(\d+)\.")


def layer_numbers(config: RunConfig, hooks: Hooks) -> LayerNumbers:
    """The layers of a model, numbered without the places that plugins leave empty."""
    empty = {*hooks.collect("ascend_empty_layers", key=str, config=config)}
    numbers: list[int | None] = []
    for place in range(config.model.num_layers):
        numbers.append(None if place in empty else place - sum(n is None for n in numbers))
    return tuple(numbers)


def named_by_number(name: str, model: Any) -> str:
    """A parameter's name with the number of its layer, from one with its place in the model."""
    numbers: Sequence[int | None] = getattr(model, "layer_numbers", ())
    if not numbers:
        return name
    return _PLACE.sub(lambda match: f"{match[1]}decoder.layers.{numbers[int(match[2])]}.", name)


def count_layers(model: Any) -> int:
    """Layers of the whole model that a chunk belongs to, empty places left out."""
    numbers: Sequence[int | None] = getattr(model, "layer_numbers", ())
    if not numbers:
        return int(model.config.num_layers)
    return sum(number is not None for number in numbers)


class EmptyLayer(MegatronModule):
    """What stands in an empty place: no parameters, the hidden state passes through.

    It is cloned, since Megatron's pipeline frees the output of a stage once it is sent, and that
    must not be the input that backward still needs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: Any,
        vp_stage: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset

    def forward(
        self, hidden_states: Tensor, *_: Any, context: Any = None, **__: Any
    ) -> tuple[Tensor, Any]:
        """[S, B, H] -> [S, B, H]."""
        return hidden_states.clone(), context

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}


def is_empty(layer: nn.Module) -> bool:
    """Whether a module of ``decoder.layers`` stands in an empty place."""
    return isinstance(layer, EmptyLayer)
