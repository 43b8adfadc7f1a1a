"""Compile a torch implementation of an operator on its first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Form = TypeVar("_Form", bound=Callable[..., Any])


def compiled(form: _Form, backend: str = "inductor") -> _Form:
    """Compile an implementation with torch.compile: one graph, no fallback.

    Inside another graph the implementation itself runs. Nothing is compiled before the first call;
    each new dtype, rank and combination of options is compiled once, at most 16 times, and graphs
    of other implementations do not count.
    """

    @functools.cache
    def graph() -> Callable[..., Any]:
        # torch's overloads do not name these options.
        options: dict[str, Any] = {"recompile_limit": 16, "isolate_recompiles": True}
        return torch.compile(form, backend=backend, fullgraph=True, **options)

    @functools.wraps(form)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (form if torch.compiler.is_compiling() else graph())(*args, **kwargs)

    return cast("_Form", run)
