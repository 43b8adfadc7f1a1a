"""Llama: a dense decoder with RMSNorm, SwiGLU, rotary positions and grouped-query attention.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Hugging Face's ``llama``.
"""

from __future__ import annotations

from ascend_run.plugin_api import (
    Claim,
    Condition,
    Manifest,
    Maturity,
    ModelFamily,
    Numerics,
    Support,
    hookimpl,
)

from .family import FAMILY


class Llama:
    """Describes a Llama as data that serves import and export alike."""

    manifest = Manifest(
        name="llama",
        summary="the Llama family: its config keys and tensors in Hugging Face's form and ours",
        claims=(Claim.MODEL_FAMILY,),
        requires=(
            Condition(
                "model.num_moe_experts",
                "==",
                0,
                why="a Llama has no experts",
                fix="leave model.num_moe_experts out, or choose model.family=mixtral",
            ),
        ),
        numerics=Numerics.MODEL,
        # Nothing here knows a device; what has run on one is said all the same.
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        maturity=Maturity.BETA,
        source="arXiv:2302.13971, arXiv:2307.09288",
    )

    @hookimpl
    def ascend_model_family(self) -> ModelFamily:
        return FAMILY
