"""Losses of pairs of answers."""

from __future__ import annotations

from typing import Final

import attrs
import torch.nn.functional as F
from torch import Tensor

# P pairs

LOSSES: Final = ("sigmoid", "robust", "hinge", "ipo")
REWARDS: Final = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
METRICS: Final = (
    *REWARDS,
    "logps/chosen",
    "logps/rejected",
    "lengths/chosen",
    "lengths/rejected",
)
"""Names as in trl."""


@attrs.frozen(kw_only=True)
class Answers:
    """A value of the chosen and of the rejected answer of each pair."""

    chosen_P: Tensor
    rejected_P: Tensor

    @classmethod
    def of_documents(cls, values_D: Tensor) -> Answers:
        """Split the values of documents, which are chosen and rejected in turn."""
        return cls(chosen_P=values_D[0::2], rejected_P=values_D[1::2])

    def __truediv__(self, other: Answers) -> Answers:
        return Answers(
            chosen_P=self.chosen_P / other.chosen_P, rejected_P=self.rejected_P / other.rejected_P
        )

    def scaled(self, factor: float) -> Answers:
        """Return both, multiplied."""
        return Answers(chosen_P=factor * self.chosen_P, rejected_P=factor * self.rejected_P)

    @property
    def margin_P(self) -> Tensor:
        """Chosen less rejected."""
        return self.chosen_P - self.rejected_P


def preference_loss(kind: str, margin_P: Tensor, *, beta: float, smoothing: float = 0.0) -> Tensor:
    """Return the loss of each pair, [P].

    With the margin ``z``, the smoothing ``e`` and ``s`` the logarithm of the sigmoid:

    - ``sigmoid``: ``-(1 - e) s(beta z) - e s(-beta z)``; without smoothing, Rafailov et al. 2023,
      arXiv:2305.18290, equation 7.
    - ``robust``: ``(-(1 - e) s(beta z) + e s(-beta z)) / (1 - 2 e)``, unbiased if a share ``e`` of
      the pairs is swapped. Chowdhury et al. 2024, arXiv:2403.00409.
    - ``hinge``: ``max(0, 1 - beta z)``. Liu et al. 2023, arXiv:2309.06657.
    - ``ipo``: ``(z - 1 / (2 beta))^2``. Azar et al. 2023, arXiv:2310.12036, equation 17.

    Args:
        kind: One of ``LOSSES``.
        margin_P: Of the chosen answer over the rejected one.
    """
    if kind == "hinge":
        return F.relu(1 - beta * margin_P)
    if kind == "ipo":
        return (margin_P - 1 / (2 * beta)) ** 2
    right_P = -F.logsigmoid(beta * margin_P)
    if smoothing == 0.0:
        return right_P
    swapped_P = -F.logsigmoid(-beta * margin_P)
    if kind == "robust":
        return ((1 - smoothing) * right_P - smoothing * swapped_P) / (1 - 2 * smoothing)
    return (1 - smoothing) * right_P + smoothing * swapped_P


def reward_loss(rewards: Answers, *, margin: float = 0.0, centering: float = 0.0) -> Tensor:
    """Return the loss of each pair, [P]: ``-s(c - r - margin) + centering (c + r)^2`` of rewards
    ``c`` of the chosen and ``r`` of the rejected answer; ``s`` is the logarithm of the sigmoid.

    The logarithm is taken at once, so that a large negative difference has a finite loss.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1; Eisenstein et al. 2023,
    arXiv:2312.09244, section 3.1.
    """
    loss_P = -F.logsigmoid(rewards.margin_P - margin)
    if centering == 0.0:
        return loss_P
    return loss_P + centering * (rewards.chosen_P + rewards.rejected_P) ** 2


def reward_metrics(rewards: Answers) -> dict[str, Tensor]:
    """Return the value of each of ``REWARDS`` for each pair, [P]."""
    return {
        "rewards/chosen": rewards.chosen_P,
        "rewards/rejected": rewards.rejected_P,
        "rewards/margins": rewards.margin_P,
        "rewards/accuracies": (rewards.margin_P > 0).double(),
    }


def preference_metrics(*, rewards: Answers, logps: Answers, lengths: Answers) -> dict[str, Tensor]:
    """Return the value of each of ``METRICS`` for each pair, [P]."""
    return {
        **reward_metrics(rewards),
        "logps/chosen": logps.chosen_P,
        "logps/rejected": logps.rejected_P,
        "lengths/chosen": lengths.chosen_P,
        "lengths/rejected": lengths.rejected_P,
    }
