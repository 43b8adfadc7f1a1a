"""Jobs of the pool's ranks: transfer shards, save and resume runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.plugin_api import CheckpointError, TensorShard
from ascend_run.plugins.checkpoint.gloo_offload import Traffic
from ascend_run.plugins.checkpoint.gloo_offload.channel import Channel
from ascend_run.plugins.checkpoint.gloo_offload.gathering import GatheringStore
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.testing.effects import count_collectives
from tests.support.probed_runs import train


class Shelf:
    """contracts.CheckpointStore that stores this rank's shards, and loads by a function of the
    test."""

    def __init__(self) -> None:
        self.saved: dict[str, Tensor] = {}
        self.asked: list[str] = []

    def steps(self) -> Sequence[int]:
        return []

    def verify(self, step: int) -> None:
        raise AssertionError("nothing asks for it")

    def layout(self, step: int) -> Mapping[str, int]:
        return {}

    def save(self, step: int, shards: Sequence[TensorShard], values: Mapping[str, Any]) -> str:
        self.saved = {p.key: p.tensor.clone() for p in shards if p.writes}
        return f"shelf/{values['name']}"

    def load(
        self, step: int, shards: Sequence[TensorShard], *, ignore_unused: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        self.asked = [shard.key for shard in shards]
        for shard in shards:
            shard.tensor.copy_(content(shard.key, shard.tensor))
        return {"ignored": list(ignore_unused)}


def content(key: str, like: Tensor) -> Tensor:
    """Return the values of a key."""
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return torch.randint(100, like.shape, generator=generator).to(like.dtype)


KINDS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "wide": (torch.float32, (7, 9)),
    "halves": (torch.float32, (5, 4)),
    "half": (torch.bfloat16, (11,)),
    "scalar": (torch.float32, ()),
    "bytes": (torch.uint8, (13,)),
    "nothing": (torch.float32, (0, 3)),
}


def shards_of(rank: int, *, fill: bool) -> list[TensorShard]:
    """Return a replica that all ranks hold and the first one writes, and shards of this rank."""
    made = []
    for name, (dtype, shape) in KINDS.items():
        for key, writes in ((f"shared/{name}", rank == 0), (f"own/{rank}/{name}", True)):
            tensor = torch.zeros(shape, dtype=dtype)
            if name == "halves":  # a non-contiguous view
                tensor = torch.zeros(shape[0], 2 * shape[1], dtype=dtype)[:, : shape[1]]
            if fill:
                tensor.copy_(content(key, tensor))
            made.append(
                TensorShard(
                    key=key,
                    tensor=tensor,
                    global_shape=shape,
                    offset=(0,) * len(shape),
                    writes=writes,
                )
            )
    return made


class _Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor created."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        if function._opname.startswith(("empty", "zeros", "clone", "cat", "new_")):
            self.bytes = max(self.bytes, out.nbytes)
        return out


@contextmanager
def _store(slice_elements: int, **options: bool) -> Iterator[tuple[GatheringStore, Shelf, Traffic]]:
    shelf, traffic = Shelf(), Traffic()
    group = dist.group.WORLD
    channel = Channel(group, CpuDevice(0), slice_elements, traffic)  # type: ignore[arg-type]
    yield GatheringStore(shelf, channel, check_replicas=options.get("check", False)), shelf, traffic


def move(slice_elements: int) -> dict[str, Any]:
    """Save and load; return what this rank's store saw, what its tensors hold, and the traffic."""
    rank = dist.get_rank()
    with _store(slice_elements) as (store, shelf, traffic):
        with count_collectives() as seen:
            path = store.save(1, shards_of(rank, fill=True), {"name": "one"})
        saving = (traffic.messages, traffic.sent_bytes, traffic.received_bytes)
        shards = shards_of(rank, fill=False)
        values = store.load(1, shards, ignore_unused=("rng/*",))
        return {
            "path": path,
            "values": values,
            "saved": shelf.saved,
            "asked": shelf.asked,
            "loaded": {shard.key: shard.tensor for shard in shards},
            "saving": saving,
            "loading": traffic,
            "calls": dict(seen.calls),
        }


def largest_buffer(elements: int, slice_elements: int) -> int:
    """Return the bytes of the largest tensor that a sender creates to save one large tensor."""
    rank = dist.get_rank()
    tensor = torch.ones(elements)
    shard = TensorShard(
        key=f"own/{rank}", tensor=tensor, global_shape=(elements,), offset=(0,), writes=True
    )
    with _store(slice_elements) as (store, _, _), _Largest() as largest:
        store.save(1, [shard], {"name": "one"})
    return largest.bytes


def compare(differs: bool) -> str:
    """Save with replicas compared; return the error message, or an empty string."""
    rank = dist.get_rank()
    shards = shards_of(rank, fill=True)
    if differs and rank == 1:
        shards[0].tensor[0, 0] += 1
    with _store(8, check=True) as (store, _, _):
        try:
            store.save(1, shards, {"name": "one"})
        except CheckpointError as error:
            return str(error)
    return ""


def run(folder: str, steps: int, values: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Run on the current ranks; return its losses (on rank 0) and this rank's weights."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    chosen = {
        "train.train_iters": steps,
        "train.global_batch_size": 4,
        "checkpoint.save_interval": 1,
        "optimizer.lr_decay_style": "constant",
        **values,
    }
    made = train(Path(folder), values=chosen, model=model)
    return {
        "losses": [line["loss"] for line in made.readings()] if rank == "0" else [],
        "readings": made.readings()[-1] if rank == "0" else {},
        "weights": {name: weight.clone() for name, weight in made.weights.items()},
    }


def backends_asked_for(folder: str, values: Mapping[str, Any]) -> list[str]:
    """Return the backends that a run requests for groups other than the default one."""
    named: list[str] = []
    original = dist.new_group

    @functools.wraps(original)  # a patch checks the source of what it replaces
    def watch(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", args[2] if len(args) > 2 else None)
        if backend is not None:
            named.append(str(backend))
        return original(*args, **kwargs)

    dist.new_group = watch
    try:
        run(folder, 1, values, "dense")
    finally:
        dist.new_group = original
    return named
