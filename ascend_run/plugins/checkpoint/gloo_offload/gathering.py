"""A checkpoint store that gathers shards to, and distributes them from, one rank per group."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ascend_run.plugin_api import CheckpointError, CheckpointStore, TensorShard

from .channel import Channel

Place: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offset and shape: identifies a shard of which two ranks may hold replicas."""

_DIGEST_BYTES = 1 << 24


class GatheringStore:
    """Write and read the same checkpoints from fewer ranks.

    Implements contracts.CheckpointStore. A save moves what each rank would write to the writer's
    host memory; in a load, the writer reads what all ranks need, each shard once, and sends it on.
    The inner store is called on every rank, with all shards on the writers.

    Args:
        check_replicas: Before a save, compare the replicas that are not written with those that
            are.
    """

    def __init__(self, inner: CheckpointStore, channel: Channel, *, check_replicas: bool) -> None:
        self._inner = inner
        self._channel = channel
        self._check_replicas = check_replicas

    def steps(self) -> Sequence[int]:
        return self._inner.steps()

    def verify(self, step: int) -> None:
        self._inner.verify(step)

    def layout(self, step: int) -> Mapping[str, int]:
        return self._inner.layout(step)

    def save(self, step: int, shards: Sequence[TensorShard], values: Mapping[str, Any]) -> str:
        """Gather the shards to the writer and save them with the inner store.

        Raises:
            CheckpointError: With ``check_replicas``, replicas differ; lists key and rank.
        """
        if self._check_replicas:
            self._compare(shards)
        return self._inner.save(step, self._gathered(shards), values)

    def _gathered(self, shards: Sequence[TensorShard]) -> Sequence[TensorShard]:
        """Return, on the writer, all shards that its group writes; on the other ranks, none."""
        written = [shard for shard in shards if shard.writes]
        channel = self._channel
        if channel.rank != 0:
            channel.send_json([_record(shard) for shard in written], to=0)
            channel.send([shard.tensor for shard in written], to=0)
            return []
        gathered = list(shards)
        for sender in range(1, channel.size):
            theirs = [_shard(record, "cpu") for record in channel.receive_json(sender)]
            channel.receive([shard.tensor for shard in theirs], sender)
            gathered += theirs
        return gathered

    def load(
        self, step: int, shards: Sequence[TensorShard], *, ignore_unused: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Load with the inner store; broadcast what every rank needs, and send the rest."""
        if self._channel.rank != 0:
            return self._load_from_writer(step, shards, ignore_unused)
        channel = self._channel
        needed = {
            sender: [_shard(record, "meta") for record in channel.receive_json(sender)]
            for sender in range(1, channel.size)
        }
        places = {sender: [_place(shard) for shard in theirs] for sender, theirs in needed.items()}
        own = {_place(shard): shard.tensor for shard in shards}
        shared = [place for place in own if all(place in theirs for theirs in places.values())]
        for sender in needed:
            channel.send_json([*map(list, shared)], to=sender)
        others = {
            _place(shard): shard
            for theirs in needed.values()
            for shard in theirs
            if _place(shard) not in own
        }
        read = {place: _shard(_record(shard), "cpu") for place, shard in others.items()}
        values = self._inner.load(step, [*shards, *read.values()], ignore_unused=ignore_unused)
        held = own | {place: shard.tensor for place, shard in read.items()}
        channel.broadcast([own[place] for place in shared])
        for sender, theirs in places.items():
            channel.send([held[place] for place in theirs if place not in set(shared)], to=sender)
        return values

    def _load_from_writer(
        self, step: int, shards: Sequence[TensorShard], ignore_unused: Sequence[str]
    ) -> Mapping[str, Any]:
        channel = self._channel
        channel.send_json([_record(shard) for shard in shards], to=0)
        shared = [
            (key, tuple(offset), tuple(shape)) for key, offset, shape in channel.receive_json(0)
        ]
        values = self._inner.load(step, [], ignore_unused=ignore_unused)
        own = {_place(shard): shard.tensor for shard in shards}
        channel.broadcast([own[place] for place in shared])
        rest = [shard for shard in shards if _place(shard) not in set(shared)]
        channel.receive([shard.tensor for shard in rest], 0)
        for shard in shards:  # one shard may be requested twice
            if shard.tensor is not own[_place(shard)]:
                shard.tensor.copy_(own[_place(shard)])
        return values

    def _compare(self, shards: Sequence[TensorShard]) -> None:
        """Compare the replicas that a rank does not write with those that its group writes."""
        channel = self._channel
        digests = [
            [*_record(shard), _digest(shard.tensor)] for shard in shards if shard.tensor.numel()
        ]
        if channel.rank != 0:
            channel.send_json(digests, to=0)
            problems = channel.receive_json(0)
        else:
            held = {0: digests}
            held |= {sender: channel.receive_json(sender) for sender in range(1, channel.size)}
            problems = _differences(held)
            for sender in range(1, channel.size):
                channel.send_json(problems, to=sender)
        if problems:
            raise CheckpointError("replicas differ between ranks; nothing is saved", problems)


def _record(shard: TensorShard) -> list[object]:
    """Return the metadata of a shard, as JSON."""
    dtype = str(shard.tensor.dtype).removeprefix("torch.")
    shape, whole = list(shard.tensor.shape), list(shard.global_shape)
    return [shard.key, dtype, shape, whole, list(shard.offset), shard.writes]


def _shard(record: Sequence[Any], device: str) -> TensorShard:
    """Allocate the shard that a record describes; on ``meta``, without memory."""
    key, dtype, shape, whole, offset, writes = record
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    return TensorShard(
        key=key, tensor=tensor, global_shape=tuple(whole), offset=tuple(offset), writes=writes
    )


def _place(shard: TensorShard) -> Place:
    return shard.key, tuple(shard.offset), tuple(shard.tensor.shape)


def _digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, copied to the host in chunks."""
    digest = hashlib.sha256()
    elements = max(1, _DIGEST_BYTES // tensor.element_size())
    for part in tensor.detach().reshape(-1).split(elements):
        digest.update(part.contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def _differences(held: Mapping[int, Sequence[Sequence[Any]]]) -> list[str]:
    """Return one sentence for each replica that differs from the one that is written."""
    written = {
        (key, tuple(offset), tuple(shape)): (rank, digest)
        for rank, records in held.items()
        for key, _, shape, _, offset, writes, digest in records
        if writes
    }
    problems = []
    for rank, records in held.items():
        for key, _, shape, _, offset, writes, digest in records:
            place = (key, tuple(offset), tuple(shape))
            if writes or place not in written or written[place][1] == digest:
                continue
            problems.append(
                f"{key} at {list(offset)}: the replica of rank {rank} in the data-parallel group "
                f"differs from that of rank {written[place][0]}, which writes it"
            )
    return problems
