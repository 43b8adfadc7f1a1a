"""Layer slots: the pipeline distributes slots, and plugins may leave some of them empty.

``model.num_layers`` counts slots. Layers are numbered without the empty slots, and parameter names
use these numbers, so initial weights, checkpoints and conversions do not depend on where the empty
slots are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from ascend_run.core.hooks import Hooks
from ascend_run.types.config import RunConfig

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

LayerNumbers: TypeAlias = tuple[int | None, ...]
"""Maps each layer slot to the number of its layer, from 0; None if the slot is empty."""

_PLACE: Final = re.compile(r"(^|\.)decoder\.layers\.(\d+)\.")


def layer_numbers(config: RunConfig, hooks: Hooks) -> LayerNumbers:
    """Number the layers of a model without the slots that plugins leave empty."""
    empty = {*hooks.collect("ascend_empty_layers", key=str, config=config)}
    numbers: list[int | None] = []
    for place in range(config.model.num_layers):
        numbers.append(None if place in empty else place - sum(n is None for n in numbers))
    return tuple(numbers)


def named_by_number(name: str, model: nn.Module) -> str:
    """Return a parameter's name with the layer number in place of the slot index."""
    numbers: Sequence[int | None] = getattr(model, "layer_numbers", ())
    if not numbers:
        return name
    return _PLACE.sub(lambda match: f"{match[1]}decoder.layers.{numbers[int(match[2])]}.", name)


def count_layers(model: nn.Module) -> int:
    """Return the number of layers of the full model, without empty slots."""
    numbers: Sequence[int | None] = getattr(model, "layer_numbers", ())
    if not numbers:
        return cast("MegatronModule", model).config.num_layers
    return sum(number is not None for number in numbers)


class EmptyLayer(MegatronModule):
    """Placeholder of an empty layer slot: no parameters, passes the hidden state through.

    It clones the hidden state: Megatron's pipeline frees a stage's output once it is sent, and that
    must not be the input that backward still needs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset

    def forward(
        self, hidden_states: Tensor, *_: Any, context: Tensor | None = None, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> [S, B, H]."""
        return hidden_states.clone(), context

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, object]:
        """Return nothing; there are no parameters."""
        return {}


def is_empty(layer: nn.Module) -> bool:
    """Return whether a module of ``decoder.layers`` is an empty slot."""
    return isinstance(layer, EmptyLayer)
