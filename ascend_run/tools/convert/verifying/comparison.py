"""Differences between a source and the files that were written from it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from ascend_run.core.hugging_face.parameter_rows import VOCABULARY_PARAMETERS
from ascend_run.tools.convert.differences import difference
from ascend_run.tools.convert.formats.model_source import ModelSource, Progress


@attrs.frozen(kw_only=True)
class Comparison:
    """The result. A conversion keeps every bit, so any difference is an error."""

    kind: str
    """``tensors`` or ``logits``."""
    compared: int
    """Parameters, or logits."""
    different: Mapping[str, str]
    """What differs -> how: shapes, dtypes, or the number of elements and the largest difference."""
    max_difference: float
    """Largest absolute difference; inf if a value is NaN or cannot be compared."""


def compare_tensors(source: ModelSource, target: ModelSource, progress: Progress) -> Comparison:
    """Compare every parameter bit for bit, one in memory at a time."""
    different: dict[str, str] = {}
    largest, done = 0.0, 0
    names = dict.fromkeys((*source.headers, *target.headers))
    for name in names:
        if name not in source.headers or name not in target.headers:
            different[name] = f"only in the {'target' if name in target.headers else 'source'}"
            largest = torch.inf
            continue
        one, other = source.tensor(name), target.tensor(name)
        if name in VOCABULARY_PARAMETERS:  # without padding
            rows = source.config.model.vocab_size
            one, other = one[:rows], other[:rows]
        if found := difference(one, other):
            different[name] = found.text
            largest = max(largest, found.largest)
        done += one.nbytes
        progress("verify", done, source.nbytes)
    return Comparison(
        kind="tensors", compared=len(names), different=different, max_difference=largest
    )
