"""The names that a module offers to import."""

from __future__ import annotations

from types import ModuleType


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a package that only re-exports, sorted; no modules."""
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    )
