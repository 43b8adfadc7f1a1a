"""What a hook for saved tensors may keep of a tensor."""

from __future__ import annotations

from torch import Tensor


def without_graph(tensor: Tensor) -> Tensor:
    """Return the tensor, or an alias that does not refer to the node which computed it.

    A node that saves its own output would refer to itself, through C++, where Python's garbage
    collector does not look: a graph that has no backward would never be freed.
    """
    return tensor if tensor.is_leaf else tensor.detach()
