"""Record and check every call of an NPU operator inside a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .calls import Call

Check = Callable[[Call], None]


class Recorder:
    """Replace ``torch.ops.npu``, and forward each call.

    Args:
        operators: ``torch.ops.npu`` itself.
        check: Called with each new call description before the call is made; may raise.
    """

    def __init__(self, operators: object, check: Check | None = None) -> None:
        self._operators = operators
        self._check = check
        self.calls: Counter[Call] = Counter()
        """Call -> number of times it was made."""

    def __getattr__(self, name: str) -> RecordedOperator:
        operator = RecordedOperator(getattr(self._operators, name), name, self._note)
        # Held, as torch holds its own: under a dispatch mode its C++ looks the operator up without
        # a reference, and a new object would be freed before it is used.
        setattr(self, name, operator)
        return operator

    def _note(self, call: Call) -> None:
        if self._check is not None and call not in self.calls:
            self._check(call)
        self.calls[call] += 1


class RecordedOperator:
    """One operator, recorded before it is called.

    It exposes the overloads too: under a dispatch mode torch looks them up by name.
    """

    def __init__(self, operator: Any, name: str, note: Check) -> None:
        self._operator, self._name, self._note = operator, name, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note(Call.of(self._name, args, kwargs))
        return self._operator(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def install(check: Check | None = None) -> tuple[Recorder, Callable[[], None]]:
    """Return (the recorder, a function that removes it). Recorders may be nested."""
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
