"""Every seeded bug by its name: called as ``verify`` plants a fault, and undone by its answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from . import (
    blind,
    blind_second,
    both_sides,
    context,
    experts,
    not_exercised,
    others,
    pipeline,
    resume_and_streams,
    tensor,
)
from .bug import Bug
from .mutation import mutated

COUNTED: Final = (context, tensor, pipeline, experts, others, blind)
"""Modules of bugs that the campaign ``verify-bugs`` counts."""
NOT_YET_COUNTED: Final = (both_sides, blind_second, resume_and_streams, not_exercised)
"""Modules of bugs that the campaign will count once it has been run with them; tests plant some of
them."""
BUGS: Final[Mapping[str, Bug]] = {
    bug.name: bug for module in (*COUNTED, *NOT_YET_COUNTED) for bug in module.BUGS
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
