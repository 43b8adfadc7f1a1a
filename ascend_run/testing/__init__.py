"""The conformance kit: tests for built-in and third-party plugins.

``run`` trains a tiny model as a user does and returns what it logged and saved; ``parity`` compares
a run with and without a plugin; ``pool`` runs functions on gloo ranks that live for the whole test
session. Importing this package imports no torch; pytest loads ``pytest_plugin``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .training_run import TrainingRun, run

__all__ = ["TrainingRun", "run"]


def __getattr__(name: str) -> object:
    """Import the public names when they are used: pytest imports this package in every project."""
    if name in __all__:
        return getattr(importlib.import_module("ascend_run.testing.training_run"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
