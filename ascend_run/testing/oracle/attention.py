"""Softmax attention with every score in memory, and self-attention with grouped queries.

Sources: arXiv:1706.03762; grouped queries, arXiv:2305.13245; windows, arXiv:2004.05150; ALiBi,
arXiv:2108.12409; soft cap, arXiv:2408.00118; sinks, arXiv:2309.17453; norms of queries and keys,
arXiv:2302.05442; log-n scaling, arXiv:2202.12172.
"""

# shapes: see the package

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ascend_run.types.config import FieldSection, RunConfig

from .batches import MicroBatch
from .known import ALIBI_FAMILIES
from .layers import Linear, Norm, unit_rms
from .positions import alibi_slopes, head_width, rotary_of


class CoreAttention(nn.Module):
    """``softmax(scale q k + bias) v`` over the keys that a query sees.

    Args:
        slot: Layer slot in the whole model, from 0; those of multi-token prediction come last.
        scale: Factor on the scores.
    """

    def __init__(self, config: RunConfig, slot: int, scale: float) -> None:
        super().__init__()
        model = config.model
        self.model, self.scale, self.cap = model, scale, model.attn_logit_softcapping
        self.window = window_of(model, slot)
        self.slopes_N, self.takes_root = _position_bias(config)
        self.sink = model.softmax_type
        learns_sinks = self.sink == "learnable"
        heads = model.num_attention_heads
        self.softmax_offset = nn.Parameter(torch.empty(heads)) if learns_sinks else None

    def forward(self, q_BSND: Tensor, k_BSGD: Tensor, v_BSGE: Tensor, batch: MicroBatch) -> Tensor:
        """Return [B, S, N * E]."""
        shared = q_BSND.shape[2] // k_BSGD.shape[2]
        q_BNSD = log_n_scaled(q_BSND, batch, self.model).transpose(1, 2)
        k_BNSD, v_BNSE = (
            x.repeat_interleave(shared, dim=2).transpose(1, 2) for x in (k_BSGD, v_BSGE)
        )
        score_BNSS = self.scale * q_BNSD @ k_BNSD.mT
        if self.cap is not None:
            score_BNSS = self.cap * torch.tanh(score_BNSS / self.cap)
        if self.slopes_N is not None:
            score_BNSS = score_BNSS + self._bias(score_BNSS)
        hidden_BSS = visible(batch, self.window).logical_not()
        score_BNSS = score_BNSS.masked_fill(hidden_BSS[:, None], -torch.inf)
        out_BNSE = self._probabilities(score_BNSS) @ v_BNSE
        return out_BNSE.transpose(1, 2).flatten(2)

    def _bias(self, score_BNSS: Tensor) -> Tensor:
        """Return ``-slope * distance`` of each head, [N, S, S]."""
        place_S = torch.arange(score_BNSS.shape[-1])
        distance_SS = (place_S[:, None] - place_S).abs().to(score_BNSS)
        assert self.slopes_N is not None
        slope_N = self.slopes_N.to(score_BNSS)
        return -slope_N[:, None, None] * (distance_SS.sqrt() if self.takes_root else distance_SS)

    def _probabilities(self, score_BNSS: Tensor) -> Tensor:
        """Return the softmax; a sink is one more logit, which has no value."""
        if self.sink == "vanilla":
            return score_BNSS.softmax(dim=-1)
        sink_N = score_BNSS.new_zeros(score_BNSS.shape[1])
        sink_N = sink_N if self.softmax_offset is None else self.softmax_offset
        sink_BNS1 = sink_N[:, None, None].expand(*score_BNSS.shape[:3], 1)
        return torch.cat((score_BNSS, sink_BNS1), dim=-1).softmax(dim=-1)[..., :-1]


def window_of(model: FieldSection, slot: int) -> tuple[int, int] | None:
    """Return how many keys on the left and on the right a layer sees; None for all.

    Of every ``window_attn_skip_freq`` layers the last has no window; or a flag for each layer.
    """
    if not model.window_size:
        return None
    slot = min(slot, model.num_layers - 1)
    every = model.window_attn_skip_freq
    if isinstance(every, int) and (slot + 1) % every == 0:
        return None
    if isinstance(every, tuple) and not every[slot]:
        return None
    left, right = model.window_size
    return left, right


