"""Every seeded bug by its name: called as ``verify`` plants a fault, and undone by its answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from . import (
    blind,
    blind_second,
    blind_second_states,
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
SECOND: Final = (
    both_sides,
    not_exercised,
    resume_and_streams,
    from_zero,
    blind_second,
    blind_second_states,
)
"""Modules of the bugs of the campaign ``verify-bugs-second``."""
BY_OTHERS: Final = (*blind.BUGS, *blind_second.BUGS, *blind_second_states.BUGS)
"""Those by authors who had not read ``verify``."""
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
