"""From the pieces that ranks hold to whole tensors, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from .runtime import RankOutcome


@attrs.frozen
class Whole:
    """A trial's tensors over all ranks."""

    tensors: Mapping[str, Tensor]
    problems: tuple[str, ...]
    """Places that no rank holds, replicas that differ, gradients that are missing."""


def assemble(outcomes: Sequence[RankOutcome], replica_tolerance: float) -> Whole:
    """Put every rank's pieces into their places.

    Args:
        replica_tolerance: How far the copies of one place may lie apart, as ``distance`` has it.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    problems: list[str] = []
    for rank, outcome in enumerate(outcomes):
        problems += [f"rank {rank}: {name} got no gradient" for name in outcome.missing]
        for piece in outcome.pieces:
            if piece.name not in tensors:
                tensors[piece.name] = torch.zeros(piece.global_shape, dtype=piece.tensor.dtype)
                filled[piece.name] = torch.zeros(piece.global_shape, dtype=torch.bool)
            place = tuple(
                slice(start, start + length)
                for start, length in zip(piece.offset, piece.tensor.shape, strict=True)
            )
            known = filled[piece.name][place]
            apart = distance(piece.tensor[known], tensors[piece.name][place][known])
            if apart > replica_tolerance:
                problems.append(
                    f"rank {rank}: its copy of {piece.name} lies {apart:.2e} from another rank's"
                )
            tensors[piece.name][place] = piece.tensor
            filled[piece.name][place] = True
    for name, where in filled.items():
        if not where.all():
            problems.append(f"{name}: no rank holds {int((~where).sum())} of its elements")
    return Whole(tensors, tuple(problems))


def distance(result: Tensor, expected: Tensor) -> float:
    """max|a - b| / max|b|; 0 for equal bits, and infinite where one is not a number."""
    import torch

    if result.shape != expected.shape:
        return math.inf
    if torch.equal(result, expected):
        return 0.0
    scale = expected.abs().max().item()
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
