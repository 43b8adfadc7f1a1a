"""Fake device streams: queued work runs when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FakeStream:
    """A queue whose work runs only when another stream waits for it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.queue.append(other.run)

    def run(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()


class FakeStreams:
    """The part of ``torch.cuda`` that a copier uses; copies on a side stream are deferred."""

    def __init__(self) -> None:
        self._current = self.default = FakeStream()

    def Stream(self) -> FakeStream:
        return FakeStream()

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Defer copies into tensors inside the block to the stream."""
        before, plain = self._current, torch.Tensor.copy_

        def put_off(self: torch.Tensor, source: torch.Tensor, **_: Any) -> torch.Tensor:
            stream.queue.append(lambda: plain(self, source))
            return self

        self._current, torch.Tensor.copy_ = stream, put_off  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._current, torch.Tensor.copy_ = before, plain  # type: ignore[method-assign]
