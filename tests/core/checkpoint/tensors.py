"""Global tensors with known numbers, and shards of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ascend_run.core.checkpoint import FileStore
from ascend_run.plugin_api import TensorShard


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    """0, 1, 2 ... in row-major order."""
    return torch.arange(start, start + math.prod(shape), dtype=dtype).reshape(shape)


def full_shard(key: str, tensor: Tensor) -> TensorShard:
    return TensorShard(
        key=key, tensor=tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.ndim
    )


def part(
    key: str, tensor: Tensor, offset: Sequence[int], shape: Sequence[int], *, writes: bool = True
) -> TensorShard:
    """A copy of a box of a global tensor, as a rank that holds it would have it."""
    index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    return TensorShard(
        key=key,
        tensor=tensor[index].clone(),
        global_shape=tuple(tensor.shape),
        offset=tuple(offset),
        writes=writes,
    )


def rows(key: str, tensor: Tensor, rank: int, size: int) -> TensorShard:
    """The rows of one of ``size`` ranks."""
    each = tensor.shape[0] // size
    return part(key, tensor, (rank * each, 0), (each, *tensor.shape[1:]))


def blank(shard: TensorShard) -> TensorShard:
    """The same place, with other numbers in it."""
    return TensorShard(
        key=shard.key,
        tensor=torch.zeros_like(shard.tensor).fill_(7),
        global_shape=shard.global_shape,
        offset=shard.offset,
    )


def save_two_tensors(folder: Path, step: int, *, keep_last: int = 0) -> dict[str, Tensor]:
    """A small checkpoint whose numbers depend on the step; the tensors by key."""
    tensors = {
        "model/a": numbers(8, 6, start=step),
        "model/b": numbers(5, dtype=torch.int64, start=step),
    }
    shards = [full_shard(key, tensor) for key, tensor in tensors.items()]
    FileStore(folder, keep_last=keep_last).save(step, shards, {"step": step})
    return tensors


def load_two_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    shards = [
        full_shard("model/a", torch.zeros(8, 6)),
        full_shard("model/b", torch.zeros(5, dtype=torch.int64)),
    ]
    FileStore(folder).load(step, shards)
    return {shard.key: shard.tensor for shard in shards}
