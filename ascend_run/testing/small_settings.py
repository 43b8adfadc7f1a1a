"""Settings under which small models exercise a plugin: what its manifest declares, and what selects
it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ascend_run.plugin_api.manifest import Manifest

CHOSEN_BY: Final[Mapping[str, str]] = {
    "platform": "platform",
    "task": "task",
    "model family": "model.family",
}
"""Kind -> config key that selects a plugin of that kind; features are enabled instead."""


def settings_of(manifest: Manifest, *, of_model: bool) -> dict[str, object]:
    """Return config key -> value.

    Args:
        of_model: Also those that are no options of the plugin, but belong to the model or the data.
    """
    found = {}
    for name, value in manifest.small_model_settings.items():
        if "." not in name:
            found[f"plugins.{manifest.name}.{name}"] = value
        elif of_model:
            found[name] = value
    return found
