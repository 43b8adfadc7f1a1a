"""Mixtral: a Llama-like decoder whose MLPs are a sparse mixture of SwiGLU experts.

Source: Jiang et al. 2024, arXiv:2401.04088; Hugging Face's ``mixtral``.
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


class Mixtral:
    """Describe Mixtral as data for both import and export."""

    manifest = Manifest(
        name="mixtral",
        summary="the Mixtral family: conversion of config and weights from and to Hugging Face",
        requires=(
            Condition(
                "model.num_moe_experts",
                ">",
                1,
                why="a Mixtral is a mixture of experts",
                fix="set model.num_moe_experts, or choose model.family=llama",
            ),
            Condition(
                "model.moe_router_topk",
                ">",
                1,
                why="the weight of a single chosen expert is always 1, so its router never learns",
                fix="set model.moe_router_topk to 2 or more",
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
        source="arXiv:2401.04088",
    )

    @hookimpl
    def ascend_model_family(self) -> ModelFamily:
        return FAMILY
