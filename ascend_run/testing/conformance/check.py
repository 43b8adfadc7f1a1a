"""A conformance check and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.testing.pool import PoolError

if TYPE_CHECKING:
    from .subject import Subject


MOST_PROBLEMS: Final = 8
"""Maximum number of problems in a message."""


class DoesNotApply(Exception):
    """The check does not apply to this plugin; the message is the reason, which is reported."""


@attrs.frozen
class Verdict:
    """The result of one check."""

    problems: tuple[str, ...] = ()
    not_applicable: str = ""
    """Why the check does not apply to this plugin; empty if it does."""


@attrs.frozen
class Check:
    """One requirement that every plugin must meet."""

    code: str
    """``KIT-IMPORT``: the name of the test, which also starts its error message."""
    promise: str
    """The requirement, in one line."""
    find: Callable[[Subject], Iterable[str]]
    """Yields a message per problem; may raise DoesNotApply."""

    def judge(self, subject: Subject) -> Verdict:
        """Run the check."""
        try:
            return Verdict(tuple(dict.fromkeys(self.find(subject))))
        except DoesNotApply as reason:
            return Verdict(not_applicable=str(reason))
        except AscendRunError as error:
            return Verdict((f"its run is rejected: {error}",))
        except PoolError as error:
            slow = error.kind in ("Hang", "Start")
            advice = "; if it is only slow, raise --ascend-timeout" if slow else ""
            failed = f"its run failed on rank {error.rank}: {error.kind}: {error.message}{advice}"
            return Verdict((failed,))

    def message(self, plugin: str, verdict: Verdict) -> str:
        """Return the error message of a failed test."""
        shown = verdict.problems[:MOST_PROBLEMS]
        lines = [f"  {problem}" for problem in shown]
        if more := len(verdict.problems) - len(shown):
            lines.append(f"  and {more} more")
        return "\n".join([f"{self.code}: {plugin} does not satisfy: {self.promise}", *lines])
