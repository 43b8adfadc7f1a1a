"""What a plugin is that does nothing, and how it is verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ascend_run.plugin_api import Manifest, Numerics


@attrs.frozen(kw_only=True)
class Idle:
    """A plugin that does nothing, and the run in which it is verified."""

    plugin: type[Any]
    layout: Mapping[str, int] = attrs.field(factory=dict)
    """One rank if empty."""
    model: str | None = None
    """As ``--model``; None: chosen by ``verify``."""

    @property
    def name(self) -> str:
        name: str = self.plugin.manifest.name
        return name


def manifest(name: str, *, numerics: Numerics = Numerics.BITWISE, **more: Any) -> Manifest:
    """Return the manifest of a plugin that by default claims to change no number."""
    return Manifest(name=name, summary="does nothing", numerics=numerics, **more)
