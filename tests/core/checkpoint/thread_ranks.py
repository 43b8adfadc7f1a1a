"""Several ranks in one process: a thread each, for tests that need ranks but no network."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WAIT_SECONDS = 30.0


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[str] = [""] * size


class ThreadRanks:
    """One thread's view of the others; values go through JSON, as they do between processes."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def gather(self, value: Any) -> list[Any] | None:
        everything = self._exchange(json.dumps(value))
        return [json.loads(text) for text in everything] if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        return json.loads(self._exchange(json.dumps(value if self.rank == 0 else None))[0])

    def _exchange(self, text: str) -> list[str]:
        self._meeting.slots[self.rank] = text
        self._meeting.barrier.wait(WAIT_SECONDS)
        everything = list(self._meeting.slots)
        self._meeting.barrier.wait(WAIT_SECONDS)
        return everything


def on_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Call ``work(ranks)`` on ``size`` ranks; each one's answer, or the exception it raised."""
    meeting = _Meeting(size)

    def on_rank(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, size, meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(on_rank, range(size)))


def all_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """The same where no rank may fail."""
    results = on_ranks(size, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
