"""The all-to-all token dispatcher where rows of replicated experts stay on the rank of their token.

The experts are chosen by the counts of this forward, which all ranks have before anything is sent.
"""

# R rows of this rank's tokens: S sent, then N kept; Q rows received, X experts, E expert-parallel
# ranks, H hidden size

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .all_to_all_dispatcher import AllToAllDispatcher
from .hot_experts import HotChoice, hot_experts, kept_rows
from .hot_replicas import with_replicas
from .token_copies import Copies


class HotDispatcher(AllToAllDispatcher):
    """A token dispatcher instead of Megatron's, or of another ``AllToAllDispatcher``.

    The experts get, after the rows of their own, those that this rank keeps, and counts that are
    marked by ``with_replicas``. It has no expert tensor parallelism.

    Args:
        most: Experts that are replicated; at most those of a rank.
        seen: Is notified of each choice.
    """

    def __init__(self, inner: Any, most: int, seen: Callable[[HotChoice], None]) -> None:
        super().__init__(inner)
        self.most, self.seen = most, seen

    def _arrange(self, routing_map: Tensor) -> Copies:
        """Choose the experts, which all later stages depend on, and return the copies: those that
        are sent, then those that stay."""
        copies, counts_EX = super()._arrange(routing_map), self._counts().squeeze(1)
        hot, rank = hot_experts(counts_EX, self.most), self.ep_group.rank()
        self.seen(hot)
        self.hot = hot.experts
        if not self.hot:
            return copies
        kept_EX = kept_rows(counts_EX, self.hot)
        self.received = self._received((counts_EX - kept_EX).unsqueeze(1))
        kept_X = kept_EX[rank].tolist()
        self.kept = [kept_X[expert] for expert in self.hot]
        return _kept_last(copies, counts_EX[rank].tolist(), kept_X)

    def token_dispatch(self, rows_RH: Tensor, probs_R: Tensor) -> Any:
        """Send the copies whose expert has no replica here."""
        if not self.hot:
            return super().token_dispatch(rows_RH, probs_R)
        sizes = [sum(self.received.sent), sum(self.kept)]
        (rows, rows_here), (probs, probs_here) = rows_RH.split(sizes), probs_R.split(sizes)
        self.kept_here = rows_here, probs_here
        return self._send(rows, probs)

    def dispatch_postprocess(
        self, rows_RH: Tensor, probs_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of this rank's experts, then those of replicas, and their counts."""
        rows, counts, probs = super().dispatch_postprocess(rows_RH, probs_R)
        if not self.hot:
            return rows, with_replicas(counts, self.hot), probs
        kept_rows, kept_probs = self.kept_here
        del self.kept_here
        counts = torch.cat([counts, counts.new_tensor(self.kept)])
        rows, probs = torch.cat([rows, kept_rows]), torch.cat([probs, kept_probs])
        return rows, with_replicas(counts, self.hot), probs

    def combine_preprocess(self, rows_QH: Tensor) -> Tensor:
        """Return the outputs that are sent back; the others are kept for the sum."""
        if not self.hot:
            return super().combine_preprocess(rows_QH)
        kept = sum(self.kept)
        rows_QH, self.kept_out = rows_QH.split([len(rows_QH) - kept, kept])
        return super().combine_preprocess(rows_QH)

    def _sum(self, rows_RH: Tensor) -> Tensor:
        if not self.hot:
            return super()._sum(rows_RH)
        kept_out = self.kept_out
        del self.kept_out
        return super()._sum(torch.cat([rows_RH, kept_out]))


def _kept_last(copies: Copies, counts_X: Sequence[int], kept_X: Sequence[int]) -> Copies:
    """Return the copies with those of experts whose rows are kept at the end."""
    rows = torch.arange(len(copies.token_R), device=copies.token_R.device)
    rows_X = [*zip(rows.split([*counts_X]), kept_X, strict=True)]
    sent, kept = ([part for part, n in rows_X if bool(n) is stays] for stays in (False, True))
    return copies.reordered(torch.cat([*sent, *kept]))
