"""What a worker process runs that the system kills. Imports nothing else: it starts quickly."""

from __future__ import annotations

import signal


def killed(*_: object) -> None:
    """Kill the process."""
    signal.raise_signal(signal.SIGKILL)
