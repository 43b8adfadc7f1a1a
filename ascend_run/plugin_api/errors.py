"""User errors: one message with all problems, exit code 2.

The subclass says which part of the run failed. Any other exception that escapes is a bug and keeps
its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar


class AscendRunError(Exception):
    """Base class of user errors.

    Args:
        headline: What failed; one line without a final period.
        problems: Each names the plugin or option, the value, what was expected and what to do.
    """

    exit_code: ClassVar[int] = 2  #: Of the command.

    def __init__(self, headline: str, problems: Sequence[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__(headline, self.problems)

    def __str__(self) -> str:
        """The headline, the problems and the notes that were added, one a line."""
        lines = [*self.problems, *getattr(self, "__notes__", ())]
        if not lines:
            return self.headline
        return "\n".join([f"{self.headline}:", *(f"  {line}" for line in lines)])


class ConfigError(AscendRunError):
    """An option is unknown, of the wrong type, out of range, or contradicts another."""


class LayoutError(AscendRunError):
    """Heads, groups, sequence, experts, layers or ranks are not divisible by the parallel sizes."""


class PluginResolutionError(AscendRunError):
    """The enabled plugins cannot run together, or one of them is not available.

    Args:
        conflicts: If known: each minimal set that cannot run, as ``plugins``, ``why`` and
            ``way_out``.
        can_run: The largest sets of features that can run.
    """

    def __init__(
        self,
        headline: str,
        problems: Sequence[str] = (),
        conflicts: Sequence[Mapping[str, object]] = (),
        can_run: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__(headline, problems)
        self.conflicts = tuple(conflicts)
        self.can_run = tuple(can_run)


class PluginLoadError(AscendRunError):
    """A plugin failed to import, or was written for another version of the API."""


class UnknownFields(TypeError):
    """A manifest has fields that this API does not have, as those of a newer API.

    Args:
        unknown: Their names.
        known: The names of all fields.
    """

    def __init__(self, unknown: Iterable[str], known: Collection[str]) -> None:
        shown = []
        for name in sorted(unknown):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            shown.append(f"{name} (did you mean {near[0]}?)" if near else name)
        super().__init__(f"unknown field(s) {', '.join(shown)} in its manifest")


class HookError(AscendRunError):
    """A plugin's hook returned a value that the hook's contract forbids."""


class DataError(AscendRunError):
    """A dataset or tokenizer is missing, corrupt, of another format, or does not match."""


class CheckpointError(AscendRunError):
    """A checkpoint is missing, corrupt, or was written by an incompatible run."""


class StorageError(AscendRunError):
    """Writing to the file system failed: full, read-only, or permission denied."""


class PlatformError(AscendRunError):
    """The machine lacks the platform's device or libraries, or an operation is not supported."""


class RankFailure(AscendRunError):
    """A rank failed; carries the message of the first one that did."""

    exit_code: ClassVar[int] = 1  #: Of the command.
