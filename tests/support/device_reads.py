"""Reads of a device's tensors by the host, which waits for the device in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from torch import Tensor

READS: Final = ("cpu", "item", "tolist", "numpy", "nonzero", "__int__", "__bool__", "__index__")


class _OnDevice(Tensor):
    reads: ClassVar[list[str]]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in READS:
            return super().__torch_function__(func, types, args, kwargs)
        cls.reads.append(func.__name__)
        plain = [arg.as_subclass(Tensor) if isinstance(arg, _OnDevice) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def on_device(tensor: Tensor, reads: list[str]) -> Tensor:
    """Return the tensor as one of a device; its values stay on the CPU.

    Args:
        reads: Gets the name of each operation that reads it, or what is computed from it.
    """
    return tensor.as_subclass(type("OnDevice", (_OnDevice,), {"reads": reads}))
