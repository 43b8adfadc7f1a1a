"""Assemble full tensors from the shards of all ranks, and compare them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from .runtime import RankOutcome, Shard


@attrs.frozen(kw_only=True)
class Replica:
    """A replica that differs between two ranks."""

    name: str
    rank: int
    other: int
    error: float
    """As returned by ``relative_error``."""


@attrs.frozen
class FullTensors:
    """The full tensors of a run, assembled from the shards of all ranks."""

    tensors: Mapping[str, Tensor]
    replicas: tuple[Replica, ...]
    """Replicas that differ."""
    unheld: Mapping[str, int]
    """Name -> number of elements that no rank holds."""
    missing: tuple[tuple[int, str], ...]
    """(rank, name) of each tensor that is None."""

    def problems(self, replica_tolerance: float = 0.0) -> list[str]:
        """Return a message for each incomplete tensor, and for each replica whose error is larger
        than the tolerance."""
        return [
            *self.incomplete(),
            *(
                f"rank {r.rank}: its replica of {r.name} differs by {r.error:.2e} from rank "
                f"{r.other}'s"
                for r in self.replicas
                if r.error > replica_tolerance
            ),
        ]

    def incomplete(self) -> Iterator[str]:
        """Yield a message for each tensor with missing elements, and each missing gradient."""
        for name, count in self.unheld.items():
            yield f"{name}: no rank holds {count} of its elements"
        for rank, name in self.missing:
            yield f"rank {rank}: {name} got no gradient"


def full_tensors(outcomes: Iterable[RankOutcome]) -> FullTensors:
    """Assemble the full tensors of a trial."""
    return assemble(outcome.shards for outcome in outcomes)


def assemble(ranks: Iterable[Iterable[Shard]]) -> FullTensors:
    """Assemble full tensors, on the host, from the shards of every rank."""
    import torch

    tensors: dict[str, Tensor] = {}
    holder: dict[str, Tensor] = {}
    replicas: dict[tuple[str, int, int], Replica] = {}
    missing: list[tuple[int, str]] = []
    for rank, shards in enumerate(ranks):
        for shard in shards:
            if shard.tensor is None:
                missing.append((rank, shard.name))
                continue
            name, value = shard.name, shard.tensor.cpu()
            if name not in tensors:
                tensors[name] = torch.zeros(shard.global_shape, dtype=value.dtype)
                holder[name] = torch.full(shard.global_shape, -1, dtype=torch.int32)
            region = _slices(shard.offset, value.shape)
            held, known = holder[name][region], tensors[name][region]
            both = held >= 0
            if both.any() and not torch.equal(value[both], known[both]):
                other = int(held[both][0])
                error = relative_error(value[both], known[both])
                found = replicas.get((name, rank, other))
                if found is None or found.error < error:
                    replicas[name, rank, other] = Replica(
                        name=name, rank=rank, other=other, error=error
                    )
            known.copy_(value)
            held.fill_(rank)
    unheld = {name: int((where < 0).sum()) for name, where in holder.items()}
    return FullTensors(
        tensors,
        tuple(replicas.values()),
        {name: count for name, count in unheld.items() if count},
        tuple(missing),
    )


def _slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Slices of a shard in its full tensor."""
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def relative_error(result: Tensor, expected: Tensor, quiet: float = 0.0) -> float:
    """Return max|a - b| / max|b|; 0 if both are equal, infinite for NaNs and different shapes.

    Args:
        quiet: Lower bound of the denominator.
    """
    import torch

    if result.shape != expected.shape:
        return math.inf
    if torch.equal(result, expected):
        return 0.0
    scale = max(expected.abs().max().item(), quiet)
    error = (result - expected).abs().max().item()
    if not math.isfinite(error):
        return math.inf
    return error / scale if scale > 0 else math.inf


def differences(
    result: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> Iterator[str]:
    """Yield a message for each tensor whose error is too large, and each missing or extra one."""
    for name in sorted(expected.keys() | result.keys()):
        if name not in result:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} does not exist without the plugin"
        elif (error := relative_error(result[name], expected[name])) > tolerance:
            yield (
                f"{name} has max error {error:.2e} relative to its largest value, tolerance "
                f"{tolerance:.0e}"
            )