def visible(batch: MicroBatch, window: tuple[int, int] | None) -> Tensor:
    """Return whether a query (second axis) sees a key (third axis), [B, S, S]."""
    place_S = torch.arange(batch.tokens_BS.shape[1])
    behind_SS = place_S[:, None] - place_S
    seen_BSS = (behind_SS >= 0).expand(len(batch.tokens_BS), -1, -1)
    if batch.prompt_BS is not None:
        query, key = batch.prompt_BS[:, :, None], batch.prompt_BS[:, None]
        seen_BSS = seen_BSS | ((query == key) & (query >= 0))
    if window is not None:
        left, right = window
        seen_BSS = seen_BSS & (behind_SS <= left) if left >= 0 else seen_BSS
        seen_BSS = seen_BSS & (-behind_SS <= right) if right >= 0 else seen_BSS
    return seen_BSS & (batch.document_BS[:, :, None] == batch.document_BS[:, None])


def _position_bias(config: RunConfig) -> tuple[Tensor | None, bool]:
    """Return ALiBi's slope of each head, and whether it multiplies the root of the distance."""
    heads = config.model.num_attention_heads
    if "alibi" in config.enable:
        options = config.plugins["alibi"]
        slopes = alibi_slopes(heads, options.max_bias)
        return torch.tensor(slopes).double(), options.distance == "root"
    if config.model.family in ALIBI_FAMILIES:
        return torch.tensor(alibi_slopes(heads)).double(), False
    return None, False


class SelfAttention(nn.Module):
    """Self-attention with grouped queries.

    ``linear_qkv`` holds, for each key-value group: the rows of its queries, its key, its value.
    """

    def __init__(self, config: RunConfig, slot: int) -> None:
        super().__init__()
        model = config.model
        self.config, self.has_window = config, window_of(model, slot) is not None
        self.width = head_width(model)
        self.groups = model.num_query_groups or model.num_attention_heads
        self.shared = model.num_attention_heads // self.groups
        rows = self.groups * (self.shared + 2) * self.width
        has_bias = model.add_bias_linear or model.add_qkv_bias
        self.linear_qkv = Linear(model.hidden_size, rows, bias=has_bias, adds_bias=True)
        if model.qk_layernorm:
            self.q_layernorm, self.k_layernorm = (Norm(model, self.width) for _ in range(2))
        self.core_attention = CoreAttention(
            config, slot, model.softmax_scale or 1 / math.sqrt(self.width)
        )
        self.linear_proj = Linear(
            model.num_attention_heads * self.width, model.hidden_size, bias=proj_has_bias(model)
        )

    @property
    def bias(self) -> Tensor | None:
        """The bias of the output, which the layer adds."""
        return self.linear_proj.bias

    def forward(self, x_BSH: Tensor, batch: MicroBatch) -> Tensor:
        model = self.config.model
        mixed = self.linear_qkv(x_BSH).unflatten(-1, (self.groups, self.shared + 2, self.width))
        q, k_BSGD, v_BSGD = mixed[..., :-2, :], mixed[..., -2, :], mixed[..., -1, :]
        q_BSND = q.flatten(2, 3)
        if model.qk_layernorm:
            q_BSND, k_BSGD = self.q_layernorm(q_BSND), self.k_layernorm(k_BSGD)
        if model.qk_l2_norm:
            q_BSND, k_BSGD = (unit_rms(x, model.layernorm_epsilon) for x in (q_BSND, k_BSGD))
        rotary = rotary_of(self.config, x_BSH.shape[1], has_window=self.has_window)
        if rotary is not None:
            q_BSND, k_BSGD = rotary(q_BSND), rotary(k_BSGD)
        out: Tensor = self.linear_proj(self.core_attention(q_BSND, k_BSGD, v_BSGD, batch))
        return out


def log_n_scaled(q_BSND: Tensor, batch: MicroBatch, model: FieldSection) -> Tensor:
    """Multiply the query at position n by ``log(n) / log(length)`` where that is above 1."""
    if model.log_n_scaling_length is None or not model.log_n_scaling_in_training:
        return q_BSND
    count_BS = (batch.positions_BS + 1).to(q_BSND)
    factor_BS = (count_BS.log() / math.log(model.log_n_scaling_length)).clamp(min=1)
    return q_BSND * factor_BS[:, :, None, None]


def proj_has_bias(model: FieldSection) -> bool:
    """Return whether the output projection has a bias."""
    own = model.add_linear_proj_bias
    return bool(model.add_bias_linear if own is None else own)
