"""Run transformers with the rule for ties of ascend-run's routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK: Final = (torch.topk, Tensor.topk)


class TiesByIndex(TorchFunctionMode):
    """Within it, ``topk`` selects those of lower index of equal entries.

    torch selects any of them, and transformers what torch selects. Of entries that are not equal it
    selects what it selects anyway. ``max`` and ``argmax`` have this rule already.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _TOPK:
            function = _stable_topk
        return function(*args, **(kwargs or {}))


def _stable_topk(
    input: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> Any:
    """Return what ``torch.topk`` returns, by its names of arguments; always sorted."""
    values, indices = input.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
