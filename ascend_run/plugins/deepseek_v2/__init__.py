"""DeepSeek-V2: a decoder with multi-latent attention, dense layers first, then experts.

Source: DeepSeek-AI 2024, arXiv:2405.04434; Hugging Face's ``deepseek_v2``.
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


class DeepseekV2:
    """Describes a DeepSeek-V2 as data that serves import and export alike."""

    manifest = Manifest(
        name="deepseek_v2",
        aliases=("deepseek",),
        summary="the DeepSeek-V2 family, of latent attention, in Hugging Face's form and ours",
        claims=(Claim.MODEL_FAMILY,),
        requires=(
            Condition(
                "model.multi_latent_attention",
                "==",
                value=True,
                why="a DeepSeek-V2 makes its keys and values from a latent",
                fix="leave model.multi_latent_attention out, or choose model.family=mixtral",
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
        source="arXiv:2405.04434",
    )

    @hookimpl
    def ascend_model_family(self) -> ModelFamily:
        return FAMILY
