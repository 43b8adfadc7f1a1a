"""What can go wrong through the user's doing: one message with every problem, exit code 2.

A subclass says which part of the run refused. Anything else that escapes is our own bug and keeps
its traceback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class AscendRunError(Exception):
    """A refusal with its reasons.

    Args:
        headline: What cannot be done, one line, without a final stop.
        problems: Each names the plugin or option, the value seen, what was expected and what to do.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, headline: str, problems: Sequence[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__(headline, self.problems)

    def __str__(self) -> str:
        if not self.problems:
            return self.headline
        return "\n".join([f"{self.headline}:", *(f"  {problem}" for problem in self.problems)])


class ConfigError(AscendRunError):
    """An option is unknown, of the wrong type, out of range, or contradicts another."""


class LayoutError(AscendRunError):
    """Heads, groups, sequence, experts, layers or ranks do not divide as the layout asks."""


class PluginResolutionError(AscendRunError):
    """The named plugins cannot run together, or one of them cannot be had.

    Args:
        conflicts: Where it is known: each minimal set that cannot run, as ``plugins``, ``why`` and
            ``way_out``.
        can_run: The largest sets of features that can.
    """

    def __init__(
        self,
        headline: str,
        problems: Sequence[str] = (),
        conflicts: Sequence[Mapping[str, Any]] = (),
        can_run: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__(headline, problems)
        self.conflicts = tuple(conflicts)
        self.can_run = tuple(can_run)


class PluginLoadError(AscendRunError):
    """A named plugin failed to import, or was made for another version of the API."""


class HookError(AscendRunError):
    """A plugin answered a hook with what the hook's contract forbids."""


class DataError(AscendRunError):
    """A dataset or tokenizer is missing, corrupt, foreign, or not the one it was made with."""


class CheckpointError(AscendRunError):
    """A checkpoint is missing, corrupt, or made by an incompatible run."""


class StorageError(AscendRunError):
    """The file system refused: full, read-only, or without permission."""


class PlatformError(AscendRunError):
    """The machine lacks what the chosen platform needs, or an operation it does not support."""


class RankFailure(AscendRunError):
    """A rank of the run ended badly; carries the earliest one's message."""

    exit_code: ClassVar[int] = 1
