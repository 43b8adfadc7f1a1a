"""The four kinds of plugins: how each is selected, and its position in the order. No attrs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ascend_run.types.declarations import Claim

if TYPE_CHECKING:
    from ascend_run.plugin_api.manifest import EnabledPlugin

Plugin: TypeAlias = type[Any]
"""A plugin class: it has a ``manifest``, and a ``config_class`` if it has options."""


class Kind(enum.StrEnum):
    """The role of a plugin in a run; in this order plugins without a declared order are applied."""

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
"""Entry-point group -> the kind of its plugins."""

MANIFESTS: Final = "ascend_run.manifests"
"""Entry-point group of static manifests: plugin -> ``package:file``."""

CLAIMS: Final[Mapping[Kind, Claim]] = {
    Kind.MODEL: Claim.MODEL_FAMILY,
    Kind.TASK: Claim.TASK,
    Kind.PLATFORM: Claim.PLATFORM,
}
"""Kind -> the claim that its plugins make; features make none of these."""

CHOSEN_WITH: Final[Mapping[Kind, str]] = {
    Kind.FEATURE: "--enable",
    Kind.PLATFORM: "--platform",
    Kind.TASK: "--task",
    Kind.MODEL: "model.family=",
}
"""Kind -> how the user selects a plugin of it."""


def kind_of(plugin: Plugin | EnabledPlugin) -> Kind:
    """Return the kind of a plugin, from its claims."""
    from ascend_run.plugin_api.implementations import claims_of  # late: a listing needs no plugin

    claims = claims_of(plugin)
    for kind, claim in CLAIMS.items():
        if claim in claims:
            return kind
    return Kind.FEATURE
