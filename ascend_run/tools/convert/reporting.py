"""What a conversion prints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ascend_run.tools.terminal.tables import table

from .conversion import Converted

_SHOWN: Final = 20
"""Differences that are listed."""


def as_record(target: Path, done: Converted) -> str:
    """Return what was written and compared as JSON."""
    model, comparison, settings = done.model, done.comparison, done.settings
    record: dict[str, object] = {
        "family": model.family_name,
        "folder": str(target),
        "step": model.step,
        "tensors": len(model.headers),
        "bytes": model.nbytes,
    }
    if model.num_merged:
        record["merged"] = model.num_merged
    if comparison is not None:
        largest = comparison.max_difference
        record["verify"] = {
            "kind": comparison.kind,
            "equal": done.is_equal,
            "compared": comparison.compared,
            "max_difference": largest if math.isfinite(largest) else None,
            "different": dict(comparison.different),
        }
    if settings is not None:
        record["settings"] = {
            "compared": settings.compared,
            "different": dict(settings.different),
            "not_stated": dict(settings.not_stated),
        }
    return json.dumps(record, indent=2)


def as_text(target: Path, done: Converted) -> str:
    """Return the same for a reader: a summary, or tables of differences."""
    model, comparison, settings = done.model, done.comparison, done.settings
    lines: list[str] = []
    if not done.is_equal:
        if settings is not None:
            lines += _differences("settings", settings.different)
        if comparison is not None:
            lines += _differences(comparison.kind, comparison.different)
        return "\n".join(lines)
    size = f"{len(model.headers):,} tensors, {model.nbytes / 1e6:,.1f} MB"
    lines.append(f"{target}: {model.family_name}, step {model.step}, {size}")
    if model.num_merged:
        lines.append(f"adapters merged into {model.num_merged:,} tensors")
    if comparison is not None:
        lines.append(
            f"verified: {comparison.compared:,} {comparison.kind} equal, max difference "
            f"{comparison.max_difference:g}"
        )
    if settings is not None:
        lines.append(f"verified: {settings.compared:,} settings of [model]")
        lines += [
            f"not in the target, whose default is another: {name} ({values})"
            for name, values in settings.not_stated.items()
        ]
    return "\n".join(lines)


def difference_message(done: Converted) -> str | None:
    """Return that the target differs, if it does."""
    if done.is_equal:
        return None
    found = []
    if done.settings is not None and done.settings.different:
        found.append(f"{len(done.settings.different):,} settings of [model]")
    if done.comparison is not None and (different := done.comparison.different):
        tensors = f"{len(different):,} of {done.comparison.compared:,} tensors"
        found.append("its logits" if done.comparison.kind == "logits" else tensors)
    return f"the target differs from the source in {' and '.join(found)}; it was removed"


def _differences(kind: str, different: Mapping[str, str]) -> Iterator[str]:
    """Yield a table of the first differences."""
    rows = [*different.items()]
    if rows:
        yield from table((kind, "difference"), rows[:_SHOWN])
    if len(rows) > _SHOWN:
        yield f"and {len(rows) - _SHOWN:,} more"
