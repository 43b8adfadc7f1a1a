"""Write to files on a thread while the next tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class WriteQueue:
    """Runs one write after the other; only one tensor waits or is written."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._last: Future[Any] | None = None

    def submit(self, write: Callable[..., object], *arguments: object) -> None:
        """Call ``write`` when the previous write is done; raises what that one raised."""
        self.wait()
        self._last = self._pool.submit(write, *arguments)

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None


@contextmanager
def write_queue() -> Iterator[WriteQueue]:
    """Yield a queue, which is empty at the end of the block."""
    with ThreadPoolExecutor(1, "convert-write") as pool:
        queue = WriteQueue(pool)
        yield queue
        queue.wait()
