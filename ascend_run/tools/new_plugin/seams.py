"""What a new plugin can be written from. Imports nothing, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KINDS: Final = ("feature", "platform", "task", "family")
SEAMS: Final[Mapping[str, str]] = {
    "layer": "feature",
    "attention": "feature",
    "optimizer": "feature",
    "listener": "feature",
    "family": "family",
}
"""Part of a run that the plugin meets -> its kind. The default of a feature is ``layer``."""


def template_of(kind: str, seam: str | None) -> str:
    """Return the folder of the templates for a kind and, if one is chosen, a seam of it."""
    return seam or ("layer" if kind == "feature" else kind)
