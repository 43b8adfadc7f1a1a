"""One call of every operator, with the shapes that the plugin passes, on any device.

One module per kind, each with its ``CALLS``: name -> call on a device. Modules are found
automatically.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch


def _collect() -> dict[str, Callable[[torch.device], Any]]:
    found: dict[str, Callable[[torch.device], Any]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        calls = getattr(module, "CALLS", {})
        assert not found.keys() & calls.keys(), f"{info.name} names a call again"
        found |= calls
    return found


CALLS = _collect()
