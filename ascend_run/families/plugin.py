"""The plugin class of a family's record."""

from __future__ import annotations

from typing import ClassVar, Final

from ascend_run.plugin_api import (
    API_VERSION,
    AttentionFeatures,
    Condition,
    Manifest,
    Maturity,
    ModelFamily,
    Numerics,
    Support,
    hookimpl,
)

_NO_NEEDS: Final = AttentionFeatures()
DENSE: Condition = Condition(
    "model.num_moe_experts",
    "==",
    0,
    why="this family has no experts",
    fix="leave model.num_moe_experts out, or choose a family with experts",
)
"""What a family without experts requires."""


class FamilyPlugin:
    """Base class of a model family's plugin; a family sets ``family`` and ``manifest``."""

    family: ClassVar[ModelFamily]  #: The record of the family.
    manifest: ClassVar[Manifest]  #: Made by ``family_manifest``.

    @hookimpl
    def ascend_model_family(self) -> ModelFamily:
        return self.family


def family_manifest(
    family: ModelFamily,
    title: str,
    *,
    source: str,
    name: str = "",
    aliases: tuple[str, ...] = (),
    requires: tuple[str | Condition, ...] = (DENSE,),
    attention_needs: AttentionFeatures = _NO_NEEDS,
    requires_api: str = f"=={API_VERSION}",
) -> Manifest:
    """Return the manifest of a family.

    The plugin has no device code; the levels state what has run on each platform.

    Args:
        title: The family's name in prose.
        name: Name of the plugin; default: the family's ``model_type``.
        requires: Default: the model has no experts.
        attention_needs: What the family's own hooks need of the attention kernel.
        requires_api: The API versions that a family outside of this project was written for.
    """
    return Manifest(
        name=name or family.model_type,
        aliases=aliases,
        summary=f"the {title} family: conversion of config and weights from and to Hugging Face",
        requires=requires,
        attention_needs=attention_needs,
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        maturity=Maturity.BETA,
        source=source,
        requires_api=requires_api,
    )
