"""Wrappers that change nothing and leave a mark whenever what they wrap is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def marking(marks: list[Any], mark: Any) -> Callable[[nn.Module], nn.Module]:
    """A module wrapper; its mark comes before the marks of what is further in."""

    def wrap(module: nn.Module) -> nn.Module:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            marks.append(mark)
            return inner(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        return module

    return wrap


class Passing:
    """Stands for another object and hands on everything that it does not define itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
