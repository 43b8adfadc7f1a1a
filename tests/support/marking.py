"""Wrappers that change nothing and record each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ascend_run.plugin_api import ForwardLink


def marking(marks: list[Any], mark: Any) -> Callable[[Any], Any]:
    """Wrap an attention kernel; its mark precedes the marks of inner wrappers."""

    def wrap(kernel: Any) -> Any:
        kernel.forward = _marked(marks, mark, kernel.forward)
        return kernel

    return wrap


def marking_link(
    marks: list[Any], mark: Any, *, compilable: bool = False
) -> Callable[[nn.Module], ForwardLink]:
    """Return a link that marks each call of a module's forward."""
    link = ForwardLink(wrap=partial(_marked, marks, mark), compilable=compilable)
    return lambda module: link


def _marked(marks: list[Any], mark: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        marks.append(mark)
        return inner(*args, **kwargs)

    return forward


class Passing:
    """A proxy that forwards all attributes it does not define."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
