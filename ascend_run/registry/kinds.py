"""The four kinds of plugin: how each is chosen, and where it stands in the order."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from ascend_run.plugin_api import Claim, Manifest

Plugin: TypeAlias = type[Any]
"""A plugin class: it has a ``manifest``, and a ``config_class`` where it has options."""


class Kind(enum.StrEnum):
    """What a plugin is to a run; in the order in which plugins that declare none are applied."""

    MODEL = "model family"
    TASK = "task"
    FEATURE = "feature"
    PLATFORM = "platform"


GROUPS: Final[Mapping[str, Kind]] = {
    "ascend_run.plugins": Kind.FEATURE,
    "ascend_run.platforms": Kind.PLATFORM,
    "ascend_run.tasks": Kind.TASK,
    "ascend_run.models": Kind.MODEL,
}
"""Entry-point group -> what it lists."""

CLAIMS: Final[Mapping[Kind, Claim]] = {
    Kind.MODEL: Claim.MODEL_FAMILY,
    Kind.TASK: Claim.TASK,
    Kind.PLATFORM: Claim.PLATFORM,
}
"""The claim by which a manifest says its kind; a feature makes none of these."""

CHOSEN_WITH: Final[Mapping[Kind, str]] = {
    Kind.FEATURE: "--enable",
    Kind.PLATFORM: "--platform",
    Kind.TASK: "--task",
    Kind.MODEL: "model.family=",
}
"""How a user names one."""


def kind_of(manifest: Manifest) -> Kind:
    """The kind that a manifest's claims say."""
    for kind, claim in CLAIMS.items():
        if claim in manifest.claims:
            return kind
    return Kind.FEATURE
