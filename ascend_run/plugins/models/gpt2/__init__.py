"""GPT-2: a dense decoder with LayerNorm, biases, GELU, learned positions and a tied output layer.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Hugging Face's
``gpt2``.
"""

from __future__ import annotations

from ascend_run.plugin_api import (
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
    """Describe GPT-2 as data for both import and export."""

    manifest = Manifest(
        name="gpt2",
        aliases=("gpt",),
        summary="the GPT-2 family: conversion of config and weights from and to Hugging Face",
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
        # The plugin is device-independent; each level states what has run on that platform.
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
