"""The all-to-all token dispatcher where rows of replicated experts stay on the rank of their token.

The experts are chosen by the counts of this forward, which all ranks have before anything is sent.
"""

# R rows of this rank's tokens: S sent, then N kept; Q rows received, X experts, E expert-parallel
# ranks, H hidden size

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from .all_to_all_dispatcher import AllToAllDispatcher
from .hot_experts import HotExperts, hot_experts
from .hot_replicas import with_replicas
from .token_copies import Copies, inverse_of


class HotDispatcher(AllToAllDispatcher):
    """A token dispatcher instead of Megatron's, or of another ``AllToAllDispatcher``.

    The experts get, after the rows of their own, those that this rank keeps, and counts that are
    marked by ``with_replicas``. It has no expert tensor parallelism.

    Args:
        most: Experts that are replicated; at most those of a rank.
        seen: Is notified of each choice.
    """

    def __init__(self, inner: Any, most: int, seen: Callable[[HotExperts], None]) -> None:
        super().__init__(inner)
        self.most, self.seen = most, seen

    def _copies(self, routing_map: Tensor) -> Copies:
        copies = super()._copies(routing_map)
        sent_EX, rank = self._counts().squeeze(1), self.ep_group.rank()
        hot = hot_experts(sent_EX, self.most)
        self.seen(hot)
        self.hot, self.kept = hot.experts, [0] * len(hot.experts)
        if not self.hot:
            self.received = self._received(sent_EX.unsqueeze(1))
            return copies
        rows = torch.arange(len(copies.token_R), device=routing_map.device)
        rows_X = list(rows.split(sent_EX[rank].tolist()))
        kept_N = []
        sent_EX = sent_EX.clone()  # the counts of the dispatcher stay those of all rows
        for expert in hot.experts:
            owner, empty = expert // len(self.local_expert_indices), rows[:0]
            stay_E = sent_EX[:, expert].clone()
            stay_E[owner] = 0
            sent_EX[:, expert] -= stay_E
            if owner != rank:
                rows_X[expert], empty = empty, rows_X[expert]
            kept_N.append(empty)
        self.kept = [len(kept) for kept in kept_N]
        self.received = self._received(sent_EX.unsqueeze(1))
        order = torch.cat([*rows_X, *kept_N])
        return attrs.evolve(
            copies,
            token_R=copies.token_R[order],
            choice_R=copies.choice_R[order],
            row_TK=inverse_of(order)[copies.row_TK],
        )

    def token_dispatch(self, rows_RH: Tensor, probs_R: Tensor) -> tuple[Tensor, Tensor]:
        """Send the copies whose expert has no replica here."""
        if not self.hot:
            return self._send(rows_RH, probs_R)
        sizes = [sum(self.received.sent), sum(self.kept)]
        (rows, kept_rows), (probs, kept_probs) = rows_RH.split(sizes), probs_R.split(sizes)
        self.kept_here = kept_rows, kept_probs
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
