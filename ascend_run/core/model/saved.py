"""Split what an attention kernel saves into tensors and the structure that holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_A_TENSOR: Final = object()


def flatten_saved(record: object) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Flatten a record into its tensors and a function that rebuilds it from tensors.

    Tuples and dicts may be nested. The function holds everything but the tensors.
    """
    leaves, structure = tree_flatten(record)
    rest = [_A_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        return tree_unflatten([next(given) if x is _A_TENSOR else x for x in rest], structure)

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], rebuild
