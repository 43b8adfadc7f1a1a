"""glibc's allocator, set to keep the memory that the next training step will use again."""

from __future__ import annotations

import ctypes
from typing import Final

# <malloc.h>
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
_DEFAULT_TRIM_BYTES: Final = 128 * 1024
_DEFAULT_MMAPS: Final = 65536


def keep_freed_memory() -> bool:
    """Serve large blocks from the heap, and never shrink it; whether the C library could.

    By default glibc maps each block above its threshold anew and unmaps it when it is freed, so
    every large temporary is paid for in page faults, in every step: about 6 % of a step of a 36M
    model. The heap stays as large as it once was, which a training step needs again anyway.
    """
    return _set(mmaps=0, trim_bytes=-1)


def release_freed_memory() -> bool:
    """glibc's defaults again; what is free at the end of the heap goes back now."""
    return _set(mmaps=_DEFAULT_MMAPS, trim_bytes=_DEFAULT_TRIM_BYTES)


def _set(*, mmaps: int, trim_bytes: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(mallopt(_M_MMAP_MAX, mmaps)) and bool(mallopt(_M_TRIM_THRESHOLD, trim_bytes))
