"""What families compute that transformers' models do not, put into these by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def with_exact_gelu(model: Any) -> None:
    """Replace a tanh GELU with a rounded constant."""
    for layer in model.transformer.h:
        layer.mlp.gelu_impl.forward = lambda x: F.gelu(x, approximate="tanh")


def with_alibi(model: Any) -> None:
    """Replace RoPE by ALiBi: a score falls with distance, by 1/4, 1/16, 1/64, 1/256.

    Source: arXiv:2108.12409, section 3: a geometric series from 2 ** (-8 / n), for n = 4 heads.
    """
    inner = model.model.forward

    def unturned(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones(1, x.shape[1], model.config.head_dim, dtype=x.dtype)
        return ones, torch.zeros_like(ones)

    def forward(input_ids: Tensor, **given: Any) -> Any:
        place = torch.arange(input_ids.shape[1])
        distance = place[:, None] - place[None, :]
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256], dtype=model.dtype)
        bias = -slopes[:, None, None] * distance
        given["attention_mask"] = bias.masked_fill(distance < 0, -torch.inf)[None]
        return inner(input_ids=input_ids, **given)

    assert model.config.num_attention_heads == 4
    model.model.rotary_emb.forward = unturned
    model.model.forward = forward


def with_unit_rows(model: Any) -> None:
    """Divide each row of the output layer by its length."""
    head = model.lm_head

    def forward(hidden: Tensor) -> Tensor:
        weight: Tensor = head.weight
        return hidden @ (weight / weight.square().sum(-1, keepdim=True).sqrt()).t()

    head.forward = forward


def evaluated(model: Any) -> None:
    """Select experts as in evaluation, and rotate by the long factors where sequences are longer.

    transformers' own code rotates by the short ones whatever the length; modeling_phimoe.py of
    Phi-3.5-MoE does not.
    """
    model.eval()
    positions = model.model.rotary_emb
    inner = positions.rope_init_fn
    positions.rope_init_fn = lambda config: inner(config, seq_len=16)


def with_both(model: Any) -> None:
    with_alibi(model)
    with_unit_rows(model)
