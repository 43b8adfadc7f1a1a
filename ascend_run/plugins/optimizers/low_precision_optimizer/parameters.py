"""Which parameters have moments in 8 bits. No torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

MOMENTS: Final = "moments"
"""Per-parameter option: ``EIGHT_BITS`` or ``WIDE``."""
EIGHT_BITS: Final = "8bit"
WIDE: Final = "float32"
BLOCK: Final = 256
"""Elements that share a scale."""
CHUNK: Final = 2**18
"""Elements that a CPU updates at once: float32 copies of their moments stay in its caches. A
multiple of the block."""
DEVICE_CHUNK: Final = 2**20
"""The same on another device."""
TABLE_BYTES: Final = 2 * 4 * (2**15 + 256)
"""Of the tables with which both moments are quantized, and dequantized."""


def parameter_options(name: str, is_matrix: bool, *, wide: Collection[str]) -> dict[str, str]:
    """Return the per-parameter options of a parameter; see ``OptimizerSpec``."""
    is_wide = not is_matrix or not {*wide}.isdisjoint(name.split("."))
    return {MOMENTS: WIDE if is_wide else EIGHT_BITS}
