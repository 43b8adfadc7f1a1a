"""Every call of an NPU operator inside a block, recorded as it is written, and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .calls import Call

Check = Callable[[Call], None]


class Recorder:
    """Stands in the place of ``torch.ops.npu`` and passes each call on.

    Args:
        operators: ``torch.ops.npu`` itself.
        check: Told of each call of a new description, before it is made; may raise.
    """

    def __init__(self, operators: Any, check: Check | None = None) -> None:
        self._operators = operators
        self._check = check
        self.calls: Counter[Call] = Counter()
        """Call -> how often it was made."""

    def __getattr__(self, name: str) -> RecordedOperator:
        operator = RecordedOperator(getattr(self._operators, name), name, self._note)
        # Kept, as torch keeps its own: under a dispatch mode its C++ looks the operator up without
        # holding it, and a fresh one would be gone before it is used.
        setattr(self, name, operator)
        return operator

    def _note(self, call: Call) -> None:
        if self._check is not None and call not in self.calls:
            self._check(call)
        self.calls[call] += 1


class RecordedOperator:
    """One operator, told of before it is called.

    It has its overloads too: under a dispatch mode torch finds them by this way, by name.
    """

    def __init__(self, operator: Any, name: str, note: Check) -> None:
        self._operator, self._name, self._note = operator, name, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note(Call.of(self._name, args, kwargs))
        return self._operator(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def install(check: Check | None = None) -> tuple[Recorder, Callable[[], None]]:
    """(the recorder, what takes it away again). Recorders may be stacked."""
    before: Any = torch.ops.npu
    recorder = Recorder(before, check)
    operators: Any = torch.ops
    operators.npu = recorder

    def remove() -> None:
        operators.npu = before

    return recorder, remove


@contextmanager
def recorded_calls(check: Check | None = None) -> Iterator[Recorder]:
    """Record inside the block."""
    recorder, remove = install(check)
    try:
        yield recorder
    finally:
        remove()
