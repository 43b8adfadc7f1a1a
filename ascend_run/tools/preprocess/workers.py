"""Encode batches in several processes, in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from ascend_run.plugin_api.errors import AscendRunError

L = TypeVar("L")
B = TypeVar("B")
R = TypeVar("R")

_encode: Callable[[Any], Any] | None = None
"""Of a worker process."""


def in_processes(
    batches: Iterator[tuple[L, B]], make: Callable[[], Callable[[B], R]], processes: int
) -> Iterator[tuple[L, R]]:
    """Yield what each batch is encoded to, with the label that came with it, in order.

    Args:
        make: Makes what encodes a batch, once in each process; it is pickled.

    Raises:
        AscendRunError: A process was killed.
    """
    pending: deque[tuple[L, Future[R]]] = deque()
    with _pool(make, processes) as pool:
        try:
            for label, batch in batches:
                pending.append((label, pool.submit(_encoded, batch)))
                # One batch more than there are processes, so that none waits for this one.
                if len(pending) > processes + 1:
                    label, done = pending.popleft()
                    yield label, done.result()
            for label, done in pending:
                yield label, done.result()
        except BrokenProcessPool:
            raise AscendRunError(
                f"one of {processes} worker processes was killed, perhaps for lack of memory; use "
                "fewer --workers"
            ) from None


def useful_processes(workers: int, size_bytes: int, bytes_per_process: int) -> int:
    """Return how many processes shorten the work.

    Args:
        bytes_per_process: Input that takes longer to encode than a process takes to start.
    """
    return max(1, min(workers, size_bytes // bytes_per_process))


@contextmanager
def _pool(make: Callable[[], Any], processes: int) -> Iterator[ProcessPoolExecutor]:
    # A fork would copy locks that threads hold: the progress bar's, the tokenizers library's.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _prepare, (make,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(make: Callable[[], Callable[[Any], Any]]) -> None:
    """Make what a worker process encodes with."""
    global _encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encode = make()


def _end_with_parent() -> None:
    """Exit if the parent is killed; the queues of the pool do not end then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encoded(batch: Any) -> Any:
    assert _encode is not None
    return _encode(batch)
