"""torch's determinism switches, on for the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic_torch(*, fill_uninitialized_memory: bool) -> Iterator[None]:
    """Use deterministic implementations, and raise an error for operations without one.

    All switches are restored on exit, also after an exception.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    wanted: list[tuple[Any, str, bool]] = [
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),  # times kernels and selects the fastest
        (torch.backends.mkldnn, "deterministic", True),
        (torch.utils.deterministic, "fill_uninitialized_memory", fill_uninitialized_memory),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in wanted]
    try:
        torch.use_deterministic_algorithms(True)
        for holder, name, value in wanted:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
