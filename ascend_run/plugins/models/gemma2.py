"""Gemma 2: norms on both sides, softcaps, a window in every other layer."""

from __future__ import annotations

from ascend_run.families import WINDOWED_GEMMA, FamilyPlugin, derived, family_manifest
from ascend_run.plugin_api import ConfigKey


class Gemma2(FamilyPlugin):
    """Hugging Face's ``gemma2``."""

    family = derived(
        WINDOWED_GEMMA,
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults={
            "model.attn_logit_softcapping": 50.0,
            "model.final_logit_softcapping": 30.0,
            "model.window_attn_skip_freq": 2,
        },
        keys=(
            ConfigKey(hf=name, field=f"model.{name}", default=cap, nullable=True)
            for name, cap in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
        ),
    )
    manifest = family_manifest(family, "Gemma 2", source="arXiv:2408.00118")
