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
    from_zero,
    not_exercised,
    others,
    pipeline,
    resume_and_streams,
    tensor,
)
from .bug import Bug
from .mutation import mutated

FIRST: Final = (context, tensor, pipeline, experts, others, blind)
"""Modules of the bugs of the campaign ``verify-bugs``."""
SECOND: Final = (both_sides, not_exercised, resume_and_streams, from_zero, blind_second)
"""Modules of the bugs of the campaign ``verify-bugs-second``."""
BUGS: Final[Mapping[str, Bug]] = {
    bug.name: bug for module in (*FIRST, *SECOND) for bug in module.BUGS
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
