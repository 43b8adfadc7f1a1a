"""Keys and values of sequences, in pages.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4. The pages of a sequence are adjacent here, so
that attention reads them in place.
"""

from __future__ import annotations

from bisect import insort

import attrs
from torch import Tensor

from .step import StepPart

# P tokens of all pages, T tokens of a part, L tokens of one sequence, G key-value heads, D width of
# k, E width of v


class CacheFull(Exception):
    """No pages are left for a sequence; the message has the tokens asked for and those free."""


@attrs.frozen
class _Pool:
    """Pages of one layer: heads first, so that a head's keys are adjacent."""

    k_GPD: Tensor
    v_GPE: Tensor
    stored: dict[int, int] = attrs.field(factory=dict)
    """Tokens stored of each sequence."""

    @property
    def token_bytes(self) -> int:
        return sum(pool.nbytes // pool.shape[1] for pool in (self.k_GPD, self.v_GPE))


class KeyValueCache:
    """Pages of all layers; a sequence has the same pages in each layer.

    Memory of a layer is allocated at the first append to it, with the heads, widths and dtype found
    there.

    Args:
        num_tokens: Capacity, rounded up to pages.
        page_size: Unit: tokens.
    """

    def __init__(self, num_tokens: int, page_size: int = 16) -> None:
        self.page_size = page_size
        self.num_pages = -(-num_tokens // page_size)
        self._free = [(0, self.num_pages)]  # Runs of pages, sorted, never adjacent.
        self._runs: dict[int, tuple[int, int]] = {}
        self._pools: dict[int, _Pool] = {}

    def reserve(self, sequence: int, num_tokens: int) -> None:
        """Reserve pages for so many tokens of a new sequence: the first run that is long enough.

        Raises:
            CacheFull: No run of free pages is long enough.
            ValueError: The sequence has pages already, or ``num_tokens`` is below 1.
        """
        if sequence in self._runs or num_tokens < 1:
            raise ValueError(f"sequence {sequence}: {num_tokens} tokens, or it has pages already")
        count = -(-num_tokens // self.page_size)
        for index, (start, end) in enumerate(self._free):
            if end - start < count:
                continue
            rest = (start + count, end)
            self._free[index : index + 1] = [rest] if rest[0] < end else []
            self._runs[sequence] = (start, start + count)
            return
        raise CacheFull(
            f"{num_tokens} tokens need {count} adjacent pages of {self.page_size} tokens, and of "
            f"{self.num_pages * self.page_size} tokens {self.free_tokens} are free"
        )

    def append(
        self, layer_index: int, part: StepPart, k_TGD: Tensor, v_TGE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the part's tokens.

        Returns:
            Keys [L, G, D] and values [L, G, E] of its sequence up to and with them: views.

        Raises:
            ValueError: They do not fit into the pages of the sequence, or positions are left out.
        """
        pool = self._pool(layer_index, k_TGD, v_TGE)
        first, last = (page * self.page_size for page in self._runs.get(part.sequence, (0, 0)))
        end = part.start + part.count
        stored = pool.stored.get(part.sequence, 0)
        if part.start != stored or first + end > last:
            raise ValueError(
                f"layer {layer_index}, sequence {part.sequence}: tokens {part.start} to {end} do "
                f"not follow the {stored} stored ones within the {last - first} reserved"
            )
        pool.k_GPD[:, first + part.start : first + end] = k_TGD.transpose(0, 1)
        pool.v_GPE[:, first + part.start : first + end] = v_TGE.transpose(0, 1)
        pool.stored[part.sequence] = end
        k_GLD, v_GLE = (held[:, first : first + end] for held in (pool.k_GPD, pool.v_GPE))
        return k_GLD.transpose(0, 1), v_GLE.transpose(0, 1)

    def release(self, sequence: int) -> None:
        """Free the pages of a sequence; its tokens are forgotten."""
        insort(self._free, self._runs.pop(sequence))
        merged: list[tuple[int, int]] = []
        for start, end in self._free:
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, end))
        self._free = merged
        for pool in self._pools.values():
            pool.stored.pop(sequence, None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the reserved pages in all layers: reserved tokens times the sum over layers of
        ``G * (D + E) * itemsize``."""
        tokens = self.num_pages * self.page_size - self.free_tokens
        return tokens * sum(pool.token_bytes for pool in self._pools.values())

    @property
    def free_tokens(self) -> int:
        """Tokens of the free pages, adjacent or not."""
        return self.page_size * sum(end - start for start, end in self._free)

    def _pool(self, layer_index: int, k_TGD: Tensor, v_TGE: Tensor) -> _Pool:
        if (pool := self._pools.get(layer_index)) is None:
            num_tokens = self.num_pages * self.page_size
            pool = self._pools[layer_index] = _Pool(
                k_TGD.new_empty(k_TGD.shape[1], num_tokens, k_TGD.shape[2]),
                v_TGE.new_empty(v_TGE.shape[1], num_tokens, v_TGE.shape[2]),
            )
        return pool
