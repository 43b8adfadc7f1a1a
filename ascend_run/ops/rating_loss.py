"""The loss of ratings among a few tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# P rated positions, K ratings


def rating_loss(values_PK: Tensor, ratings_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each rating among the K, [P], and whether it has the largest
    value.

    Args:
        values_PK: Logits of the ratings' tokens, or their log-probabilities in the vocabulary: the
            two differ by the same number for all ratings of a position, which the softmax drops.
        ratings_P: Index of the right rating, int64.
    """
    loss_P = F.cross_entropy(values_PK, ratings_P, reduction="none")
    return loss_P, torch.eq(values_PK.argmax(1), ratings_P)
