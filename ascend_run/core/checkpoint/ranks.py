"""Exchange JSON values between ranks for checkpoints; objects are never pickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.plugin_api import AscendRunError, CheckpointError, StorageError


class Ranks(Protocol):
    """The ranks that save and load a checkpoint together."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any] | None:
        """Return all ranks' JSON values in rank order on rank 0; None elsewhere."""
        ...

    def broadcast(self, value: object) -> Any:
        """Return rank 0's JSON value on every rank."""
        ...


class SingleRank:
    """A single process without a process group."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class GroupRanks:
    """The ranks of a torch process group.

    Args:
        group: None is the default group. A gloo group keeps this communication off the device.
        device: Device of the tensors that the group's backend takes.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any] | None:
        data = self._to_tensor(json.dumps(value).encode())
        lengths = [torch.zeros_like(self._length(data)) for _ in range(self.size)]
        dist.all_gather(lengths, self._length(data), group=self._group)
        sizes = [int(length) for length in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: data.numel()] = data
        received = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        dist.gather(padded, received, group=self._group, group_dst=0)
        if received is None:
            return None
        return [_from_tensor(part[:n]) for part, n in zip(received, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        data = self._to_tensor(json.dumps(value).encode() if self.rank == 0 else b"")
        length = self._length(data)
        dist.broadcast(length, group=self._group, group_src=0)
        if self.rank != 0:
            data = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        dist.broadcast(data, group=self._group, group_src=0)
        return _from_tensor(data)

    def _to_tensor(self, data: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).to(self._device)

    def _length(self, data: Tensor) -> Tensor:
        return torch.tensor([data.numel()], dtype=torch.int64, device=self._device)


def _from_tensor(data: Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


T = TypeVar("T")
_MOST_PROBLEMS = 20
_KINDS: dict[str, type[AscendRunError]] = {
    kind.__name__: kind for kind in (CheckpointError, StorageError)
}


def together(ranks: Ranks, headline: str, work: Callable[[], T]) -> list[T] | None:
    """Run a function on every rank; if it fails on any rank, raise the same error on all ranks.

    Args:
        work: Returns a JSON value; may raise CheckpointError or StorageError.

    Returns:
        The values of all ranks on rank 0; None elsewhere.

    Raises:
        StorageError: Storage failed on some rank. Lists the first 20 problems.
        CheckpointError: Some rank found another problem, and no rank's storage failed.
    """
    result, kind, problems = None, "", []
    try:
        result = work()
    except (CheckpointError, StorageError) as error:
        kind, problems = type(error).__name__, list(error.problems) or [error.headline]
    reports = ranks.gather([result, kind, problems])
    verdict = ranks.broadcast(_verdict(reports) if reports is not None else None)
    if verdict is not None:
        kind, problems = verdict
        raise _KINDS[kind](headline, problems)
    return None if reports is None else [result for result, _, _ in reports]


def _verdict(reports: list[Any]) -> tuple[str, list[str]] | None:
    kinds = {kind for _, kind, _ in reports if kind}
    if not kinds:
        return None
    by_problem: dict[str, list[int]] = {}
    for rank, (_, _, problems) in enumerate(reports):
        for problem in problems:
            by_problem.setdefault(problem, []).append(rank)
    everyone = len(reports)
    messages = [
        problem if len(who) == everyone else f"rank {', '.join(map(str, who))}: {problem}"
        for problem, who in by_problem.items()
    ]
    hidden = len(messages) - _MOST_PROBLEMS
    shown = [*messages[:_MOST_PROBLEMS], *([f"and {hidden} more"] if hidden > 0 else [])]
    return "StorageError" if "StorageError" in kinds else "CheckpointError", shown
