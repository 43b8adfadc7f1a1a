"""Load: fill each rank's tensors from the stored shards that overlap them."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_run.core.file_ranges import read_range
from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import ShardPiece

from .boxes import Box
from .integrity import checked_header
from .manifest import Manifest, StoredPiece
from .ranks import Ranks, together
from .shard_file import DTYPE_NAMES, HeaderEntry, open_shard, piece_box


def check_fit(
    ranks: Ranks,
    headline: str,
    manifest: Manifest,
    pieces: Sequence[ShardPiece],
    ignore_unused: Sequence[str],
) -> None:
    """Check that a checkpoint holds exactly what the ranks request.

    Args:
        ignore_unused: Patterns (``rng/*``) of keys that need not be read.

    Raises:
        CheckpointError: Keys are missing, shapes or dtypes differ, or keys would be left unread.
            Lists the first 20 problems over all ranks.
    """
    results = together(ranks, headline, lambda: _fit(manifest, pieces))

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


def _fit(manifest: Manifest, pieces: Sequence[ShardPiece]) -> list[str]:
    problems = []
    for piece in pieces:
        stored = manifest.tensors.get(piece.key)
        if stored is None:
            problems.append(f"{piece.key}: the checkpoint does not have it")
            continue
        if stored.global_shape != tuple(piece.global_shape):
            problems.append(
                f"{piece.key}: the checkpoint has shape {list(stored.global_shape)}, "
                f"this run {list(piece.global_shape)}"
            )
        if stored.dtype != DTYPE_NAMES.get(piece.tensor.dtype):
            problems.append(
                f"{piece.key}: the checkpoint has dtype {stored.dtype}, this run "
                f"{DTYPE_NAMES.get(piece.tensor.dtype, piece.tensor.dtype)}"
            )
    if problems:
        headline = "the checkpoint does not match this run"
        raise CheckpointError(headline, list(dict.fromkeys(problems)))
    return [piece.key for piece in pieces]


def fill(path: str, manifest: Manifest, pieces: Sequence[ShardPiece]) -> None:
    """Copy the stored elements into the shards' tensors in place, file by file.

    Raises:
        CheckpointError: A file cannot be read, or differs from the saved one.
    """
    by_file: dict[str, list[tuple[ShardPiece, StoredPiece, Box]]] = {}
    for piece in pieces:
        target = piece_box(piece)
        for stored in manifest.tensors[piece.key].pieces:
            if (shared := target.intersect(stored.box)) is not None:
                by_file.setdefault(stored.file, []).append((piece, stored, shared))
    for name in sorted(by_file):
        try:
            with open_shard(os.path.join(path, name)) as descriptor:
                entries = checked_header(manifest, name, descriptor)
                for piece, stored, shared in by_file[name]:
                    part = _read_box(
                        descriptor, entries[stored.name], stored.box, shared, piece.tensor.dtype
                    )
                    with torch.no_grad():
                        piece.tensor[shared.slices_in(piece_box(piece))].copy_(part)
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
