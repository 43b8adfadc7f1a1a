"""A head of scores at few positions of a sequence, in place of an output layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_run.ops.tensor_marks import mark

# S sequence, B micro-batch, T = S * B, P selected positions, H hidden size, K labels


class ScoreHead(nn.Module):
    """A linear without bias from the hidden state to scores.

    Args:
        num_labels: Scores of a position.
    """

    def __init__(self, hidden_size: int, num_labels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((num_labels, hidden_size), dtype=dtype))
        # As Megatron marks the output layer, for a learning rate of its own.
        mark(self.weight, is_embedding_or_output_parameter=True)

    def forward(self, hidden_SBH: Tensor, mask_BS: Tensor | None) -> Tensor:
        """Return the scores where the mask is above 0, [P, K], in the order of the positions; those
        of one position in the order of the rows.

        Args:
            mask_BS: None selects all positions.

        Numerics: in float32, or float64 for a model in float64.
        """
        hidden_PH = hidden_SBH.flatten(0, 1)
        if mask_BS is not None:
            selected = mask_BS.t().flatten().gt(0).nonzero().squeeze(1)  # a device sync
            hidden_PH = hidden_PH.index_select(0, selected)
        wide = torch.promote_types(hidden_PH.dtype, torch.float32)
        return F.linear(hidden_PH.to(wide), self.weight.to(wide))
