"""Common fields of the rows of the facade."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import Patch
from ascend_run.plugins.platforms import CHECKED_VERSIONS

from .sources import SOURCES

GROUP: Final = "torch.cuda facade"
_TORCH_VERSIONS: Final = ">=2.10,<2.16"
"""Versions whose sources were checked; the same as in the package metadata."""


def row(
    target: str, replacement: object, why: str, *, wraps: bool = False, same: str = ""
) -> Patch:
    """Return one row.

    Args:
        target: ``module:attribute`` or ``module:Class.attribute``.
        replacement: The new value or, with ``wraps``, a function from the original to it.
        why: The code that needs it.
        same: Another name of the same function, under which its source hashes are recorded.
    """
    return Patch(
        target=target,
        replacement=replacement,
        why=why,
        versions=_TORCH_VERSIONS if target.startswith("torch") else CHECKED_VERSIONS,
        source_hash=SOURCES.get(same or target, {}).values(),
        until="Megatron takes its device as an argument instead of naming torch.cuda",
        group=GROUP,
        wraps=wraps,
    )
