"""Run in this process: no agent, no other process, no environment variables."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Make SIGTERM raise SystemExit(143), so that every ``finally`` block runs as after Ctrl-C.

    A handler that is already installed is kept.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
