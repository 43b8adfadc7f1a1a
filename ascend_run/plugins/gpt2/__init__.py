"""GPT-2: a dense decoder with LayerNorm, biases, GELU, learned positions and a tied output layer.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Hugging Face's
``gpt2``.
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


class Gpt2:
    """Describes a GPT-2 as data that serves import and export alike."""

    manifest = Manifest(
        name="gpt2",
        aliases=("gpt",),
        summary="the GPT-2 family: its config keys and tensors in Hugging Face's form and ours",
        claims=(Claim.MODEL_FAMILY,),
        requires=(
            Condition(
                "model.num_moe_experts",
                "==",
                0,
                why="a GPT-2 has no experts",
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
        source="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    )

    @hookimpl
    def ascend_model_family(self) -> ModelFamily:
        return FAMILY
