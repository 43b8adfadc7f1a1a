"""The all-to-all token dispatcher that exchanges in chunks, behind the work of the experts.

The experts of a rank are split into chunks of neighbours. All chunks are sent at once; while one is
computed the next ones arrive, and the outputs of those before return. Backward is the mirror image
of it, chunk by chunk from the last, because autograd runs the newest node first: gradients of
outputs arrive, and those of tokens return, while a chunk is differentiated.

Source: the behaviour of MindSpeed's ``--moe-alltoall-overlap-comm``; pipelined all-to-alls, Tutel,
arXiv:2206.03382, section 3.3.
"""

# R rows of this rank's tokens, x experts of this rank, X of all, N chunks, H hidden size

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .all_to_all_dispatcher import AllToAllDispatcher
from .chunk_limits import chunk_sizes
from .expert_slices import slices_of
from .token_copies import Copies


class ChunkedDispatcher(AllToAllDispatcher):
    """A token dispatcher instead of Megatron's, or of another ``AllToAllDispatcher``.

    Rows are sent in the order of chunks, then of ranks, then of experts. From ``token_dispatch`` to
    ``combine_postprocess`` a tuple has those of each chunk.

    Args:
        num_chunks: N, at most the experts of a rank, which are on several.
    """

    def __init__(self, inner: Any, num_chunks: int) -> None:
        super().__init__(inner, overlap=True)
        self.num_chunks = num_chunks
        self.sizes = chunk_sizes(len(self.local_expert_indices), num_chunks)

    def _arrange(self, routing_map: Tensor) -> Copies:
        copies, num_local = super()._arrange(routing_map), len(self.local_expert_indices)
        place_R = copies.choice_R % copies.num_experts % num_local
        chunk_R = ((place_R + 1) * self.num_chunks - 1) // num_local
        return copies.reordered(chunk_R.argsort(stable=True))

    def _send(self, rows_RH: Tensor, probs_R: Tensor) -> Any:
        bounds = pairwise(accumulate(self.sizes, initial=0))
        self.trips = [self._trip(self.received.of(slice(*ends))) for ends in bounds]
        sizes = [sum(trip.sent) for trip in self.trips]
        parts = zip(self.trips, rows_RH.split(sizes), probs_R.split(sizes), strict=True)
        sent = [trip.send(rows, probs) for trip, rows, probs in parts]
        return tuple(zip(*sent, strict=True))

    def compute_experts(self, experts: Any, rows: Sequence[Tensor], probs: Sequence[Tensor]) -> Any:
        """Compute the experts chunk by chunk, as soon as one has arrived, and send it back.

        Args:
            experts: The module of this rank's experts.

        Returns:
            For ``token_combine``: the outputs of each chunk, on their way.
        """
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act()
        weights = slices_of(experts, self.sizes)
        back = []
        for trip, own, *parts in zip(self.trips, weights, rows, probs, strict=True):
            tokens, counts, shares = trip.arrive(*parts)
            out, _ = experts(tokens, counts, shares, own)
            back.append(trip.send_back(trip.leave(out)))
        return tuple(back)

    def _arrive(self, rows: Any, probs: Any) -> tuple[Tensor, Tensor, Tensor]:
        arrived = [
            trip.arrive(*parts) for trip, *parts in zip(self.trips, rows, probs, strict=True)
        ]
        tokens, counts, shares = map(torch.cat, zip(*arrived, strict=True))
        return tokens, counts, shares

    def combine_preprocess(self, rows_QH: Tensor) -> Tensor:
        """Return the experts' outputs as they are, sorted by expert and therefore by chunk."""
        return rows_QH

    def token_combine(self, rows_QH: Any) -> Any:
        """Send the outputs back, unless ``compute_experts`` has."""
        if isinstance(rows_QH, tuple):
            return rows_QH
        parts = rows_QH.split([int(trip.rows.counts_x.sum()) for trip in self.trips])
        pairs = zip(self.trips, parts, strict=True)
        return tuple(trip.send_back(trip.leave(part)) for trip, part in pairs)

    def _come_back(self, rows: Any) -> Tensor:
        pairs = zip(self.trips, rows, strict=True)
        return torch.cat([trip.come_back(part) for trip, part in pairs])
