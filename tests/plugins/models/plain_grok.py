"""Grok-1 as its authors publish it (github.com/xai-org/grok-1), as plain formulas.

Parameters have the names of the folders in which its weights are published for PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

# B batch, S sequence, H hidden, N heads, D head size, X experts


class Scale(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.scale, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        length = (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return self.scale * x / length


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.width = hidden // config.num_attention_heads
        keys = config.num_key_value_heads * self.width
        for name, rows in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
            setattr(self, name, nn.Linear(hidden, rows, bias=False))
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def rotated(self, x_BNSD: Tensor) -> Tensor:
        """Rotate pairs of entries that are half a head apart."""
        half = self.width // 2
        steps = torch.arange(half, dtype=x_BNSD.dtype) / half
        places = torch.arange(x_BNSD.shape[2], dtype=x_BNSD.dtype)
        angle_SP = torch.outer(places, self.config.rope_theta**-steps)
        cos, sin = angle_SP.cos(), angle_SP.sin()
        first, second = x_BNSD[..., :half], x_BNSD[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def forward(self, x_BSH: Tensor) -> Tensor:
        def heads(linear: Any) -> Tensor:
            split: Tensor = linear(x_BSH).unflatten(-1, (-1, self.width)).transpose(1, 2)
            return split

        shares = self.config.num_attention_heads // self.config.num_key_value_heads
        q = self.rotated(heads(self.q_proj))
        k = self.rotated(heads(self.k_proj)).repeat_interleave(shares, 1)
        v = heads(self.v_proj).repeat_interleave(shares, 1)
        cap = self.config.max_attn_value
        scores = cap * torch.tanh(self.config.attn_output_multiplier * (q @ k.mT) / cap)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out: Tensor = self.o_proj((weights @ v).transpose(1, 2).flatten(2))
        return out


class Expert(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.linear, self.linear_v = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.linear_1 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_1(F.gelu(self.linear(x), approximate="tanh") * self.linear_v(x))
        return out


class Experts(nn.Module):
    """Every expert computes every token; the weights of those not selected are 0."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.selected = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            Expert(config.hidden_size, config.intermediate_size) for _ in range(config.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        share_BSX = self.gate(x).softmax(-1)
        least = share_BSX.sort(-1, descending=True).values[..., self.selected - 1 : self.selected]
        share_BSX = share_BSX * (share_BSX >= least)
        parts = zip(self.experts, share_BSX.unbind(-1), strict=True)
        return torch.stack([expert(x) * share[..., None] for expert, share in parts]).sum(0)


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        for name in ("pre_attn", "post_attn", "pre_moe", "post_moe"):
            setattr(self, f"{name}_norm", Scale(config.hidden_size, config.rms_norm_eps))
        self.attn, self.moe_block = Attention(config), Experts(config)

    def forward(self, x: Any) -> Any:
        x = x + self.post_attn_norm(self.attn(self.pre_attn_norm(x)))
        return x + self.post_moe_norm(self.moe_block(self.pre_moe_norm(x)))


class Grok(nn.Module):
    """Random weights."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.config = config = SimpleNamespace(**given)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.model.norm = Scale(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=config.initializer_range)

    def forward(self, input_ids: Tensor) -> Any:
        config, model = self.config, self.model
        x = model.embed_tokens(input_ids) * config.embedding_multiplier_scale
        for layer in model.layers:
            x = layer(x)
        head = model.embed_tokens if config.tie_word_embeddings else self.lm_head
        return SimpleNamespace(
            logits=model.norm(x) @ head.weight.t() * config.output_multiplier_scale
        )

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(vars(self.config)))
