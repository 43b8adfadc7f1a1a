"""Families with multi-latent attention: its config keys and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.plugin_api import Condition, ConfigKey, TensorMap

from .decoder import HF_LAYER, LAYER

_LATENT_QUERY: Final = Condition("model.q_lora_rank", ">", 0)
_PLAIN_QUERY: Final = Condition("model.q_lora_rank", "==", 0)


def latent_keys(q_rank: int, kv_rank: int, plain: int, rotated: int) -> tuple[ConfigKey, ...]:
    """Return the keys of the latents' widths and of a query's two parts, with their defaults."""
    return (
        ConfigKey(hf="q_lora_rank", field="model.q_lora_rank", default=q_rank, nullable=True),
        ConfigKey(hf="kv_lora_rank", field="model.kv_lora_rank", default=kv_rank),
        ConfigKey(hf="qk_nope_head_dim", field="model.qk_head_dim", default=plain),
        ConfigKey(hf="qk_rope_head_dim", field="model.qk_pos_emb_head_dim", default=rotated),
    )


def latent_tensors() -> Iterator[TensorMap]:
    """Yield the weights of the projections and of the norms of the latents."""
    for ours, theirs, condition in (
        ("linear_q_proj", "q_proj", _PLAIN_QUERY),
        ("linear_q_down_proj", "q_a_proj", _LATENT_QUERY),
        ("q_layernorm", "q_a_layernorm", _LATENT_QUERY),
        ("linear_q_up_proj", "q_b_proj", _LATENT_QUERY),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", None),
        ("kv_layernorm", "kv_a_layernorm", None),
        ("linear_kv_up_proj", "kv_b_proj", None),
        ("linear_proj", "o_proj", None),
    ):
        yield TensorMap(
            megatron=f"{LAYER}.self_attention.{ours}.weight",
            hf=(f"{HF_LAYER}.self_attn.{theirs}.weight",),
            condition=condition,
        )


def needs_latent_attention(title: str, instead: str) -> Condition:
    """Return what a family with multi-latent attention requires.

    Args:
        title: The family's name in prose.
        instead: A family without it.
    """
    return Condition(
        "model.multi_latent_attention",
        "==",
        value=True,
        why=f"{title} computes keys and values from a latent",
        fix=f"leave model.multi_latent_attention out, or choose model.family={instead}",
    )
