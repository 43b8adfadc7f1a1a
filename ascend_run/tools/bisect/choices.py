"""What a search chooses from, and what it found for a set of choices. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Protocol

import attrs

ENABLED: Final = "enabled"
NOT_ENABLED: Final = "not enabled"
"""Values of a choice of a plugin."""


class Kind(StrEnum):
    """What a choice changes in a run."""

    PLUGIN = "plugin"
    SETTING = "setting"
    LAYOUT = "layout axis"


@attrs.frozen(kw_only=True)
class Choice:
    """One change that may make a run diverge."""

    kind: Kind
    name: str
    """Plugin, config key, or axis."""
    values: tuple[str, str]
    """Without the change, and with it."""


class State(StrEnum):
    """Result of a comparison."""

    DIVERGES = "DIVERGES"
    AGREES = "agrees"
    CANNOT_RUN = "cannot run"


@attrs.frozen(kw_only=True)
class Compared:
    """A set of changes, and how the run with them compares with the run without."""

    changes: tuple[str, ...]
    """Names of choices."""
    state: State
    where: str = ""
    """Where it diverges, as in the verdict of ``verify``."""
    step: int | None = None
    """The first step in which it diverges, from 1."""
    why: str = ""
    """Why it diverges, or cannot run."""


class Compares(Protocol):
    """Compares sets of choices, given by their names."""

    @property
    def choices(self) -> Sequence[Choice]:
        """The choices to search, each after those that it needs."""

    def with_needed(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return these choices, and those without which they cannot run."""

    def __call__(self, names: Sequence[str]) -> Compared:
        """Compare the run with these choices.

        Raises:
            NoVerdict: A run failed.
        """
