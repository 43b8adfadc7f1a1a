"""Check Megatron's fields of multi-latent attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ascend_run.core.config.megatron_fields import megatron_fields
from ascend_run.plugin_api.error_text import show
from ascend_run.prepare.config.unsupported import OWN_DEFAULTS
from ascend_run.prepare.hugging_face.neutral_fields import neutral_fields
from ascend_run.types.config import FieldSection, RunConfig

_STRETCHING: Final = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
"""Options used by yarn only."""
_WITHOUT: Final = {
    "add_linear_proj_bias": "its projections have no biases",
    "add_qkv_bias": "its projections have no biases",
    "kv_channels": "set model.qk_head_dim, model.qk_pos_emb_head_dim and model.v_head_dim",
    "qk_l2_norm": "Megatron's latent attention has no such norm",
    "rope_scaling_type": "set model.rope_type='yarn' and Megatron's fields of it",
    "rotary_interleaved": "its rotated pairs always lie side by side",
    "softmax_scale": "the scale follows from the widths of a head and from model.mscale_all_dim",
}
"""Options that multi-latent attention does not read (of RoPE scalings only yarn): what to do."""


def latent_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message for each option that does not apply to the kind of attention."""
    model = config.model
    if not model.multi_latent_attention:
        for name in _changed(model, [n for n, field in megatron_fields().items() if field.latent]):
            yield f"model.{name}={show(model[name])} needs model.multi_latent_attention=true"
        for name, default in neutral_fields().items():
            if name.startswith("latent_") and model[name] != default:
                yield f"model.{name}={show(model[name])} needs model.multi_latent_attention=true"
        return
    is_yarn = "yarn" in (model.rope_type, model.rope_scaling_type)
    for name, instead in _WITHOUT.items():
        if model[name] and (is_yarn or name != "rope_scaling_type"):
            yield (
                f"model.{name}={show(model[name])} does not go with "
                f"model.multi_latent_attention=true; leave it out: {instead}"
            )
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups not in (None, heads):
        yield (
            f"model.num_query_groups={groups} does not go with model.multi_latent_attention=true, "
            f"whose latent gives each of model.num_attention_heads={heads} heads its own key; "
            "leave it out"
        )
    if model.position_embedding_type != "rope":
        yield (
            f"model.position_embedding_type={show(model.position_embedding_type)} does not go with "
            "model.multi_latent_attention=true, which rotates a part of each head; use 'rope'"
        )
    if model.rotary_percent != 1.0:
        yield (
            f"model.rotary_percent={model.rotary_percent} does not go with "
            "model.multi_latent_attention=true; set model.qk_pos_emb_head_dim, which RoPE "
            "rotates in full"
        )
    if model.qk_pos_emb_head_dim % 2:
        yield (
            "RoPE rotates pairs of entries, but "
            f"model.qk_pos_emb_head_dim={model.qk_pos_emb_head_dim} is odd"
        )
    if model.rope_type != "yarn":
        for name in _changed(model, _STRETCHING):
            yield f"model.{name}={show(model[name])} needs model.rope_type='yarn'"


def _changed(model: FieldSection, names: Iterable[str]) -> Iterator[str]:
    """Yield the names of Megatron's fields that differ from their defaults."""
    for name in names:
        default = OWN_DEFAULTS.get(name, megatron_fields()[name].default)
        if name in model and model[name] != default:
            yield name
