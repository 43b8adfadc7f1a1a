"""Weights with which the router meets cases in which faults hide: ties, experts with all or no
tokens, and scores below 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

_ROUTER: Final = re.compile(r"decoder\.layers\.(\d+)\.mlp\.router\.weight")
_BIAS: Final = re.compile(r".+\.mlp\.router\.expert_bias")
_EMBEDDING: Final = "embedding.word_embeddings.weight"
_CONSTANT: Final = 0.35
"""Of the first hidden number of every token: so large that it stays positive in the first layers,
and so small that tokens still differ."""
_SHARE: Final = 0.5
"""Of the constant in the score of the expert with all tokens."""
_BELOW: Final = -1.0
"""Added to scores between 0 and 1, which makes all of them negative and changes no choice."""


@torch.no_grad()
def set_probe_weights(chunks: Sequence[nn.Module], vocab_size: int) -> None:
    """Change some weights of a model with experts.

    - In layers with an even index, one expert gets all tokens and another one none: their scores
      are a positive and a negative multiple of the first hidden number, which the embedding makes
      positive.
    - In the others, two experts have equal scores for every token. Their rows are equal and have a
      single element that is not zero, so their scores are one product each, whatever the order of
      the sum. For many tokens exactly one of the two is selected.
    - The bias of the choice, if there is one, begins at -1 instead of 0. So every score is below 0,
      and an expert that a token may not choose is found to have no score of 0 either.

    Ties are broken equally in every layout: the selection of a token depends only on the order of
    its own scores, and no rank splits them.

    The values depend on the name and the index in the full tensor, not on the layout. Except for
    the first column, all other weights keep their values, so that a fault of their initialization
    still shows.
    """
    from ascend_run.testing.parameter_shards import parameter_shards

    for shard in parameter_shards(chunks, vocab_size, Tensor.detach):
        change: Callable[[Tensor], None] | None = None
        if shard.name == _EMBEDDING and shard.offset[1] == 0:
            change = _first_column
        elif match := _ROUTER.fullmatch(shard.name):
            change = _two_ties if int(match[1]) % 2 else _all_and_none
        elif _BIAS.fullmatch(shard.name):
            change = _below_zero
        if change is not None:
            assert shard.tensor is not None
            change(shard.tensor)


def _first_column(embedding: Tensor) -> None:
    embedding[:, 0] = _CONSTANT


def _all_and_none(router: Tensor) -> None:
    router[:, 0] = 0.0  # else the constant would decide between the other experts too
    if router.shape[0] >= 3:
        router[[1, -2]] = 0.0
        router[1, 0], router[-2, 0] = -_SHARE, _SHARE


def _two_ties(router: Tensor) -> None:
    router[:, 0] = 0.0
    router[[1, -1]] = 0.0
    router[[1, -1], 1] = _SHARE


def _below_zero(bias: Tensor) -> None:
    bias.fill_(_BELOW)
