"""Cross-entropy as a sum, vocabulary-parallel, in the input's own dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ascend_run.ops.linear.linear_cross_entropy import linear_cross_entropy, vocab_cross_entropy


class CrossEntropy:
    """contracts.LossKernel by the shared operators, chunked, fused with the output projection."""

    def __init__(self, tp_group: Any) -> None:
        self.tp_group = tp_group if tp_group.size() > 1 else None

    def from_hidden(
        self, hidden_SBH: Tensor, weight_VH: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor
    ) -> Tensor:
        return linear_cross_entropy(
            hidden_SBH.flatten(0, 1),
            weight_VH,
            labels_BS.t().flatten(),
            loss_mask_BS.t().flatten(),
            tp_group=self.tp_group,
        )

    def from_logits(self, logits_SBV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor) -> Tensor:
        return vocab_cross_entropy(
            logits_SBV.flatten(0, 1),
            labels_BS.t().flatten(),
            loss_mask_BS.t().flatten(),
            tp_group=self.tp_group,
        )
