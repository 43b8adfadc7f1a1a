"""Typed base class of custom autograd Functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch


class Function(torch.autograd.Function):
    """Base class of the custom autograd Functions; behaves like ``torch.autograd.Function``."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            """Return the output of ``forward``; torch leaves ``apply`` unannotated."""
