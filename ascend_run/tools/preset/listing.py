"""Presets as a table. Imports little, to be quick."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ascend_run.tools.terminal.tables import table

from .presets import Preset, presets

HEADER = ("name", "family", "parameters", "published", "context", "template")


def rows() -> list[dict[str, Any]]:
    """Return each preset's name, family, parameters, context and template."""
    return [
        {
            "name": preset.name,
            "family": preset.family,
            "parameters": preset.parameters,
            "published": preset.published,
            "context": record_context(preset),
            "template": preset.template,
        }
        for preset in presets().values()
    ]


def record_context(preset: Preset) -> int:
    """Return the maximum sequence length by the record's own key. Unit: tokens."""
    names = ("max_position_embeddings", "n_positions", "seq_length")
    return int(next(preset.config[name] for name in names if name in preset.config))


def table_lines() -> Iterator[str]:
    """Yield the table of all presets."""
    cells = [
        (
            row["name"],
            row["family"],
            f"{row['parameters']:,}",
            row["published"],
            f"{row['context']:,}",
            row["template"] or "-",
        )
        for row in rows()
    ]
    yield from table(HEADER, cells)
    yield ""
    yield "context: tokens; template: - is the tokenizer's own"
