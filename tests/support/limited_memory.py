"""An allocator with a limit, for devices whose own has none."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .fake_plugins import plugin


class LimitedMemory(TorchDispatchMode):
    """Raise torch.OutOfMemoryError where storages that operators have made in forward and backward,
    and that still live, have more bytes than a limit."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit: float = float("inf")
        self.peak = 0
        self.failures = 0
        self.begun: list[int] = []
        """Bytes that were allocated at each beginning of forward and backward."""
        self._living: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def plugin(self) -> Any:
        """Return a plugin that limits forward and backward of each step."""

        def wrap(schedule: Any) -> Any:
            def limited(**arguments: Any) -> Any:
                self.begun.append(self.allocated())
                with self:
                    return schedule(**arguments)

            return limited

        return plugin("limited-memory", {"ascend_schedule": lambda self: wrap})()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.from_file.default:  # it is on a disk
            return result
        given = {_key(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and _key(value) not in given:
                self._living[_key(value)] = weakref.ref(value.untyped_storage())
        allocated = self.allocated()
        if allocated > self.limit:
            self.failures += 1
            raise torch.OutOfMemoryError(f"{allocated} bytes are more than {self.limit}")
        self.peak = max(self.peak, allocated)
        return result

    def allocated(self) -> int:
        """Return the bytes that live now."""
        found = {key: storage() for key, storage in self._living.items()}
        sizes = {key: x.nbytes() for key, x in found.items() if x is not None}
        self._living = {key: self._living[key] for key in sizes}
        return sum(sizes.values())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
