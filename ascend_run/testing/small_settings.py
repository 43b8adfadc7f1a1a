"""Settings under which small models exercise a plugin, as its manifest declares. Without torch."""

from __future__ import annotations

from ascend_run.plugin_api.manifest import Manifest


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
