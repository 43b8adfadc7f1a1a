"""Locate the sampled elements that this rank owns.

A sample is identified by the global tensor and the position in it, independent of the layout. It is
read from what the optimizer updates: the float32 copy of a half-precision parameter, or this rank's
range of a distributed optimizer. Every element therefore has one owner, and sampling does not wait
for a parameter all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascend_run.core.checkpoint.optimizer_shards import (
    is_distributed,
    owns,
    stepped_parameters,
)
from ascend_run.core.checkpoint.regions import Region, ShardedLocal, sharded_tensors
from ascend_run.ops.hashing import Words, salts, sampled_places
from ascend_run.plugin_api import contracts as c

_WORD: Final[Mapping[int, torch.dtype]] = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
"""Maps an element size in bytes to the integer dtype of the same size."""


@attrs.frozen
class Samples:
    """Sampled elements of one dtype on this rank."""

    readers: tuple[Callable[[Tensor], Tensor], ...]
    """Return a tensor's elements at flat positions, [elements]."""
    indices: tuple[Tensor, ...]  #: Flat positions in each tensor, on its device.
    salt: Words
    """Salts of all elements, in the order of the tensors."""

    def read(self) -> Tensor:
        """Return a copy of the elements, [elements]; asynchronous on the device."""
        parts = zip(self.readers, self.indices, strict=True)
        return torch.cat([read(where) for read, where in parts])


def bits_of(values: Tensor) -> NDArray[Any]:
    """Return the bits of a tensor's elements as integers on the host."""
    bits: NDArray[Any] = values.view(_WORD[values.element_size()]).cpu().numpy()
    return bits


def samples_of(bundle: c.ModelBundle, *, vocab_size: int | None) -> list[Samples]:
    """Return the samples of a trained model, one group per dtype.

    Args:
        vocab_size: See ``sharded_tensors``.

    Raises:
        CheckpointError: The model or its optimizer cannot be mapped to global tensors, so it could
            not be checkpointed either.
    """
    tensors = sharded_tensors(bundle.chunks, vocab_size=vocab_size)
    stepped = {id(item.parameter): item for item in stepped_parameters(bundle.optimizer)}
    shared_out = is_distributed(bundle.optimizer)
    found: dict[torch.dtype, list[tuple[Callable[[Tensor], Tensor], Tensor, Words]]] = {}
    for held in tensors:
        source, flat_range, read = held.tensor, None, None
        if (item := stepped.get(id(held.tensor))) is not None:
            source, flat_range, read = item.stepped, item.flat_range, item.read
        elif shared_out and held.tensor.requires_grad:
            continue  # other ranks hold its optimizer shard
        positions, words = _owned(held, flat_range)
        if positions.size:
            where = torch.from_numpy(positions).to(source.device)
            found.setdefault(source.dtype, []).append(
                (read or partial(_elements, source), where, words)
            )
    return [
        Samples(
            readers=tuple(read for read, _, _ in group),
            indices=tuple(where for _, where, _ in group),
            salt=np.concatenate([words for _, _, words in group]),
        )
        for group in found.values()
    ]


def _elements(tensor: Tensor, where: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).index_select(0, where)


def _owned(
    held: ShardedLocal, flat_range: tuple[int, int] | None
) -> tuple[NDArray[np.int64], Words]:
    """Return positions in the tensor that is read, and the salts of the elements there."""
    positions, words = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for region in held.regions:
        if not owns(region, flat_range):
            continue
        places = sampled_places(region.key, region.global_shape)
        local, inside = _flat_positions(held, region, places)
        if flat_range is not None:
            start, stop = flat_range
            mine = (local >= start) & (local < stop)
            local, inside = local[mine] - start, inside[mine]
        positions.append(local)
        words.append(salts(region.key, inside))
    return np.concatenate(positions), np.concatenate(words)


def _flat_positions(
    held: ShardedLocal, region: Region, places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Select the positions of a global tensor that lie in a region.

    Returns:
        Their flat positions in the local tensor, and the global positions.
    """
    if not region.global_shape:
        return places, places
    prepended = len(region.global_shape) - len(region.local.shape)
    shape = (*(1,) * prepended, *region.local.shape)
    index = np.stack(np.unravel_index(places, region.global_shape))
    relative = index - np.array(region.offset)[:, None]
    inside = ((relative >= 0) & (relative < np.array(shape)[:, None])).all(axis=0)
    own = relative[prepended:, inside]
    if not region.local.shape:
        return np.zeros(own.shape[1], np.int64), places[inside]
    moved = own + np.array(region.local.offset)[:, None]
    flat = np.ravel_multi_index(tuple(moved), tuple(held.tensor.shape))
    return flat.astype(np.int64), places[inside]
