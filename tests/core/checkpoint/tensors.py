"""Global tensors with known numbers, and pieces of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ascend_run.core.checkpoint import FileStore
from ascend_run.plugin_api import ShardPiece


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    """0, 1, 2 ... in row-major order."""
    return torch.arange(start, start + math.prod(shape), dtype=dtype).reshape(shape)


def whole_piece(key: str, tensor: Tensor) -> ShardPiece:
    return ShardPiece(
        key=key, tensor=tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.ndim
    )


def part(
    key: str, tensor: Tensor, offset: Sequence[int], shape: Sequence[int], *, writes: bool = True
) -> ShardPiece:
    """A copy of a box of a global tensor, as a rank that holds it would have it."""
    index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    return ShardPiece(
        key=key,
        tensor=tensor[index].clone(),
        global_shape=tuple(tensor.shape),
        offset=tuple(offset),
        writes=writes,
    )


def rows(key: str, tensor: Tensor, rank: int, size: int) -> ShardPiece:
    """The rows of one of ``size`` ranks."""
    each = tensor.shape[0] // size
    return part(key, tensor, (rank * each, 0), (each, *tensor.shape[1:]))


def blank(piece: ShardPiece) -> ShardPiece:
    """The same place, with other numbers in it."""
    return ShardPiece(
        key=piece.key,
        tensor=torch.zeros_like(piece.tensor).fill_(7),
        global_shape=piece.global_shape,
        offset=piece.offset,
    )


def save_two_tensors(folder: Path, step: int, *, keep_last: int = 0) -> dict[str, Tensor]:
    """A small checkpoint whose numbers depend on the step; the tensors by key."""
    tensors = {
        "model/a": numbers(8, 6, start=step),
        "model/b": numbers(5, dtype=torch.int64, start=step),
    }
    pieces = [whole_piece(key, tensor) for key, tensor in tensors.items()]
    FileStore(folder, keep_last=keep_last).save(step, pieces, {"step": step})
    return tensors


def load_two_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    pieces = [
        whole_piece("model/a", torch.zeros(8, 6)),
        whole_piece("model/b", torch.zeros(5, dtype=torch.int64)),
    ]
    FileStore(folder).load(step, pieces)
    return {piece.key: piece.tensor for piece in pieces}
