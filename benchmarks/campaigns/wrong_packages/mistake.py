"""One plausible mistake in a right package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from .package import Package

INIT: Final = "__init__.py"


@attrs.frozen
class Change:
    """One replacement of text."""

    old: str
    """Stands in the file once."""
    new: str
    file: str = INIT


@attrs.frozen(kw_only=True)
class Mistake:
    """A right package with one mistake."""

    name: str
    what: str
    """What its author did, in one line."""
    package: str
    """The plugin of the right package."""
    changes: tuple[Change, ...]
    checks: tuple[str, ...]
    """The check that is expected to stop it; several if they say the same thing."""
    says: str
    """Part of that check's message."""

    def applied_to(self, packages: Mapping[str, Package]) -> Package:
        """Return the wrong package.

        Raises:
            LookupError: The right one has changed, so that a text to replace is not there once.
        """
        right = packages[self.package]
        files = dict(right.files)
        for change in self.changes:
            count = files[change.file].count(change.old)
            if count != 1:
                raise LookupError(
                    f"{self.name}: {change.old!r} stands in {change.file} {count} times"
                )
            files[change.file] = files[change.file].replace(change.old, change.new)
        return attrs.evolve(right, files=files)
