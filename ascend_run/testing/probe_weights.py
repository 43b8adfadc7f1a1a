"""Weights with which the router meets cases in which faults hide: ties, and experts with all or no
tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

_ROUTER: Final = re.compile(r"decoder\.layers\.(\d+)\.mlp\.router\.weight")
_EMBEDDING: Final = "embedding.word_embeddings.weight"
_CONSTANT: Final = 0.35
"""Of the first hidden number of every token: so large that it stays positive in the first layers,
and so small that tokens still differ."""
_SHARE: Final = 0.5
"""Of the constant in the score of the expert with all tokens."""


@torch.no_grad()
def set_probe_weights(chunks: Sequence[nn.Module], vocab_size: int) -> None:
    """Change some weights of a model with experts.

    - In layers with an even index, one expert gets all tokens and another one none: their scores
      are a positive and a negative multiple of the first hidden number, which the embedding makes
      positive.
    - In the others, two experts have equal scores for every token. Their rows are equal and have a
      single element that is not zero, so their scores are one product each, whatever the order of
      the sum. For many tokens exactly one of the two is selected.

    Ties are broken equally in every layout: the selection of a token depends only on the order of
    its own scores, and no rank splits them.

    The values depend on the name and the index in the full tensor, not on the layout. Except for
    the first column, all other weights keep their values, so that a fault of their initialization
    still shows.
    """
    from ascend_run.core.checkpoint.parameter_shards import parameter_shards

    for shard in parameter_shards(chunks, vocab_size, Tensor.detach):
        change: Callable[[Tensor], None] | None = None
        if shard.name == _EMBEDDING and shard.offset[1] == 0:
            change = _first_column
        elif match := _ROUTER.fullmatch(shard.name):
            change = _two_ties if int(match[1]) % 2 else _all_and_none
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
