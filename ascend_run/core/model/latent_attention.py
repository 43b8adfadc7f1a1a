"""Multi-latent attention on the attention contract: Megatron's parameters, our forward.

Queries, and keys together with values, are projected down to a narrow latent, normalised, and
projected up to heads. A part of each query turns with its position, and so does one key that all
heads share, which comes from the input beside the latent.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; megatron/core/transformer/
multi_latent_attention.py.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from .assembly import Assembly
from .attention import BatchMask, CoreAttention

# S sequence on this rank, s its part on one tensor-parallel rank under sequence parallelism (else
# S), B micro-batch, N heads on this tensor-parallel rank, C width of a head that does not turn, R
# width that does, E width of a value, L width of a latent, H hidden size


@attrs.frozen(kw_only=True)
class LatentAttentionSubmodules:
    """What Megatron's attention builds itself, and the normalisation of the latents."""

    core_attention: ModuleSpec
    linear_proj: type
    latent_norm: ModuleSpec | type


class LatentAttention(Attention):
    """Latent attention with the parameters and names of Megatron's MLASelfAttention.

    That class cannot be built without Transformer Engine (it compares with a class that is None
    then), rotates by tables of one way of cutting the sequence, and under tensor parallelism leaves
    the gradient of the shared key as each rank's heads have it. Here tables follow the owner of the
    cut, and that gradient is summed.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        assembly: Assembly,
    ) -> None:
        super().__init__(
            config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection
        )
        self.ops = assembly.ops
        self.key_width = config.qk_head_dim + config.qk_pos_emb_head_dim
        heads, hidden, latent = (
            config.num_attention_heads,
            config.hidden_size,
            config.kv_lora_rank,
        )
        if config.q_lora_rank is None:
            self.linear_q_proj = self._linear(hidden, heads * self.key_width)
        else:
            self.linear_q_down_proj = self._linear(hidden, config.q_lora_rank)
            self.q_layernorm = self._norm(submodules, config.q_lora_rank)
            self.linear_q_up_proj = self._linear(config.q_lora_rank, heads * self.key_width)
        self.linear_kv_down_proj = self._linear(hidden, latent + config.qk_pos_emb_head_dim)
        self.kv_layernorm = self._norm(submodules, latent)
        self.linear_kv_up_proj = self._linear(
            latent, heads * (config.qk_head_dim + config.v_head_dim)
        )

    def _linear(self, columns: int, rows: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            columns,
            rows,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )

    def _norm(self, submodules: LatentAttentionSubmodules, width: int) -> Any:
        return build_module(
            submodules.latent_norm,
            hidden_size=width,
            config=self.config,
            eps=self.config.layernorm_epsilon,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        *unused: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: BatchMask | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, B, H] -> ([s, B, H], bias).

        Args:
            rotary_pos_emb: [2, S, R], cosines and sines.
        """
        assert inference_context is None
        assert key_value_states is None
        assert rotary_pos_emb is not None, "a part of each head turns with its position"
        q, k, v = self.get_query_key_value_tensors(hidden_states, rotary_pos_emb)
        options = {"attention_bias": attention_bias, "packed_seq_params": packed_seq_params}
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(q, k, v, None, **options)
        else:
            out = self.core_attention(q, k, v, None, **options)
        return self.linear_proj(out)

    def get_query_key_value_tensors(
        self, hidden: Tensor, tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[s, B, H] -> q and k [S, B, N, C + R], v [S, B, N, E]."""
        config, heads = self.config, self.num_attention_heads_per_partition
        if config.q_lora_rank is None:
            mixed, _ = self.linear_q_proj(hidden)
        else:
            latent = self._own_tokens(self._whole(self.linear_q_down_proj(hidden)[0]))
            mixed, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        q = mixed.unflatten(-1, (heads, self.key_width))
        compressed = self._whole(self.linear_kv_down_proj(hidden)[0])
        latent, k_turning = compressed.split((config.kv_lora_rank, config.qk_pos_emb_head_dim), -1)
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(self._own_tokens(latent)))
        still, v = up.unflatten(-1, (heads, -1)).split((config.qk_head_dim, config.v_head_dim), -1)
        # Each rank's heads have a part of the shared key's gradient.
        k_turning = copy_to_tensor_model_parallel_region(k_turning, group=self.tp_group)
        k_turning = self._turned(k_turning.unsqueeze(2), tables).expand(-1, -1, heads, -1)
        q_still, q_turning = q.split((config.qk_head_dim, config.qk_pos_emb_head_dim), -1)
        q = torch.cat((q_still, self._turned(q_turning, tables)), -1)
        # Alone, a value does not keep the whole projection that it is a part of.
        return q, torch.cat((still, k_turning), -1), v.contiguous()

    def _turned(self, x_SBNR: Tensor, tables: Tensor) -> Tensor:
        return self.ops.rotary(x_SBNR, *tables.unbind(0), True)

    def _whole(self, part_SBL: Tensor) -> Tensor:
        """A latent of which each tensor-parallel rank has projected some entries."""
        return gather_from_tensor_model_parallel_region(part_SBL, group=self.tp_group)

    def _own_tokens(self, latent_SBL: Tensor) -> Tensor:
        """This rank's part of the sequence where it is shared out, as the linears above take it."""
        if not self.config.sequence_parallel:
            return latent_SBL
        return scatter_to_sequence_parallel_region(latent_SBL, group=self.tp_group)


def latent_attention_spec(
    config: MLATransformerConfig, assembly: Assembly, norm: ModuleSpec | type
) -> ModuleSpec:
    """Megatron's linears; latents are normalised with ``qk_layernorm``."""
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, "assembly": assembly},
        submodules=LatentAttentionSubmodules(
            core_attention=ModuleSpec(module=CoreAttention, params={"assembly": assembly}),
            linear_proj=RowParallelLinear,
            latent_norm=norm if config.qk_layernorm else IdentityOp,
        ),
    )
