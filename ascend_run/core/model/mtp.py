"""Multi-token prediction: extra layers that predict tokens further ahead, in training only.

Depth k predicts token i + k + 1 at position i: from the hidden state of depth k - 1, the embedding
of token i + k, one transformer layer, and the output layer of the model. Depth 0 is the model.
Source: arXiv:2412.19437, section 2.2; parameters and names are Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .assembly import Assembly
from .spec import last_layer_spec, norm_spec


def mtp_spec(
    config: TransformerConfig, assembly: Assembly
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return one layer for each depth, like the model's last layer; None without depths."""
    if not config.mtp_num_layers:
        return None
    norm = norm_spec(assembly)
    layer = ModuleSpec(
        module=MTPLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=last_layer_spec(config, assembly),
            layer_norm=norm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


class MTPLayer(MultiTokenPredictionLayer):
    """Megatron's layer of one depth; its token ids come shifted.

    Megatron shifts them inside, which supports one sequence sharding.
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        embedding: Callable[[Tensor, Tensor | None], Tensor],
        hidden_states: Tensor,
        packed_seq_params: object = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return input_ids, position_ids, embedding(input_ids, position_ids), hidden_states

    def _concat_embeddings(self, hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
        out: Tensor = super()._concat_embeddings(hidden_states, decoder_input)
        return out.float() if self.config.fp32_residual_connection else out

    def _checkpointed_forward(
        self,
        forward_func: Callable[..., Tensor],
        *,
        hidden_states: Tensor,
        decoder_input: Tensor,
        **others: Any,
    ) -> Tensor:
        # Megatron would save every argument as a tensor.
        out: Tensor = tensor_parallel.checkpoint(
            partial(forward_func, **others),
            self.config.distribute_saved_activations,
            hidden_states,
            decoder_input,
        )
        return out
