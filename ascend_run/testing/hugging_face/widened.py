"""Run transformers in float64 throughout, its fixed float32 parts (norms, angles, softmax) too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Widened(TorchFunctionMode):
    """Every request for float32 becomes one for float64."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is Tensor.float:
            function = Tensor.double
        given = {name: widened(value) for name, value in (kwargs or {}).items()}
        return function(*map(widened, args), **given)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Build and run transformers' models in float32, or entirely in float64."""
    if dtype is torch.float32:
        yield
        return
    assert dtype is torch.float64
    torch.set_default_dtype(dtype)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
