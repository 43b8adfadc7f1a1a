"""What a run allocates and frees, for a model of the device's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ascend_run.ops.memory.allocation_trace import Allocation, Usage, replay
from ascend_run.ops.memory.storage_watch import StorageWatch, WatchedStorage


class AllocationTrace(StorageWatch):
    """Record the allocations of phases, which run within ``within``.

    What is allocated between them is recorded when an operator of a phase finds it.

    Args:
        device: The storages of other devices are left out.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.allocations: list[Allocation] = []
        self._long_lived = False
        self._numbers: dict[WatchedStorage, int] = {}
        self._count = 0

    @contextmanager
    def within(self, *, long_lived: bool) -> Iterator[None]:
        """Record a phase.

        Args:
            long_lived: Whether what it allocates stays.
        """
        self.measure_again()
        self._long_lived = long_lived
        try:
            with self:
                yield
        finally:
            self.measure_again()
            self._long_lived = False

    def resized(self, storage: WatchedStorage, difference: int) -> None:
        if storage.nbytes == difference:
            self._numbers[storage], self._count = self._count, self._count + 1
        number = self._numbers[storage] if storage.nbytes else self._numbers.pop(storage)
        self.allocations.append(Allocation(number, storage.nbytes, self._long_lived))

    def end(self) -> tuple[Usage, Usage]:
        """Stop, and return what one pool and two pools reserve."""
        self.release()
        one, two = (replay(self.allocations, separate=separate) for separate in (False, True))
        return one, two
