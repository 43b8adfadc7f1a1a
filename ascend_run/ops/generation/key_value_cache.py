"""Keys and values of sequences, in pages.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ascend_run.types.attention import CachedKeys

from .page_table import CacheFull, PageTable
from .step import Step, StepPart

__all__ = ["CacheFull", "KeyValueCache"]

# P tokens of all pages, T tokens of a part, L tokens of one sequence, G key-value heads, D width of
# k, E width of v


@attrs.frozen
class _Pool:
    """Pages of one layer: heads first, so that a head's keys are adjacent."""

    k_GPD: Tensor
    v_GPE: Tensor
    stored: dict[int, int] = attrs.field(factory=dict)
    """Tokens stored of each sequence."""

    @property
    def held(self) -> tuple[Tensor, ...]:
        """Tensors with memory of their own."""
        return (self.k_GPD,) if self.v_GPE is self.k_GPD else (self.k_GPD, self.v_GPE)

    def new(self, k_TGD: Tensor, v_TGE: Tensor) -> zip[tuple[Tensor, Tensor]]:
        """Return each tensor of the pool with what is to be written to it."""
        assert (v_TGE is k_TGD) == (self.v_GPE is self.k_GPD), "other values than before"
        return zip(self.held, (k_TGD, v_TGE), strict=False)

    @property
    def token_bytes(self) -> int:
        return sum(held.nbytes // held.shape[1] for held in self.held)


@attrs.frozen(eq=False)
class StepPages:
    """Where the tokens of a step's sequences are in the pages, the same in every layer."""

    parts: tuple[StepPart, ...]
    written_T: Tensor  #: int64; index into P of each token of the step.
    runs: Sequence[Sequence[tuple[int, int]]]  #: See ``CachedKeys``; so below.
    queries: Sequence[tuple[int, int]]
    starts: Sequence[int]


class KeyValueCache:
    """Pages of all layers; a sequence has the same pages in each layer.

    Memory of a layer is allocated at the first append to it, with the heads, widths and dtype found
    there. Keys that are given as the values too, as the same tensor, are stored once.

    Args:
        num_tokens: Capacity, rounded up to pages.
        page_size: Unit: tokens.
    """

    def __init__(self, num_tokens: int, page_size: int = 16) -> None:
        self.page_size = page_size
        self.num_pages = -(-num_tokens // page_size)
        self.pages = PageTable(self.num_pages, page_size)
        self._pools: dict[int, _Pool] = {}

    def reserve(self, sequence: int, num_tokens: int) -> None:
        """Reserve pages for so many tokens of a new sequence.

        Raises:
            CacheFull: There are too few free pages.
            ValueError: The sequence has pages already, or ``num_tokens`` is below 1.
        """
        self.pages.reserve(sequence, num_tokens)

    def grow(self, sequence: int, num_tokens: int) -> None:
        """Reserve more pages for a sequence, if it has too few for so many tokens in all.

        Raises:
            CacheFull: There are too few free pages.
        """
        self.pages.grow(sequence, num_tokens)

    def fork(self, parent: int, child: int, num_tokens: int | None = None) -> None:
        """Begin a new sequence with the tokens of another: both have its full pages, and the last
        tokens are copied.

        Args:
            num_tokens: To reserve pages for, with those tokens; None: as many as the other has.

        Raises:
            CacheFull: There are too few free pages.
        """
        (num_stored,) = {pool.stored.get(parent, 0) for pool in self._pools.values()} or {0}
        self.pages.fork(parent, child, num_stored, num_tokens)
        first = num_stored - num_stored % self.page_size
        sources = self._indices(parent, first, num_stored)
        targets = self._indices(child, first, num_stored)
        for pool in self._pools.values():
            for held in pool.held:
                held[:, targets] = held[:, sources]
            pool.stored[child] = num_stored

    def append(
        self, layer_index: int, part: StepPart, k_TGD: Tensor, v_TGE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the part's tokens.

        Returns:
            Keys [L, G, D] and values [L, G, E] of its sequence up to and with them: views, or
            copies if its pages are not adjacent.

        Raises:
            ValueError: They do not fit into the pages of the sequence, or positions are left out.
        """
        pool = self._pool(layer_index, k_TGD, v_TGE)
        end, reserved = part.start + part.count, self.pages.num_tokens(part.sequence)
        stored = pool.stored.get(part.sequence, 0)
        if part.start != stored or end > reserved:
            raise ValueError(
                f"layer {layer_index}, sequence {part.sequence}: tokens {part.start} to {end} do "
                f"not follow the {stored} stored ones within the {reserved} reserved"
            )
        at = 0
        for low, high in self.pages.tokens(part.sequence, part.start, end):
            rows = slice(at, at := at + high - low)
            for held, new in pool.new(k_TGD, v_TGE):
                held[:, low:high] = new[rows].transpose(0, 1)
        pool.stored[part.sequence] = end
        runs = self.pages.tokens(part.sequence, 0, end)
        k_GLD, v_GLE = (_joined(held, runs) for held in (pool.k_GPD, pool.v_GPE))
        return k_GLD.transpose(0, 1), v_GLE.transpose(0, 1)

    def place(self, step: Step) -> StepPages:
        """Return where a step's tokens are in the pages, for ``write``.

        Raises:
            ValueError: They do not fit into the pages of a sequence.
        """
        written: list[Tensor] = []
        runs = []
        for part in step.parts:
            end, reserved = part.start + part.count, self.pages.num_tokens(part.sequence)
            if end > reserved:
                raise ValueError(
                    f"sequence {part.sequence}: tokens {part.start} to {end} do not fit into the "
                    f"{reserved} reserved"
                )
            device = step.tokens_T.device
            for low, high in self.pages.tokens(part.sequence, part.start, end):
                written.append(torch.arange(low, high, device=device))
            runs.append(self.pages.tokens(part.sequence, 0, end))
        queries = [(part.first, part.first + part.count) for part in step.parts]
        starts = [part.start for part in step.parts]
        return StepPages(step.parts, torch.cat(written), runs, queries, starts)

    def write(self, layer_index: int, pages: StepPages, k_TGD: Tensor, v_TGE: Tensor) -> CachedKeys:
        """Write the tokens of all sequences of a step; return the pages with them.

        Raises:
            ValueError: Positions are left out.
        """
        pool = self._pool(layer_index, k_TGD, v_TGE)
        for part in pages.parts:
            if (stored := pool.stored.get(part.sequence, 0)) != part.start:
                raise ValueError(
                    f"layer {layer_index}, sequence {part.sequence}: tokens from {part.start} on "
                    f"do not follow the {stored} stored ones"
                )
            pool.stored[part.sequence] = part.start + part.count
        for held, new in pool.new(k_TGD, v_TGE):
            held.index_copy_(1, pages.written_T, new.transpose(0, 1))
        return CachedKeys(
            k=pool.k_GPD,
            v=pool.v_GPE,
            runs=pages.runs,
            queries=pages.queries,
            starts=pages.starts,
        )

    def release(self, sequence: int) -> None:
        """Free the pages that no other sequence has; the tokens of this one are forgotten."""
        self.pages.release(sequence)
        self.forget(sequence)

    def forget(self, sequence: int, num_kept: int = 0) -> None:
        """Forget the tokens of a sequence after its first ones; it keeps its pages."""
        for pool in self._pools.values():
            stored = min(pool.stored.pop(sequence, 0), num_kept)
            if stored:
                pool.stored[sequence] = stored

    @property
    def num_bytes(self) -> int:
        """Bytes of the reserved pages in all layers: reserved tokens times the sum over layers of
        ``G * (D + E) * itemsize``, or ``G * D * itemsize`` of keys that are the values too."""
        tokens = self.num_pages * self.page_size - self.free_tokens
        return tokens * sum(pool.token_bytes for pool in self._pools.values())

    @property
    def free_tokens(self) -> int:
        """Tokens of the free pages, adjacent or not."""
        return self.page_size * self.pages.num_free

    def _indices(self, sequence: int, start: int, end: int) -> Tensor:
        runs = self.pages.tokens(sequence, start, end)
        return torch.tensor([index for run in runs for index in range(*run)], dtype=torch.int64)

    def _pool(self, layer_index: int, k_TGD: Tensor, v_TGE: Tensor) -> _Pool:
        if (pool := self._pools.get(layer_index)) is None:
            num_tokens = self.num_pages * self.page_size
            k_GPD = _pages(k_TGD, num_tokens)
            v_GPE = k_GPD if v_TGE is k_TGD else _pages(v_TGE, num_tokens)
            pool = self._pools[layer_index] = _Pool(k_GPD, v_GPE)
        return pool


def _pages(like_TGD: Tensor, num_tokens: int) -> Tensor:
    return like_TGD.new_empty(like_TGD.shape[1], num_tokens, like_TGD.shape[2])


def _joined(held: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    parts = [held[:, low:high] for low, high in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
