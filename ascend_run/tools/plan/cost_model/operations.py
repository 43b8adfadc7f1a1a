"""Number of operations per step and rank. Each has an overhead, which is exposed in small models.

Counted at torch's dispatcher, including views, for the tiny models of the testing kit and the loop
over experts; approximate for other layers.
"""

from __future__ import annotations

from .sizes import Sizes

_LAYER = 192
"""Forward and backward of a dense layer."""
_KEY_LATENT = 60
"""Additional operations with latent attention, and again with a query latent."""
_QUERY_LATENT = 35
_ROUTING = 95
"""Additional operations of a layer with experts, besides those of each expert."""
_EXPERT = 40
_ENDS = 88
"""Embedding, final norm and loss."""
_UPDATE = 30


def step_operations(sizes: Sizes, *, dense: int, moe: int) -> float:
    """Return the number of operations in a step, over all micro-batches.

    Args:
        dense: Number of the rank's layers without experts.
        moe: Number of its layers with experts.
    """
    every = _LAYER + _KEY_LATENT * bool(sizes.key_latent) + _QUERY_LATENT * bool(sizes.query_latent)
    layers = dense * every + moe * (every + _ROUTING + _EXPERT * sizes.experts)
    return sizes.num_microbatches * (layers + _ENDS) + _UPDATE
