"""From the pieces that ranks hold to whole tensors, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from .runtime import Piece, RankOutcome


@attrs.frozen(kw_only=True)
class Replica:
    """Two ranks' copies of one place that are not equal."""

    name: str
    rank: int
    other: int
    apart: float
    """As ``distance`` has it."""


@attrs.frozen
class Whole:
    """One reading of a run's tensors over all ranks."""

    tensors: Mapping[str, Tensor]
    replicas: tuple[Replica, ...]
    unheld: Mapping[str, int]
    """Name -> elements that no rank holds."""
    missing: tuple[tuple[int, str], ...]
    """(rank, name) of what has nothing to read."""

    def problems(self, replica_tolerance: float = 0.0) -> list[str]:
        """Whatever makes it no whole, and copies of one place that lie further apart than this."""
        return [
            *self.incomplete(),
            *(
                f"rank {r.rank}: its copy of {r.name} lies {r.apart:.2e} from rank {r.other}'s"
                for r in self.replicas
                if r.apart > replica_tolerance
            ),
        ]

    def incomplete(self) -> Iterator[str]:
        """A sentence for each place that no rank holds, and for each gradient that is missing."""
        for name, count in self.unheld.items():
            yield f"{name}: no rank holds {count} of its elements"
        for rank, name in self.missing:
            yield f"rank {rank}: {name} got no gradient"


def whole_of(outcomes: Iterable[RankOutcome]) -> Whole:
    """What a trial's ranks hold together."""
    return assemble(outcome.pieces for outcome in outcomes)


def assemble(ranks: Iterable[Iterable[Piece]]) -> Whole:
    """Put every rank's pieces into their places."""
    import torch

    tensors: dict[str, Tensor] = {}
    holder: dict[str, Tensor] = {}
    replicas: dict[tuple[str, int, int], Replica] = {}
    missing: list[tuple[int, str]] = []
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            name, value = piece.name, piece.tensor
            if value is None:
                missing.append((rank, name))
                continue
            if name not in tensors:
                tensors[name] = torch.zeros(piece.global_shape, dtype=value.dtype)
                holder[name] = torch.full(piece.global_shape, -1, dtype=torch.int32)
            place = _slices(piece.offset, value.shape)
            held, known = holder[name][place], tensors[name][place]
            both = held >= 0
            if both.any() and not torch.equal(value[both], known[both]):
                other = int(held[both][0])
                apart = distance(value[both], known[both])
                found = replicas.get((name, rank, other))
                if found is None or found.apart < apart:
                    replicas[name, rank, other] = Replica(
                        name=name, rank=rank, other=other, apart=apart
                    )
            known.copy_(value)
            held.fill_(rank)
    unheld = {name: int((where < 0).sum()) for name, where in holder.items()}
    return Whole(
        tensors,
        tuple(replicas.values()),
        {name: count for name, count in unheld.items() if count},
        tuple(missing),
    )


def _slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Where a piece lies in its whole."""
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def distance(result: Tensor, expected: Tensor, quiet: float = 0.0) -> float:
    """max|a - b| / max|b|; 0 for equal bits, and infinite where one is not a number.

    Args:
        quiet: The least that is taken for max|b|.
    """
    import torch

    if result.shape != expected.shape:
        return math.inf
    if torch.equal(result, expected):
        return 0.0
    scale = max(expected.abs().max().item(), quiet)
    apart = (result - expected).abs().max().item()
    if not math.isfinite(apart):
        return math.inf
    return apart / scale if scale > 0 else math.inf


def differences(
    result: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> Iterator[str]:
    """A sentence for each tensor that is too far off, missing, or too much."""
    for name in sorted(expected.keys() | result.keys()):
        if name not in result:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is not there without the plugin"
        elif (apart := distance(result[name], expected[name])) > tolerance:
            yield f"{name} is off by {apart:.2e} of its largest value, allowed {tolerance:.0e}"
