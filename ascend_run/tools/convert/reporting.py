"""What a conversion prints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ascend_run.tools.terminal.tables import table

from .conversion import Converted
from .verifying.comparison import Comparison

_SHOWN: Final = 20
"""Differences that are listed."""


def as_record(target: Path, done: Converted) -> str:
    """Return what was written and compared as JSON."""
    model, comparison = done.model, done.comparison
    record: dict[str, object] = {
        "family": model.family.model_type,
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
            "equal": not comparison.different,
            "compared": comparison.compared,
            "max_difference": largest if math.isfinite(largest) else None,
            "different": dict(comparison.different),
        }
    return json.dumps(record, indent=2)


def as_text(target: Path, done: Converted) -> str:
    """Return the same for a reader: a summary, or a table of differences."""
    model, comparison = done.model, done.comparison
    if comparison is not None and comparison.different:
        return "\n".join(_differences(comparison))
    size = f"{len(model.headers):,} tensors, {model.nbytes / 1e6:,.1f} MB"
    lines = [f"{target}: {model.family.model_type}, step {model.step}, {size}"]
    if model.num_merged:
        lines.append(f"adapters merged into {model.num_merged:,} tensors")
    if comparison is not None:
        lines.append(f"verified: {comparison.compared:,} {comparison.kind} equal, max difference 0")
    return "\n".join(lines)


def difference_message(done: Converted) -> str | None:
    """Return that the target differs, if it does."""
    if done.comparison is None or not (different := done.comparison.different):
        return None
    if done.comparison.kind == "logits":
        return "the logits of the target differ from the source's; it was removed"
    count = f"{len(different):,} of {done.comparison.compared:,} tensors"
    return f"the target differs from the source in {count}; it was removed"


def _differences(comparison: Comparison) -> Iterator[str]:
    """Yield a table of the first differences."""
    rows = [*comparison.different.items()]
    yield from table((comparison.kind, "difference"), rows[:_SHOWN])
    if len(rows) > _SHOWN:
        yield f"and {len(rows) - _SHOWN:,} more"
