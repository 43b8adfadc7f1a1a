"""Checkpoints: what is saved, and where it lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointEntry(Protocol):
    """Something that is saved and restored with a run, as tensors and JSON values."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@attrs.frozen(kw_only=True)
class ShardPiece:
    """The part of one global tensor that this rank holds and writes."""

    key: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    writes: bool = True
    """Exactly one of the ranks that hold the same part writes it."""


class CheckpointStore(Protocol):
    """Where checkpoints live. Every method is called on all ranks."""

    def steps(self) -> Sequence[int]:
        """Published checkpoints, oldest first."""
        ...

    def save(self, step: int, pieces: Sequence[ShardPiece], values: Mapping[str, Any]) -> str:
        """Write beside, verify, publish; the path of the published checkpoint.

        Args:
            values: JSON values, the same on every rank.
        """
        ...

    def verify(self, step: int) -> None:
        """Raise CheckpointError, naming file and tensor, where a checkpoint is not sound."""
        ...

    def layout(self, step: int) -> Mapping[str, int]:
        """Sizes of the parallel axes of the run that wrote a checkpoint, and ``world_size``."""
        ...

    def load(
        self, step: int, pieces: Sequence[ShardPiece], *, ignore_unused: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Fill the pieces' tensors in place, whatever layout wrote them; the JSON values.

        Args:
            ignore_unused: Patterns (``rng/*``) of keys that may be left unread; any other key that
                no rank asks for is an error.
        """
        ...
