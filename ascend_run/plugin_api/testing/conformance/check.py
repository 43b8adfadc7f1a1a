"""What a check is, and what comes of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.plugin_api.testing.pool import PoolError

if TYPE_CHECKING:
    from .subject import Subject


MOST_PROBLEMS: Final = 8
"""As many as a message shows."""


class DoesNotApply(Exception):
    """A check says nothing of this plugin; the message is the reason, which is reported."""


@attrs.frozen
class Verdict:
    """What came of one check."""

    problems: tuple[str, ...] = ()
    not_applicable: str = ""
    """Why the check says nothing of this plugin; empty where it does."""


@attrs.frozen
class Check:
    """One promise that every plugin keeps."""

    code: str
    """``KIT-IMPORT``: the name of the test, and the first word of its message."""
    promise: str
    """One line: what is so of a plugin that passes."""
    find: Callable[[Subject], Iterable[str]]
    """The problems, a sentence each; may raise DoesNotApply."""

    def judge(self, subject: Subject) -> Verdict:
        """Make the check."""
        try:
            return Verdict(tuple(dict.fromkeys(self.find(subject))))
        except DoesNotApply as reason:
            return Verdict(not_applicable=str(reason))
        except AscendRunError as error:
            return Verdict((f"its run is refused: {error}",))
        except PoolError as error:
            return Verdict((f"its run failed on rank {error.rank}: {error.kind}: {error.message}",))

    def message(self, plugin: str, verdict: Verdict) -> str:
        """What a failed test prints."""
        shown = verdict.problems[:MOST_PROBLEMS]
        lines = [f"  {problem}" for problem in shown]
        if more := len(verdict.problems) - len(shown):
            lines.append(f"  and {more} more")
        return "\n".join([f"{self.code}: {plugin} does not keep this: {self.promise}", *lines])
