"""Checkpoints: what is saved, and where it is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointEntry(Protocol):
    """State that is saved and restored with a run: tensors and JSON values."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return name -> tensor or JSON value; called on every rank, for each checkpoint."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, on every rank, before the first step."""
        ...


@attrs.frozen(kw_only=True)
class TensorShard:
    """This rank's shard of one global tensor."""

    key: str  #: Name in the checkpoint: ``model/...``.
    tensor: Tensor  #: [shard]: written from, loaded into.
    global_shape: tuple[int, ...]  #: Of the whole tensor.
    offset: tuple[int, ...]  #: First index of the shard, per axis.
    writes: bool = True  #: Exactly one of the ranks that hold the same shard writes it.
    read: Callable[[], Tensor] | None = None
    """If given, ``tensor`` is on the device ``meta``, and this returns it when it is written."""


class CheckpointStore(Protocol):
    """Storage of checkpoints. Every method is called on all ranks."""

    def steps(self) -> Sequence[int]:
        """Steps of the published checkpoints, oldest first."""
        ...

    def save(self, step: int, shards: Sequence[TensorShard], values: Mapping[str, Any]) -> str:
        """Write a checkpoint to a temporary folder, verify it and publish it.

        Args:
            values: JSON values, the same on every rank.

        Returns:
            Path of the published checkpoint.
        """
        ...

    def verify(self, step: int) -> None:
        """Check the integrity of a checkpoint.

        Raises:
            CheckpointError: It is corrupt; names the file and the tensor.
        """
        ...

    def layout(self, step: int) -> Mapping[str, int]:
        """Parallel sizes of the run that wrote a checkpoint, and its ``world_size``."""
        ...

    def load(
        self, step: int, shards: Sequence[TensorShard], *, ignore_unused: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Load tensors in place, resharding if another layout wrote them.

        Args:
            ignore_unused: Patterns (``rng/*``) of keys that may stay unread; any other key that no
                rank reads is an error.

        Returns:
            The JSON values.
        """
        ...
