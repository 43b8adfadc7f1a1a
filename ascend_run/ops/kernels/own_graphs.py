"""torch.compile with a limit of its own, and graphs of its own where torch can keep them apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch._dynamo

_Form = TypeVar("_Form", bound=Callable[..., Any])


def with_own_graphs(form: _Form, limit: int, **options: Any) -> _Form:
    """Return the compiled function; nothing is compiled before its first call.

    From torch 2.13 on its graphs are isolated: another compiled function of the same code neither
    reuses them nor counts against their limit. Before, both share them.

    Args:
        limit: Graphs per piece of code; further variants run uncompiled, or fail with
            ``fullgraph``.
        options: Others of torch.compile.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        own: dict[str, Any] = {"recompile_limit": limit, "isolate_recompiles": True}
        return cast("_Form", torch.compile(form, **own, **options))
    graph = torch.compile(form, **options)

    @functools.wraps(form)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=limit):
            return graph(*args, **kwargs)

    return cast("_Form", run)
