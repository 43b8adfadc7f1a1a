"""A torch form compiled into few kernels the first time it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Form = TypeVar("_Form", bound=Callable[..., Any])


def compiled(form: _Form, backend: str = "inductor") -> _Form:
    """The form by torch.compile: one graph, no fall-back; inside another graph the form itself.

    Nothing is compiled before the first call; each new dtype, rank and choice of options compiles
    once more, at most 16 times, and other forms' graphs do not count.
    """

    @functools.cache
    def graph() -> Callable[..., Any]:
        return torch.compile(
            form, backend=backend, fullgraph=True, recompile_limit=16, isolate_recompiles=True
        )

    @functools.wraps(form)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (form if torch.compiler.is_compiling() else graph())(*args, **kwargs)

    return cast("_Form", run)
