"""GPT-2: a dense decoder with LayerNorm, biases, GELU, learned positions and a tied output layer.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Hugging Face's
``gpt2``.
"""

from __future__ import annotations

import attrs

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


@attrs.frozen(kw_only=True)
class Gpt2Options:
    """No options of its own: the model is described by ``[model]``."""


class Gpt2:
    """Answers what a GPT-2 is, as data that serves import and export alike."""

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
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.REAL},
        maturity=Maturity.BETA,
        source="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    )
    config_class = Gpt2Options

    def __init__(self, config: Gpt2Options) -> None:
        self.config = config

    @hookimpl
    def ascend_model_family(self) -> ModelFamily:
        return FAMILY
