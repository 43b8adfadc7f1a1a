"""One rank's part of ``memory_prediction``, importable without torch by whoever asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen
class Measured:
    """Bytes on one rank; storages that several tensors share are counted once."""

    weights: int
    gradients: int
    """Of the buffers that last; autograd's own gradients are in the peak."""
    optimizer: int
    peak: int
    """The most that was alive at once in a step, with all of the above."""


def measure(config: Mapping[str, Any], plugins: Sequence[str]) -> Measured:
    """What a run of two steps takes; called on every rank of a default process group."""
    from .memory_run import two_steps

    return two_steps(config, plugins)
