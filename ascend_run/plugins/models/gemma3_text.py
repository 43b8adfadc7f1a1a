"""Gemma 3, text: five layers with a window and a rotary base of their own, then one without."""

from __future__ import annotations

from ascend_run.families import WINDOWED_GEMMA, FamilyPlugin, derived, family_manifest
from ascend_run.plugin_api import ConfigKey


class Gemma3(FamilyPlugin):
    """Hugging Face's ``gemma3_text``: Gemma 2 with norms of queries and keys, without softcaps."""

    family = derived(
        WINDOWED_GEMMA,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        defaults={
            "model.qk_layernorm": True,
            "model.rotary_base": 1e6,
            "model.rotary_local_base": 1e4,
            "model.window_attn_skip_freq": 6,
        },
        keys=(ConfigKey(hf="rope_local_base_freq", field="model.rotary_local_base", default=1e4),),
        key_defaults={"max_position_embeddings": 131072, "rope_theta": 1e6},
        fixed={
            "use_bidirectional_attention": (False, None),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        # The pattern that layer_types was written from.
        ignored=("_sliding_window_pattern",),
    )
    manifest = family_manifest(family, "Gemma 3 (text)", source="arXiv:2503.19786")
