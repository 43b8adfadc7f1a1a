"""Which widths torch's grouped GEMM takes. No torch."""

from __future__ import annotations

from typing import Final

_ROW_BYTES: Final = 16
"""The size of a row must be a multiple of this."""


def row_elements(itemsize: int) -> int:
    """Return the number of elements of this size of which a row has a multiple."""
    return _ROW_BYTES // itemsize
