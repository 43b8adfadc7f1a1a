"""Read a checkpoint of a test's run as full tensors. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ascend_run.core.checkpoint import FileStore
from ascend_run.core.checkpoint.folders import published
from ascend_run.core.checkpoint.loading import fill
from ascend_run.core.checkpoint.shard_file import DTYPE_NAMES
from ascend_run.plugin_api.contracts import TensorShard

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@attrs.frozen(kw_only=True)
class SavedCheckpoint:
    """One checkpoint of a run."""

    step: int  #: Completed optimizer steps.
    path: Path
    """Its folder."""
    tensors: Mapping[str, Tensor] = attrs.field(repr=False)
    """Full (unsharded) tensors by key: ``model/...``, ``optimizer/...``, ``rng/...`` and the keys
    of plugins, as ``ascend_checkpoint_entries`` returns them."""
    values: Mapping[str, Any] = attrs.field(repr=False)
    """JSON values by key, of the run and of plugins."""

    def differences(self, other: SavedCheckpoint) -> list[str]:
        """Compare with another checkpoint bitwise.

        Returns:
            One message for each tensor or value that differs; empty if they are equal.
        """
        return [*self._differences(other)]

    def _differences(self, other: SavedCheckpoint) -> Iterator[str]:
        for what in ("tensors", "values"):
            mine, its = getattr(self, what), getattr(other, what)
            for key in sorted({*mine, *its}):
                if key not in mine or key not in its:
                    yield f"{key} is in only one of the checkpoints"
                elif not _is_equal(mine[key], its[key]):
                    yield f"{key} differs"


def read_checkpoint(folder: Path, step: int) -> SavedCheckpoint:
    """Verify and read one checkpoint.

    Args:
        folder: Folder of the checkpoints.

    Raises:
        CheckpointError: It is missing, with the steps that there are, or it is corrupt.
    """
    store = FileStore(folder)
    store.verify(step)
    manifest = store.manifest(step)
    path = published(store.folder)[step]
    tensors = {
        key: torch.empty(stored.global_shape, dtype=_DTYPES[stored.dtype])
        for key, stored in manifest.tensors.items()
    }
    shards = [
        TensorShard(
            key=key,
            tensor=tensor,
            global_shape=tuple(tensor.shape),
            offset=(0,) * tensor.dim(),
        )
        for key, tensor in tensors.items()
    ]
    fill(path, manifest, shards)
    return SavedCheckpoint(step=step, path=Path(path), tensors=tensors, values=manifest.values)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
