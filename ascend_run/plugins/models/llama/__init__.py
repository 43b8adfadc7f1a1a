"""Llama: a dense decoder with RMSNorm, SwiGLU, rotary positions and grouped-query attention.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Hugging Face's ``llama``.
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


class Llama:
    """Describe Llama as data for both import and export."""

    manifest = Manifest(
        name="llama",
        summary="the Llama family: conversion of config and weights from and to Hugging Face",
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
        # The plugin is device-independent; each level states what has run on that platform.
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
