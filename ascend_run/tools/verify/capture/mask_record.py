"""The record of a dropout mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

ATTENTION: Final = "attention"
HIDDEN: Final = "hidden"


@attrs.frozen(kw_only=True)
class DropoutMask:
    """One mask, as one rank drew it."""

    module: str
    """The innermost module whose forward draws it, in the whole model."""
    kind: str
    """``ATTENTION``: of attention weights; ``HIDDEN``: of a layer's or the embedding's output; else
    empty."""
    call: int
    """Index among the masks that the module draws for a micro-batch."""
    micro_batch: int
    """Index among this rank's micro-batches."""
    is_redrawn: bool
    """Drawn again for the backward, in it or before it."""
    keep: float
    """Probability with which an element is drawn as kept."""
    kept: int
    size: int
    """Number of elements."""
    digest: str
    """Of which elements are kept."""
    dropped: Sequence[float] = ()
    """Moments of the tensor that the mask is applied to; empty if it was not seen."""
