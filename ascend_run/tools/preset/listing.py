"""Presets as a table. Imports little, to be quick."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ascend_run.tools.terminal.tables import table

from .presets import presets

HEADER = ("name", "family", "parameters", "published", "context", "template")


def rows() -> list[dict[str, Any]]:
    """Return each preset's name, family, parameters, context and template."""
    return [
        {
            "name": preset.name,
            "family": preset.family,
            "parameters": preset.parameters,
            "published": preset.published,
            "context": preset.context,
            "template": preset.template,
        }
        for preset in presets().values()
    ]


def table_lines() -> Iterator[str]:
    """Yield the table of all presets."""
    cells = [
        (
            preset.name,
            preset.family,
            f"{preset.parameters:,}",
            preset.published,
            f"{preset.context:,}",
            preset.template or "-",
        )
        for preset in presets().values()
    ]
    yield from table(HEADER, cells)
    yield ""
    yield "context: tokens; template: - is the tokenizer's own"
