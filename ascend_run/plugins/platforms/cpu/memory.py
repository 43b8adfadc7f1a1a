"""Read the memory of this process; on the CPU platform it is the device's memory."""

from __future__ import annotations

import os


class HostMemory:
    """Read the resident bytes of this process, and the highest reading since the reset.

    The peak is that of the readings, not of the process: the system's own high-water mark cannot be
    reset without privileges.
    """

    def __init__(self) -> None:
        self._peak_bytes = 0

    def memory_bytes(self) -> tuple[int, int]:
        """Return (now, peak)."""
        import psutil

        now = psutil.Process(os.getpid()).memory_info().rss
        self._peak_bytes = max(self._peak_bytes, now)
        return now, self._peak_bytes

    def reset_peak_memory(self) -> None:
        self._peak_bytes = 0
