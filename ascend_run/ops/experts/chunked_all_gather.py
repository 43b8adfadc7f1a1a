"""The all-gather token dispatcher that exchanges in chunks, behind the work of the experts.

Every rank needs every token, so the chunks are of tokens: neighbours on their rank, the same places
on all ranks. The choices and weights of all tokens are gathered first, and the rows of all chunks
are found meanwhile. While one chunk is computed the next ones arrive, and the sums of those before
are reduce-scattered. Backward is the mirror image of it, chunk by chunk from the last, because
autograd runs the newest node first.

Source: pipelined exchanges, Tutel, arXiv:2206.03382, section 3.3.
"""

# T tokens of this rank, G of all ranks, P ranks, K experts of a token, x experts of this rank, R
# rows of these, N chunks, H hidden size

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .all_gather_dispatcher import AllGatherDispatcher, local_rows, select, sorted_choices
from .chunk_limits import chunk_sizes
from .token_exchange import AllGather, ReduceScatter


class ChunkedGatherDispatcher(AllGatherDispatcher):
    """A token dispatcher instead of Megatron's, for experts on several ranks.

    From ``token_dispatch`` to ``combine_postprocess`` a tuple has the tokens of each chunk.
    ``compute_experts`` stands for the stages in between.

    Args:
        num_chunks: N; a chunk has no tokens if there are fewer.
    """

    def __init__(self, inner: Any, num_chunks: int) -> None:
        super().__init__(inner)
        self.num_chunks = num_chunks

    def token_dispatch(self, tokens_TH: Tensor, weights_TK: Tensor) -> tuple[Any, Tensor]:
        """Gather the experts and weights of all ranks, and the tokens chunk by chunk."""
        weights_GK = self._start_choices(weights_TK)
        self.sizes = chunk_sizes(len(tokens_TH), self.num_chunks)
        self.movings = [AllGather(self.group) for _ in self.sizes]
        parts = zip(self.movings, tokens_TH.split(self.sizes), strict=True)
        return tuple(moving.start(part) for moving, part in parts), weights_GK

    def compute_experts(self, experts: Any, tokens: Sequence[Tensor], weights_GK: Tensor) -> Any:
        """Compute all experts chunk by chunk, as soon as one has arrived, and send it back.

        Args:
            experts: The module of this rank's experts.

        Returns:
            For ``token_combine``: the outputs of each chunk, on their way.
        """
        self.choosing.wait()
        counts_Nx, choice_R, place_R = self._rows_of_chunks()
        sizes, ranks = counts_Nx.sum(dim=1).tolist(), self.group.size()
        places = zip(place_R.split(sizes), self.sizes, strict=True)
        chunks = [local_rows(place, ranks * size) for place, size in places]
        weights_R = select(self.weighting.finish(weights_GK), choice_R)
        self.returnings = [ReduceScatter(self.group) for _ in chunks]
        back = []
        for rows, moving, returning, part, counts_x, own in zip(
            chunks,
            self.movings,
            self.returnings,
            tokens,
            counts_Nx,
            weights_R.split(sizes),
            strict=True,
        ):
            out, _ = experts(rows.permute(moving.finish(part)), counts_x, own)
            self.out_dtype = out.dtype
            back.append(returning.start(rows.unpermute(out.to(weights_R.dtype))))
        return tuple(back)

    def token_combine(self, out: Any) -> Any:
        """Return the outputs as they are; ``compute_experts`` has sent them."""
        return out

    def _come_back(self, out: Any) -> Tensor:
        pairs = zip(self.returnings, out, strict=True)
        sums = torch.cat([returning.finish(part) for returning, part in pairs])
        return sums.to(self.out_dtype)

    def _rows_of_chunks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the counts of each chunk's rows [N, x], on the host; and for each row, sorted by
        chunk, expert and token, the index of its choice in the flattened [G, K], and the place of
        its token among those of its chunk."""
        num_tokens, topk = self.expert_TK.shape
        chunk_G, place_G = self._places(num_tokens)
        expert_R, choice_R = self._local_choices()
        group_R = chunk_G.index_select(0, choice_R // topk) * self.num_local + expert_R
        counts, choice_R = sorted_choices(group_R, choice_R, self.num_chunks * self.num_local)
        place_R = place_G.index_select(0, choice_R // topk)
        return counts.view(self.num_chunks, self.num_local).cpu(), choice_R, place_R

    def _places(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the chunk of each gathered token, and its place there, after all tokens of ranks
        before its own."""
        device, ranks = self.expert_TK.device, self.group.size()
        own_T = torch.arange(num_tokens, device=device)
        chunk_T = ((own_T + 1) * self.num_chunks - 1) // max(num_tokens, 1)
        start_T = chunk_T * num_tokens // self.num_chunks
        size_T = (chunk_T + 1) * num_tokens // self.num_chunks - start_T
        rank_P1 = torch.arange(ranks, device=device)[:, None]
        return chunk_T.repeat(ranks), (rank_P1 * size_T + own_T - start_T).flatten()
