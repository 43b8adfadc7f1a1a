"""A clock that operators move on, in place of the machine's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")


class OperatorClock(TorchDispatchMode):
    """Each operator takes as long as a memory takes for the bytes that it reads and writes, so that
    what is chosen by times is the same in every run.

    Args:
        memory_gb: Speed of the memory. Unit: GB/s.
    """

    def __init__(self, memory_gb: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self._rate = memory_gb * 1e9

    def __torch_dispatch__(
        self,
        func: Callable[..., Result],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Result:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        self.seconds += sum(x.nbytes for x in leaves if isinstance(x, Tensor)) / self._rate
        return result


@contextmanager
def operator_clock(memory_gb: float) -> Iterator[OperatorClock]:
    """Let ``time.perf_counter`` be such a clock."""
    clock = OperatorClock(memory_gb)
    with clock, patch.object(time, "perf_counter", lambda: clock.seconds):
        yield clock
