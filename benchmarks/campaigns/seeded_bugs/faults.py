"""Every seeded bug by its name: called as ``verify`` plants a fault, and undone by its answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from . import blind, both_sides, context, experts, others, pipeline, tensor
from .bug import Bug
from .mutation import mutated

BUGS: Final[Mapping[str, Bug]] = {
    bug.name: bug
    for module in (context, tensor, pipeline, experts, others, blind, both_sides)
    for bug in module.BUGS
}


def plant(bug: Bug) -> Callable[[], None]:
    """Patch the code of this process; the answer takes the patch back."""
    stack = ExitStack()
    stack.enter_context(mutated(bug.target, bug.old, bug.new))
    return stack.close


def __getattr__(name: str) -> Any:
    if name not in BUGS:
        raise AttributeError(f"no seeded bug is called {name!r}")
    return functools.partial(plant, BUGS[name])
