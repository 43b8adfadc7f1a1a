"""One forward over tokens of several sequences, flattened to one row."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

# T tokens of a step, R rows whose logits are wanted


@attrs.frozen
class StepPart:
    """Consecutive tokens of one sequence in a step."""

    sequence: int  #: Its key in the cache.
    start: int  #: Position of the first one. Unit: tokens.
    first: int  #: Index of the first one in the step's row.
    count: int
    length: int = attrs.field()
    """Tokens of its text by which a RoPE scaling chooses angles; default: up to the last one."""

    @length.default
    def _to_its_end(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        """Its tokens in the step's row."""
        return slice(self.first, self.first + self.count)


@attrs.frozen(kw_only=True)
class Chunk:
    """Tokens of one sequence that are to be computed."""

    sequence: int  #: Its key in the cache.
    start: int  #: Position of the first one. Unit: tokens.
    ids: Sequence[int]
    num_logits: int  #: Number of last tokens whose logits are wanted.
    length: int = attrs.field()
    """Tokens of its text so far, with those of later chunks; default: up to the last one."""

    @length.default
    def _to_its_end(self) -> int:
        return self.start + len(self.ids)


@attrs.frozen(eq=False)
class Step:
    """The input of one forward."""

    tokens_T: Tensor  #: int64.
    positions_T: Tensor  #: int64.
    parts: tuple[StepPart, ...]
    rows_R: Tensor  #: int64; indices into T.

    @classmethod
    def of(cls, chunks: Sequence[Chunk], device: torch.device | str = "cpu") -> Step:
        """Join chunks to one row.

        Raises:
            ValueError: There is no token, or a sequence comes twice.
        """
        if not chunks or not all(len(chunk.ids) for chunk in chunks):
            raise ValueError("a step needs at least one token of each of its sequences")
        if len({chunk.sequence for chunk in chunks}) < len(chunks):
            raise ValueError("a sequence comes twice in one step")
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        parts = []
        for chunk in chunks:
            count = len(chunk.ids)
            parts.append(StepPart(chunk.sequence, chunk.start, len(tokens), count, chunk.length))
            tokens += chunk.ids
            positions += range(chunk.start, chunk.start + count)
            rows += range(len(tokens) - chunk.num_logits, len(tokens))
        tokens_T, positions_T, rows_R = (
            torch.tensor(values, dtype=torch.int64, device=device)
            for values in (tokens, positions, rows)
        )
        return cls(tokens_T, positions_T, tuple(parts), rows_R)
