"""Cross-entropy as a sum over tokens, vocabulary-parallel, in the input's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ascend_run.ops.linear.linear_cross_entropy import linear_cross_entropy, vocab_cross_entropy
from ascend_run.ops.linear.wide_matmul import Matmul

if TYPE_CHECKING:
    from torch import distributed as dist


class CrossEntropy:
    """Next-token cross-entropy as a sum; the mean is taken once, over all ranks and batches.

    With tensor parallelism, weight and logits are this rank's shard of the vocabulary, and every
    rank gets the full sum.

    Args:
        softcap: Softcap of the logits that ``from_hidden`` computes.
        chunk_bytes: Logits that ``from_hidden`` holds at a time; None is the device's default.
    """

    def __init__(
        self,
        tp_group: dist.ProcessGroup,
        matmul: Matmul | None = None,
        softcap: float | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self.softcap, self.chunk_bytes = softcap, chunk_bytes
        self.matmul = matmul or torch.mm
        self.tp_group = tp_group if tp_group.size() > 1 else None

    def from_hidden(
        self,
        hidden_SBH: Tensor,
        weight_VH: Tensor,
        labels_BS: Tensor,
        loss_mask_BS: Tensor,
        *,
        bias_V: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of masked losses, a scalar, without materializing all logits.

        Used if the output layer is a plain matmul.
        """
        return linear_cross_entropy(
            hidden_SBH.flatten(0, 1),
            weight_VH,
            labels_BS.t().flatten(),
            loss_mask_BS.t().flatten(),
            tp_group=self.tp_group,
            matmul=self.matmul,
            softcap=self.softcap,
            bias_V=bias_V,
            chunk_bytes=self.chunk_bytes,
        )

    def from_logits(self, logits_SBV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor) -> Tensor:
        """Return the same sum from logits; used if a plugin wraps the output layer."""
        return vocab_cross_entropy(
            logits_SBV.flatten(0, 1),
            labels_BS.t().flatten(),
            loss_mask_BS.t().flatten(),
            tp_group=self.tp_group,
        )
