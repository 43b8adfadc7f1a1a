"""Multi-latent attention on the attention contract: Megatron's parameters, our forward.

Queries, and keys together with values, are projected down to a latent, normalized, and projected up
to heads. RoPE applies to a part of each query, and to a key that all heads share and that is
projected directly from the input.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; megatron/core/transformer/
multi_latent_attention.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

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
from .attention import CoreAttention, attend_and_project
from .batch_mask import BatchMask

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention import SelfAttentionSubmodules

# S sequence on this rank, s its shard on one tensor-parallel rank with sequence parallelism (else
# S), B micro-batch, N heads on this tensor-parallel rank, C head size without RoPE, R head size
# with RoPE, E head size of v, L latent size, H hidden size


@attrs.frozen(kw_only=True)
class LatentAttentionSubmodules:
    """Submodules that Megatron's attention builds, and the norm of the latents."""

    core_attention: ModuleSpec
    linear_proj: type
    latent_norm: ModuleSpec | type


class LatentAttention(Attention):
    """Multi-latent attention with the parameters and names of Megatron's MLASelfAttention.

    That class cannot be built without Transformer Engine (it compares with a class that is None
    then), supports one sequence sharding for its rotary tables, and with tensor parallelism does
    not reduce the gradient of the shared key over ranks. Here the tables follow the run's sequence
    partition, and the gradient is reduced.
    """

    config: MLATransformerConfig
    linear_q_proj: ColumnParallelLinear

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        assembly: Assembly,
    ) -> None:
        super().__init__(
            config,
            cast("SelfAttentionSubmodules", submodules),  # has all fields that it reads
            layer_number,
            attn_mask_type,
            "self",
            cp_comm_type,
            pg_collection,
        )
        self.ops, self.model = assembly.ops, assembly.model
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
            if not config.sequence_parallel and (ranks := self.pg_collection.tp.size()) > 1:
                # Every rank has the whole gradient, but Megatron sums it over the ranks, since the
                # norm has the name of one of each head's queries.
                for parameter in self.q_layernorm.parameters():
                    parameter.register_hook(lambda gradient: gradient / ranks)
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
            init_method=cast("Callable[..., Any]", self.config.init_method),
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
            eps=self.model.latent_layernorm_epsilon or self.config.layernorm_epsilon,
        )

    def forward(  # type: ignore[override]  # as SelfAttention's
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: None = None,
        rotary_pos_emb: Tensor | None = None,
        *unused: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: BatchMask | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, B, H] -> ([s, B, H], bias).

        Args:
            rotary_pos_emb: Cosines and sines, [2, S, R].
        """
        assert inference_context is None
        assert key_value_states is None
        assert rotary_pos_emb is not None, "a part of each head turns with its position"
        heads = self.get_query_key_value_tensors(hidden_states, rotary_pos_emb)
        return attend_and_project(self, heads, attention_bias, packed_seq_params)

    def get_query_key_value_tensors(  # type: ignore[override]  # tables are always there
        self, hidden: Tensor, tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[s, B, H] -> q and k [S, B, N, C + R], v [S, B, N, E]."""
        config, heads = self.config, self.num_attention_heads_per_partition
        q = self.unrotated_queries(hidden)
        latent, k_pos_emb = self.compressed(hidden)
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(self._scatter_tokens(latent)))
        k_no_pe, v = up.unflatten(-1, (heads, -1)).split(
            (config.qk_head_dim, config.v_head_dim), -1
        )
        # Each rank's heads contribute a partial gradient of the shared key.
        k_pos_emb = copy_to_tensor_model_parallel_region(k_pos_emb, group=self.tp_group)
        k_pos_emb = self.rotated(k_pos_emb.unsqueeze(2), tables).expand(-1, -1, heads, -1)
        q_no_pe, q_pos_emb = q.split((config.qk_head_dim, config.qk_pos_emb_head_dim), -1)
        q = torch.cat((q_no_pe, self.rotated(q_pos_emb, tables)), -1)
        # A contiguous copy of v, so that backward does not keep the full projection alive.
        return q, torch.cat((k_no_pe, k_pos_emb), -1), v.contiguous()

    def unrotated_queries(self, hidden: Tensor) -> Tensor:
        """[s, B, H] -> [S, B, N, C + R]."""
        if self.config.q_lora_rank is None:
            mixed, _ = self.linear_q_proj(hidden)
        else:
            latent = self._scatter_tokens(self._all_gather(self.linear_q_down_proj(hidden)[0]))
            mixed, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        q: Tensor = mixed.unflatten(-1, (self.num_attention_heads_per_partition, self.key_width))
        return q

    def compressed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[s, B, H] -> the latent [S, B, L] of keys and values before its norm, and the shared key
        [S, B, R] before RoPE."""
        config = self.config
        compressed = self._all_gather(self.linear_kv_down_proj(hidden)[0])
        latent, k_pos_emb = compressed.split((config.kv_lora_rank, config.qk_pos_emb_head_dim), -1)
        return latent, k_pos_emb

    def rotated(self, x_SBNR: Tensor, tables: Tensor) -> Tensor:
        """Apply RoPE by its tables, [2, S, R]."""
        cos, sin = tables.unbind(0)
        return self.ops.rotary(x_SBNR, cos, sin, self.model.latent_rotary_interleaved)

    def _all_gather(self, part_SBL: Tensor) -> Tensor:
        """All-gather a latent of which each tensor-parallel rank has projected some entries."""
        out: Tensor = gather_from_tensor_model_parallel_region(part_SBL, group=self.tp_group)
        return out

    def _scatter_tokens(self, latent_SBL: Tensor) -> Tensor:
        """Return this rank's tokens with sequence parallelism, else the input."""
        if not self.config.sequence_parallel:
            return latent_SBL
        out: Tensor = scatter_to_sequence_parallel_region(latent_SBL, group=self.tp_group)
        return out


def latent_attention_spec(
    config: MLATransformerConfig, assembly: Assembly, norm: ModuleSpec | type
) -> ModuleSpec:
    """Build the spec with Megatron's linears; ``qk_layernorm`` normalizes the latents."""
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, "assembly": assembly},
        submodules=LatentAttentionSubmodules(
            core_attention=ModuleSpec(module=CoreAttention, params={"assembly": assembly}),
            linear_proj=RowParallelLinear,
            latent_norm=norm if config.qk_layernorm else IdentityOp,
        ),
    )
