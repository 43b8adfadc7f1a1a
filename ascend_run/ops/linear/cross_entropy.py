"""Cross-entropy, summed over tokens or of each one, vocabulary-parallel, in the input's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from .linear_cross_entropy import linear_cross_entropy, vocab_cross_entropy
from .token_log_probabilities import token_log_probabilities, vocab_log_probabilities
from .wide_matmul import Matmul

if TYPE_CHECKING:
    from torch import distributed as dist

Reduction: TypeAlias = Literal["sum", "none"]
"""``sum``: masked losses' sum, a scalar. ``none``: every token's loss [B, S], 0 where the mask is 0
and not multiplied by it elsewhere."""


class CrossEntropy:
    """Next-token cross-entropy, as a sum or of each token; the mean is taken once, over all ranks.

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
        reduction: Reduction = "sum",
    ) -> Tensor:
        """Return the loss without materializing all logits; without reduction, those of masked
        tokens are not computed, and of labels [B, S, K] only those of the selected tokens are
        returned, [P, K], in the order of the positions.

        Used if the output layer is a plain matmul.
        """
        hidden_TH = hidden_SBH.flatten(0, 1)
        labels_T, mask_T = labels_BS.transpose(0, 1).flatten(0, 1), loss_mask_BS.t().flatten()
        if reduction == "sum":
            return linear_cross_entropy(
                hidden_TH,
                weight_VH,
                labels_T,
                mask_T,
                tp_group=self.tp_group,
                matmul=self.matmul,
                softcap=self.softcap,
                bias_V=bias_V,
                chunk_bytes=self.chunk_bytes,
            )
        rows = mask_T.gt(0).nonzero().squeeze(1)  # a device sync
        labels = labels_T[rows]
        repeated = rows if labels.dim() == 1 else rows.repeat_interleave(labels.shape[1])
        losses = -token_log_probabilities(
            hidden_TH.index_select(0, repeated),
            weight_VH,
            labels.flatten(),
            tp_group=self.tp_group,
            matmul=self.matmul,
            softcap=self.softcap,
            bias_V=bias_V,
            chunk_bytes=self.chunk_bytes,
        )
        if labels.dim() == 2:
            return losses.view(labels.shape)
        losses_T = losses.new_zeros(labels_T.shape).index_copy(0, rows, losses)
        return losses_T.view(labels_BS.t().shape).t()

    def from_logits(
        self,
        logits_SBV: Tensor,
        labels_BS: Tensor,
        loss_mask_BS: Tensor,
        *,
        reduction: Reduction = "sum",
    ) -> Tensor:
        """Return the same loss from logits; used if a plugin wraps the output layer."""
        logits_TV, mask_T = logits_SBV.flatten(0, 1), loss_mask_BS.t().flatten()
        labels_T = labels_BS.transpose(0, 1).flatten(0, 1)
        if labels_T.dim() == 2:
            columns = [
                -vocab_log_probabilities(logits_TV, one_T, tp_group=self.tp_group)[mask_T > 0]
                for one_T in labels_T.unbind(1)
            ]
            return torch.stack(columns, 1)
        if reduction == "sum":
            return vocab_cross_entropy(logits_TV, labels_T, mask_T, tp_group=self.tp_group)
        values_T = vocab_log_probabilities(logits_TV, labels_T, tp_group=self.tp_group)
        losses_BS = -values_T.view(labels_BS.t().shape).t()
        return losses_BS.masked_fill(loss_mask_BS <= 0, 0)
