"""Aquila and Aquila2 up to 34B: Llama under another name."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest


class Aquila(FamilyPlugin):
    """The authors' ``aquila``."""

    family = derived(
        DECODER,
        model_type="aquila",
        architecture="AquilaForCausalLM",
        without=("head_dim",),
        ignored=("pretraining_tp",),
    )
    manifest = family_manifest(family, "Aquila", source="arXiv:2408.07410")
