"""Load: fill each rank's tensors from the stored shards that overlap them."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_run.core.file_ranges import read_range
from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import TensorShard

from .boxes import Box
from .integrity import checked_header
from .manifest import Manifest, StoredShard
from .ranks import Ranks, together
from .shard_file import DTYPE_NAMES, HeaderEntry, open_shard, shard_box


def check_fit(
    ranks: Ranks,
    headline: str,
    manifest: Manifest,
    shards: Sequence[TensorShard],
    ignore_unused: Sequence[str],
) -> None:
    """Check that a checkpoint holds exactly what the ranks request.

    Args:
        ignore_unused: Patterns (``rng/*``) of keys that need not be read.

    Raises:
        CheckpointError: Keys are missing, shapes or dtypes differ, or keys would be left unread.
            Lists the first 20 problems over all ranks.
    """
    results = together(ranks, headline, lambda: _fit(manifest, shards))

    def unused() -> None:
        wanted = {key for keys in results or [] for key in keys}
        left = [
            key
            for key in sorted(set(manifest.tensors) - wanted)
            if not any(fnmatch.fnmatchcase(key, pattern) for pattern in ignore_unused)
        ]
        if left:
            raise CheckpointError(
                headline,
                [f"{key}: in the checkpoint, but not used by this run" for key in left],
            )

    together(ranks, headline, unused if ranks.rank == 0 else lambda: None)


def _fit(manifest: Manifest, shards: Sequence[TensorShard]) -> list[str]:
    problems = []
    for shard in shards:
        stored = manifest.tensors.get(shard.key)
        if stored is None:
            problems.append(f"{shard.key}: the checkpoint does not have it")
            continue
        if stored.global_shape != tuple(shard.global_shape):
            problems.append(
                f"{shard.key}: the checkpoint has shape {list(stored.global_shape)}, "
                f"this run {list(shard.global_shape)}"
            )
        if stored.dtype != DTYPE_NAMES.get(shard.tensor.dtype):
            problems.append(
                f"{shard.key}: the checkpoint has dtype {stored.dtype}, this run "
                f"{DTYPE_NAMES.get(shard.tensor.dtype, shard.tensor.dtype)}"
            )
    if problems:
        headline = "the checkpoint does not match this run"
        raise CheckpointError(headline, list(dict.fromkeys(problems)))
    return [shard.key for shard in shards]


def fill(path: str, manifest: Manifest, shards: Sequence[TensorShard]) -> None:
    """Copy the stored elements into the shards' tensors in place, file by file.

    Raises:
        CheckpointError: A file cannot be read, or differs from the saved one.
    """
    by_file: dict[str, list[tuple[TensorShard, StoredShard, Box]]] = {}
    for shard in shards:
        target = shard_box(shard)
        for stored in manifest.tensors[shard.key].shards:
            if (shared := target.intersect(stored.box)) is not None:
                by_file.setdefault(stored.file, []).append((shard, stored, shared))
    for name in sorted(by_file):
        try:
            with open_shard(os.path.join(path, name)) as descriptor:
                entries = checked_header(manifest, name, descriptor)
                for shard, stored, shared in by_file[name]:
                    part = _read_box(
                        descriptor, entries[stored.name], stored.box, shared, shard.tensor.dtype
                    )
                    with torch.no_grad():
                        shard.tensor[shared.slices_in(shard_box(shard))].copy_(part)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}", [f"{name}: {error.strerror or error}"]
            ) from error
        except (ValueError, EOFError) as error:
            raise CheckpointError(f"cannot read {path}", [str(error)]) from error


def _read_box(
    descriptor: int, entry: HeaderEntry, outer: Box, inner: Box, dtype: torch.dtype
) -> Tensor:
    """Read the box ``inner`` of the stored shard ``outer``, as one contiguous byte range."""
    strides = [1] * len(outer.shape)
    for axis in range(len(outer.shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * outer.shape[axis + 1]
    starts = (mine - its for mine, its in zip(inner.offset, outer.offset, strict=True))
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    span = 1 + sum((n - 1) * stride for n, stride in zip(inner.shape, strides, strict=True))
    buffer = torch.empty(span, dtype=dtype)
    target = buffer.view(torch.uint8).numpy().data
    read_range(descriptor, target, entry.begin + first * dtype.itemsize)
    return torch.as_strided(buffer, inner.shape, strides)
