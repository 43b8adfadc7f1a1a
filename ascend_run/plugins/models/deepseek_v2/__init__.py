"""DeepSeek-V2: a decoder with multi-latent attention and, after dense layers, experts.

Source: DeepSeek-AI 2024, arXiv:2405.04434; Hugging Face's ``deepseek_v2``.
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


class DeepseekV2:
    """Describe DeepSeek-V2 as data for both import and export."""

    manifest = Manifest(
        name="deepseek_v2",
        aliases=("deepseek",),
        summary="the DeepSeek-V2 family, with MLA: conversion from and to Hugging Face",
        requires=(
            Condition(
                "model.multi_latent_attention",
                "==",
                value=True,
                why="DeepSeek-V2 computes keys and values from a latent",
                fix="leave model.multi_latent_attention out, or choose model.family=mixtral",
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
        source="arXiv:2405.04434",
    )

    @hookimpl
    def ascend_model_family(self) -> ModelFamily:
        return FAMILY
