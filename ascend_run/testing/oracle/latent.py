"""Multi-latent attention, with latents for queries (or not) and for keys with values.

Sources: arXiv:2405.04434, section 2.1; scale with yarn, the published code of DeepSeek-V2.
"""

# shapes: see the package

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ascend_run.types.config import RunConfig

from .attention import CoreAttention, proj_has_bias, window_of
from .batches import MicroBatch
from .layers import Linear, Norm
from .positions import rotary_of
from .scaling import yarn_magnitude


class LatentAttention(nn.Module):
    """Queries, and keys with values, go through a narrow latent, which is normalized.

    A part of each query rotates, and a key of that width that all heads share.
    """

    def __init__(self, config: RunConfig, slot: int) -> None:
        super().__init__()
        model = config.model
        hidden, heads = model.hidden_size, model.num_attention_heads
        self.config, self.has_window = config, window_of(model, slot) is not None
        width = model.qk_head_dim + model.qk_pos_emb_head_dim
        epsilon = model.latent_layernorm_epsilon
        if model.q_lora_rank is None:
            self.linear_q_proj = Linear(hidden, heads * width)
        else:
            self.linear_q_down_proj = Linear(hidden, model.q_lora_rank)
            self.q_layernorm = self._norm(model.q_lora_rank, epsilon)
            self.linear_q_up_proj = Linear(model.q_lora_rank, heads * width)
        latent = model.kv_lora_rank
        self.linear_kv_down_proj = Linear(hidden, latent + model.qk_pos_emb_head_dim)
        self.kv_layernorm = self._norm(latent, epsilon)
        self.linear_kv_up_proj = Linear(latent, heads * (model.qk_head_dim + model.v_head_dim))
        magnitude = yarn_magnitude(model.rotary_scaling_factor, model.mscale_all_dim)
        self.core_attention = CoreAttention(config, slot, magnitude**2 / math.sqrt(width))
        self.linear_proj = Linear(heads * model.v_head_dim, hidden, bias=proj_has_bias(model))

    def _norm(self, width: int, epsilon: float | None) -> nn.Module:
        model = self.config.model
        return Norm(model, width, epsilon) if model.qk_layernorm else nn.Identity()

    @property
    def bias(self) -> Tensor | None:
        """The bias of the output, which the layer adds."""
        return self.linear_proj.bias

    def forward(self, x_BSH: Tensor, batch: MicroBatch) -> Tensor:
        model, heads = self.config.model, self.config.model.num_attention_heads
        rotary = rotary_of(self.config, x_BSH.shape[1], has_window=self.has_window)
        assert rotary is not None, "a part of each head rotates"
        widths = (model.qk_head_dim, model.qk_pos_emb_head_dim)
        q_plain, q_rotated = self._queries(x_BSH).unflatten(-1, (heads, -1)).split(widths, -1)
        latent_BSL, shared_BSR = self.linear_kv_down_proj(x_BSH).split(
            (model.kv_lora_rank, model.qk_pos_emb_head_dim), -1
        )
        up = self.linear_kv_up_proj(self.kv_layernorm(latent_BSL)).unflatten(-1, (heads, -1))
        k_plain, v_BSNE = up.split((model.qk_head_dim, model.v_head_dim), -1)
        k_rotated = rotary(shared_BSR[:, :, None]).expand(-1, -1, heads, -1)
        q_BSND = torch.cat((q_plain, rotary(q_rotated)), -1)
        k_BSND = torch.cat((k_plain, k_rotated), -1)
        out: Tensor = self.linear_proj(self.core_attention(q_BSND, k_BSND, v_BSNE, batch))
        return out

    def _queries(self, x_BSH: Tensor) -> Tensor:
        if self.config.model.q_lora_rank is None:
            full: Tensor = self.linear_q_proj(x_BSH)
        else:
            full = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x_BSH)))
        return full
