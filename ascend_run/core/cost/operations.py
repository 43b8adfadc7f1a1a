"""How many operations a rank asks its device for in a step: each takes some time beside its
arithmetic, which shows in a small model where nothing hides it.

Counted at torch's dispatcher, views included, for the tiny models of the testing kit and the plain
loop over experts; other layers have some more or less.
"""

from __future__ import annotations

from .sizes import Sizes

_LAYER = 192
"""Forward and backward of a dense layer."""
_KEY_LATENT = 60
"""More than that with latent attention; and for a latent of queries."""
_QUERY_LATENT = 35
_ROUTING = 50
"""More than that in a layer with experts, beside what each expert has."""
_EXPERT = 40
_ENDS = 88
"""Embedding, final norm and loss."""
_UPDATE = 30


def step_operations(sizes: Sizes, *, dense: int, moe: int) -> float:
    """Of all micro-batches of a step.

    Args:
        dense: Layers without experts that the rank holds.
        moe: Those with experts.
    """
    every = _LAYER + _KEY_LATENT * bool(sizes.key_latent) + _QUERY_LATENT * bool(sizes.query_latent)
    layers = dense * every + moe * (every + _ROUTING + _EXPERT * sizes.experts)
    return sizes.num_micro_batches * (layers + _ENDS) + _UPDATE
