"""The tensors of a Llama-like model of transformers under ascend-run's names, written by hand.

Nothing of the implementation is used: a wrong map of a family shows as a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

NORMS: Final = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
"""Maps our norms of a layer to theirs."""
SHARED: Final = "mlp.shared_experts"
EXPERTS: Final = {
    "router.weight": "gate.weight",
    "experts.fc1": "experts.gate_up_proj",
    "experts.fc2": "experts.down_proj",
    "shared_experts.gate_weight": "shared_expert_gate.weight",
}
"""Maps our parameters of experts to theirs; in memory transformers stacks its experts as we do."""


def decoder_layout(
    theirs: Mapping[str, Tensor], config: Any, norms: Mapping[str, str] = NORMS
) -> Tensors:
    """Rename every tensor; the result holds all that are in ``theirs``.

    Args:
        config: A transformers config.
    """
    found: Tensors = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = theirs["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        for own, name in norms.items():
            found[f"{our}.{own}.weight"] = theirs[f"{at}.{name}.weight"]
        for part in ("weight", "bias"):
            found |= {
                f"{our}.{name}.{part}": value
                for name, value in linears(theirs, config, at, part).items()
            }
        found |= {
            f"{our}.mlp.{own}": theirs[f"{at}.{block}.{name}"]
            for block in ("mlp", "block_sparse_moe")
            for own, name in EXPERTS.items()
            if f"{at}.{block}.{name}" in theirs
        }
        if (router := theirs.get(f"{at}.block_sparse_moe.router.weight")) is not None:
            found[f"{our}.mlp.router.weight"] = router
        for name in "qk":
            if (norm := theirs.get(f"{at}.self_attn.{name}_norm.weight")) is not None:
                found[f"{our}.self_attention.{name}_layernorm.weight"] = norm
    return found


def linears(theirs: Mapping[str, Tensor], config: Any, at: str, part: str) -> Tensors:
    """Return the linears of one layer; only biases that the model has."""
    found: Tensors = {}

    def rows(*names: str) -> list[Tensor]:
        held = [theirs.get(f"{at}.{name}.{part}") for name in names]
        return [value for value in held if value is not None]

    qkv = rows("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if qkv:
        found["self_attention.linear_qkv"] = by_group(qkv, config)
    elif fused := rows("self_attn.qkv_proj"):
        keys = config.num_key_value_heads * head_width(config)
        sizes = (fused[0].shape[0] - 2 * keys, keys, keys)
        found["self_attention.linear_qkv"] = by_group(list(fused[0].split(sizes)), config)
    for own, names in (
        ("self_attention.linear_proj", ("self_attn.o_proj",)),
        ("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.linear_fc1", ("mlp.gate_up_proj",)),
        ("mlp.linear_fc2", ("mlp.down_proj",)),
        (f"{SHARED}.linear_fc1", ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
        (f"{SHARED}.linear_fc2", ("mlp.shared_expert.down_proj",)),
    ):
        if held := rows(*names):
            found[own] = torch.cat(held)
    return found


def head_width(config: Any) -> int:
    """Return the size of a head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def by_group(qkv: list[Tensor], config: Any) -> Tensor:
    """Reorder rows: for each key-value head its queries, its key, its value."""
    q, k, v = (rows.split(head_width(config)) for rows in qkv)
    groups = config.num_key_value_heads
    each = config.num_attention_heads // groups
    pieces: list[Tensor] = []
    for group in range(groups):
        pieces += [*q[group * each : (group + 1) * each], k[group], v[group]]
    return torch.cat(pieces)
