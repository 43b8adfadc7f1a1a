"""Rows of the facade, and their installation and removal."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any, Final

import attrs

_ABSENT: Final = object()


@attrs.frozen
class Substitute:
    """One name that means something else under the facade.

    Args:
        target: ``module:attribute`` or ``module:Class.attribute``; the module is imported.
        replacement: What the name stands for.
        why: Who needs it.
    """

    target: str
    replacement: Any
    why: str


def locate(target: str) -> tuple[Any, str]:
    """The object that owns a ``module:path`` target, and the attribute's name."""
    module_name, _, path = target.partition(":")
    with warnings.catch_warnings():
        # Megatron warns of accelerator packages that are not installed: on the CPU none is.
        warnings.simplefilter("ignore")
        owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def original(target: str) -> Any:
    """What a target stands for now, for a replacement that wraps it."""
    owner, name = locate(target)
    return getattr(owner, name)


class Substitutions:
    """A table of rows, installed together and removed together."""

    def __init__(self, rows: Sequence[Substitute]) -> None:
        self._rows = rows
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Set every name; on any failure put back what was set and raise.

        All modules are imported before the first name is set: one that was imported half-way
        would bind replacements for good.
        """
        located = [locate(row.target) for row in self._rows]
        try:
            for row, (owner, name) in zip(self._rows, located, strict=True):
                # An inherited attribute is not the owner's own: it is removed, not restored.
                before = vars(owner).get(name, _ABSENT)
                setattr(owner, name, row.replacement)
                self._undo.append((owner, name, before))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Restore the very objects that were there, last first."""
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
