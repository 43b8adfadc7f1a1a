"""Compile a torch implementation of an operator on its first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ascend_run.ops.kernels.own_graphs import with_own_graphs

_Form = TypeVar("_Form", bound=Callable[..., Any])


def compiled(form: _Form, backend: str = "inductor") -> _Form:
    """Compile an implementation with torch.compile: one graph, no fallback.

    Inside another graph the implementation itself runs. Nothing is compiled before the first call;
    each new dtype, rank and combination of options is compiled once, at most 16 times, and graphs
    of other implementations do not count.
    """

    @functools.cache
    def graph() -> Callable[..., Any]:
        return with_own_graphs(form, limit=16, backend=backend, fullgraph=True)

    @functools.wraps(form)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (form if torch.compiler.is_compiling() else graph())(*args, **kwargs)

    return cast("_Form", run)
