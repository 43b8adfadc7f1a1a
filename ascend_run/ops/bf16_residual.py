"""Float32 values as bfloat16 and 16 more bits each, without loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

# N = elements of one tensor; R = rows of them.

BLOCK: Final = 1 << 18
"""Elements that a CPU converts at once; they and the intermediates stay in its cache."""
DEVICE_BLOCK: Final = 1 << 20
"""The same on another device."""
ASIDE_BYTES: Final = 12
"""Of a value that is kept aside: its position and itself."""
ASIDE_SHARE: Final = 2.0**-17
"""Expected share of values that are kept aside, if their low bits are uniform."""
_ROW: Final = 256
"""Elements of which the smallest low half is sought at once, which is faster than to list ties; a
block has a whole number of them."""
_MOST_ASIDE: Final = 1 / 8
"""Share above which the values are kept whole."""


class Bf16Residual:
    """What float32 values have beyond bfloat16.

    With m the bits of a value as an integer and h those of its rounding, torch's to nearest even,
    ``m - (h << 16)`` is within -2**15 and 2**15. An int16 has all of these but the last: the exact
    tie that is rounded down to an even h. An even h stands for one value more than 16 bits tell
    apart, so these ties, one value in 2**17, are kept aside with their positions. So are NaNs with
    a payload that the rounding changes. If most values would be, as when a run has diverged to NaN,
    all are kept in float32 instead.
    """

    def __init__(self, rounded_N: Tensor) -> None:
        """Make that of values that are bfloat16."""
        self._low_N: Tensor | None = torch.zeros_like(rounded_N, dtype=torch.int16)
        self._where = torch.empty(0, dtype=torch.int64, device=rounded_N.device)
        self._aside = torch.empty(0, dtype=torch.float32, device=rounded_N.device)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        held = [t for t in (self._low_N, self._where, self._aside) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)

    @property
    def num_aside(self) -> int:
        """Number of values that are kept aside."""
        return self._aside.numel()

    def split(self, values_N: Tensor, rounded_N: Tensor) -> None:
        """Round values into ``rounded_N``, and keep the rest of them.

        Args:
            values_N: float32, contiguous.
            rounded_N: bfloat16, contiguous; overwritten.
        """
        low_N = self._low_N
        if low_N is None:
            low_N = self._low_N = torch.empty_like(rounded_N, dtype=torch.int16)
        suspects_R = torch.empty(values_N.numel() // _ROW, dtype=torch.bool, device=values_N.device)
        for part in _blocks(values_N):
            values, low = values_N[part], low_N[part]
            rounded_N[part].copy_(values)
            low.copy_(values.view(torch.int32))  # as the rest: both are m modulo 2**16
            suspects_R[part.start // _ROW : part.stop // _ROW] = _suspects(values, low)
        where = _lost(values_N, rounded_N, low_N, suspects_R)
        if where.numel() <= _MOST_ASIDE * values_N.numel():
            self._where, self._aside = where, values_N[where]
        else:
            self._low_N, self._where, self._aside = None, where.new_empty(0), values_N.clone()

    def join(self, rounded_N: Tensor, values_N: Tensor) -> None:
        """Write the values into ``values_N``: float32, contiguous."""
        if self._low_N is None:
            values_N.copy_(self._aside)
            return
        for part in _blocks(values_N):
            values_N[part].copy_(rounded_N[part])
            values_N[part].view(torch.int32).add_(self._low_N[part].to(torch.int32))
        values_N.index_copy_(0, self._where, self._aside)

    def values_at(self, rounded_N: Tensor, where: Tensor) -> Tensor:
        """Return the values at some positions; asynchronous on the device."""
        if self._low_N is None:
            return self._aside.index_select(0, where)
        bits = _shifted(rounded_N.index_select(0, where))
        bits.add_(self._low_N.index_select(0, where))
        values = bits.view(torch.float32)
        if self._where.numel() == 0:
            return values
        at = torch.searchsorted(self._where, where).clamp_(max=self._where.numel() - 1)
        return torch.where(self._where[at] == where, self._aside[at], values)


def _shifted(rounded: Tensor) -> Tensor:
    """Return a copy of bfloat16's bits as the high half of an int32, as float32 has them."""
    return rounded.float().view(torch.int32)


def _suspects(values_N: Tensor, low_N: Tensor) -> Tensor:
    """Return for each full row whether it may have a value that the halves do not tell: a tie,
    whose low half is -2**15, or NaN."""
    full = values_N.numel() // _ROW * _ROW
    smallest_R = low_N[:full].view(-1, _ROW).amin(dim=1)
    finite_R = values_N[:full].view(-1, _ROW).sum(dim=1).isfinite()
    return (smallest_R == -(2**15)).logical_or_(finite_R.logical_not_())


def _lost(values_N: Tensor, rounded_N: Tensor, low_N: Tensor, suspects_R: Tensor) -> Tensor:
    """Return the positions of values that the halves do not tell, in order. The host waits for the
    device twice, and again for each further block of suspects, of which there is one without NaN.
    """
    device = values_N.device
    columns = torch.arange(_ROW, device=device)
    rows = suspects_R.nonzero()
    candidates = [(some * _ROW + columns).view(-1) for some in rows.split(DEVICE_BLOCK // _ROW)]
    rest = torch.arange(suspects_R.numel() * _ROW, values_N.numel(), device=device)
    candidates[-1] = torch.cat([candidates[-1], rest])
    found = []
    for where in candidates:
        at_them = (tensor.index_select(0, where) for tensor in (values_N, rounded_N, low_N))
        found.append(where[_differ(*at_them).nonzero().view(-1)])
    return torch.cat(found)


def _differ(values: Tensor, rounded: Tensor, low: Tensor) -> Tensor:
    """Return where the halves do not make the values."""
    return _shifted(rounded).add_(low) != values.view(torch.int32)


def _blocks(values_N: Tensor) -> Iterator[slice]:
    numel = values_N.numel()
    size = BLOCK if values_N.device.type == "cpu" else DEVICE_BLOCK
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))
