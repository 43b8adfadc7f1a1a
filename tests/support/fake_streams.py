"""Streams without a device: work that is put on them is done when they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FakeStream:
    """A queue. What is queued runs when another stream waits for it, and no sooner."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.queue.append(other.run)

    def run(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()


class FakeStreams:
    """``torch.cuda`` as far as a copier uses it; copies on a side stream are put off."""

    def __init__(self) -> None:
        self._current = self.default = FakeStream()

    def Stream(self) -> FakeStream:
        return FakeStream()

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Copies into tensors inside the block run with the stream."""
        before, plain = self._current, torch.Tensor.copy_

        def put_off(self: torch.Tensor, source: torch.Tensor, **_: Any) -> torch.Tensor:
            stream.queue.append(lambda: plain(self, source))
            return self

        self._current, torch.Tensor.copy_ = stream, put_off  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._current, torch.Tensor.copy_ = before, plain  # type: ignore[method-assign]
