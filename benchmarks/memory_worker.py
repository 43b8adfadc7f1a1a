"""Code that runs on the ranks of ``memory_prediction``; can be imported without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs


@attrs.frozen
class Measured:
    """Bytes on one rank; storages that several tensors share are counted once."""

    weights: int
    gradients: int
    """Persistent gradient buffers; gradients in autograd's ``grad`` are part of the peak."""
    optimizer: int
    """Its states and master weights that are in no file."""
    files: int
    """Those that are in files."""
    peak: int
    """Peak memory in a step, including all of the above."""


def measure(config: Mapping[str, Any], plugins: Sequence[str], memory_gb: float | None) -> Measured:
    """Measure a run of two steps; called on every rank of a default process group.

    Args:
        memory_gb: See ``Case``.
    """
    from .memory_run import two_steps
    from .operator_clock import operator_clock

    with nullcontext() if memory_gb is None else operator_clock(memory_gb):
        return two_steps(config, plugins)
