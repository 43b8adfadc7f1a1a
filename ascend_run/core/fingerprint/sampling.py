"""Where this rank finds the sampled elements that it owns.

A sample is named by the tensor of the whole model and the place in it, so that it does not depend
on the layout. What the optimizer steps is what is read: its float32 copy of a half-precision
parameter, and of a distributed optimizer the range that this rank holds, which no gathering of
parameters touches. So every element has one owner, and nobody waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascend_run.core.checkpoint.optimizer_pieces import (
    is_distributed,
    owns,
    stepped_parameters,
)
from ascend_run.core.checkpoint.regions import Region, ShardedLocal, sharded_tensors
from ascend_run.plugin_api import contracts as c

from .hashing import Words, salts, sampled_places

_WORD: Final[Mapping[int, torch.dtype]] = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
"""Bytes of an element -> the integer that has its bits."""


@attrs.frozen
class Samples:
    """The sampled elements of tensors of one dtype on this rank."""

    tensors: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]
    """Positions in each of the tensors, flat; on its device."""
    salt: Words
    """Of all elements, in the order of the tensors."""

    def read(self) -> Tensor:
        """Copies of the elements as they stand, [elements]; queued on the device, not awaited."""
        parts = zip(self.tensors, self.indices, strict=True)
        return torch.cat([t.detach().reshape(-1).index_select(0, i) for t, i in parts])


def bits_of(values: Tensor) -> NDArray[Any]:
    """The bits of a tensor's elements as integers, on the host."""
    bits: NDArray[Any] = values.view(_WORD[values.element_size()]).cpu().numpy()
    return bits


def samples_of(bundle: c.ModelBundle, *, vocab_size: int | None) -> list[Samples]:
    """The samples of a model that trains, a group for each dtype.

    Args:
        vocab_size: As ``sharded_tensors`` takes it.

    Raises:
        CheckpointError: The model or its optimizer does not say which part of a whole tensor it
            holds, as a checkpoint of it would need as well.
    """
    tensors = sharded_tensors(bundle.chunks, vocab_size=vocab_size)
    stepped = {id(item.parameter): item for item in stepped_parameters(bundle.optimizer)}
    shared_out = is_distributed(bundle.optimizer)
    found: dict[torch.dtype, list[tuple[Tensor, NDArray[np.int64], Words]]] = {}
    for held in tensors:
        source, flat_range = held.tensor, None
        if (item := stepped.get(id(held.tensor))) is not None:
            source, flat_range = item.stepped, item.flat_range
        elif shared_out and held.tensor.requires_grad:
            continue  # other ranks hold all that is stepped of it
        positions, words = _owned(held, flat_range)
        if positions.size:
            found.setdefault(source.dtype, []).append((source, positions, words))
    return [
        Samples(
            tensors=tuple(tensor for tensor, _, _ in group),
            indices=tuple(torch.from_numpy(where).to(t.device) for t, where, _ in group),
            salt=np.concatenate([words for _, _, words in group]),
        )
        for group in found.values()
    ]


def _owned(
    held: ShardedLocal, flat_range: tuple[int, int] | None
) -> tuple[NDArray[np.int64], Words]:
    """Positions in what stands for a tensor, and the salts of the elements there."""
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
    """Those of the places in a whole tensor that lie in a region: their flat positions in the
    local tensor, and the places themselves."""
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
