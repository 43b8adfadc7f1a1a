"""Configure glibc's allocator: keep the memory that the next step reuses, or return it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

# <malloc.h>
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_DEFAULT_TRIM_BYTES: Final = 128 * 1024
_DEFAULT_MMAPS: Final = 65536
_MAPPED_BYTES: Final = 2**17


def keep_freed_memory() -> bool:
    """Allocate large blocks from the heap, and never shrink it.

    By default glibc maps each block above its threshold again and unmaps it on free, so every large
    temporary costs page faults, in every step: about 6 % of a step of a 36M model. The heap keeps
    its largest size, which a training step needs again anyway.

    Returns:
        Whether the C library supports it.
    """
    return _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})


def map_large_blocks() -> bool:
    """Map each block of 128 KiB or more by itself, so that it is unmapped when it is freed.

    By default glibc raises its threshold, up to 32 MiB, to the size of each mapped block that is
    freed. Smaller blocks then come from the heap, which keeps all below its highest block: a third
    more than is allocated, in a run whose optimizer states are in files. The threshold stays after
    the run: glibc has no way back to one that it raises.

    Returns:
        As ``keep_freed_memory``.
    """
    return _set({_M_MMAP_THRESHOLD: _MAPPED_BYTES})


def release_freed_memory() -> bool:
    """Restore glibc's defaults and release the free memory at the end of the heap."""
    return _set({_M_MMAP_MAX: _DEFAULT_MMAPS, _M_TRIM_THRESHOLD: _DEFAULT_TRIM_BYTES})


def _set(values: Mapping[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return all(mallopt(option, value) for option, value in values.items())
