"""Compare every parameter's gradient, of each term of the loss, with differences of the loss.

Each parameter is moved along a direction of its own. Parameters with slopes of similar size are
moved together, since a loss is slow to compute: the slopes of a group of 20 within a factor of 8
add up, and an error of one of them by a share of 1e-4 is far above the error of the sum. If a
group's slope is wrong, or cannot be measured, its parameters are moved one by one.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.train.step import ForwardBackward
from ascend_run.testing.dry_run import DryRun
from ascend_run.testing.parameter_shards import ParameterShard
from ascend_run.types.data import Samples

from .differences import Derivative, direction, slopes
from .functions import recorded_estimates
from .loss_terms import AUXILIARY, MAIN, LossTerms

MICRO_BATCHES: Final = 2
"""Micro-batches of the loss, whose masks differ."""
_DRAWS: Final = 3
"""Directions that are tried until one has a slope that can be measured."""
_FACTOR: Final = 8.0
"""Slopes of parameters that are moved together differ by less."""
_LAYER: Final = re.compile(r"(?<=layers\.)\d+")


@attrs.frozen
class _Moved:
    """A parameter and its direction."""

    name: str
    tensor: Tensor
    gradients: Mapping[str, Tensor | None]
    """By term of the loss."""
    draw: int = 0
    is_reached: bool = False
    """Whether the main loss reaches it if SparseMixer counts all experts as near the best."""

    @property
    def along(self) -> Tensor:
        given = [gradient for gradient in self.gradients.values() if gradient is not None]
        seed = zlib.crc32(self.name.encode()) + self.draw
        generator = torch.Generator().manual_seed(seed)
        return direction(self.tensor, sum(given[1:], given[0]) if given else None, generator)

    def slopes(self) -> dict[str, float]:
        along = self.along
        return {
            term: 0.0 if gradient is None else float((gradient * along).sum())
            for term, gradient in self.gradients.items()
        }

    def is_masked(self) -> bool:
        """Whether the parameter gets its gradient from auxiliary losses only."""
        given = {term for term, g in self.gradients.items() if g is not None and g.any()}
        return bool(given) and given <= {*AUXILIARY}


def parameter_derivatives(
    dry_run: DryRun, forward_backward: ForwardBackward, dataset: Samples
) -> Iterator[Derivative]:
    """Yield a derivative for each group of parameters, or each parameter, and each term of the
    loss; those of single parameters last, in the order of the model.

    The forward is that of training, on one rank, which holds the whole model. Each evaluation draws
    the same random numbers. Of a parameter that several layers have, those of the first and the
    last one are moved. Nothing is compared if an autograd function declares that it estimates the
    gradient.

    Args:
        dry_run: Built for gradients in float64, with this ``forward_backward``.
        dataset: At least one global batch.
    """
    batches = dry_run.batches(dataset)
    count = min(MICRO_BATCHES, dry_run.plan.num_microbatches)
    with recorded_estimates() as estimates:
        terms = LossTerms(dry_run, forward_backward, [next(batches) for _ in range(count)])
    if estimates:
        return
    gradients, shards = terms.gradients(), dry_run.shards(Tensor.detach)
    chosen = _of_first_and_last_layers(shards)
    reached = terms.reached_among_near_experts()
    moved = [
        _Moved(
            shard.name,
            shard.tensor,
            {term: gradients[term][index] for term in terms.names},
            is_reached=index in reached,
        )
        for index, shard in enumerate(shards)
        if shard.name in chosen and shard.trains and shard.tensor is not None
    ]
    single: set[str] = set()
    for group in _groups(moved):
        found = _measured(group, terms) if len(group) > 1 else []
        if found and all(one.is_measured and one.agrees for one in found):
            yield from found
        else:
            single |= {member.name for member in group}
    for member in moved:
        if member.name in single:
            yield from _alone(member, terms)


def _of_first_and_last_layers(shards: Sequence[ParameterShard]) -> set[str]:
    kinds: dict[str, list[str]] = {}
    for shard in shards:
        kinds.setdefault(_LAYER.sub("#", shard.name), []).append(shard.name)
    return {name for of_kind in kinds.values() for name in (of_kind[0], of_kind[-1])}


def _groups(moved: Sequence[_Moved]) -> list[list[_Moved]]:
    """Group parameters by the size of their largest slope."""
    groups: dict[object, list[_Moved]] = {}
    for one in moved:
        largest = max(map(abs, one.slopes().values()))
        size = math.floor(math.log(largest, _FACTOR)) if largest else None
        groups.setdefault(one.name if one.is_masked() else size, []).append(one)
    return list(groups.values())


def _alone(one: _Moved, terms: LossTerms) -> list[Derivative]:
    found: list[Derivative] = []
    for draw in range(_DRAWS):
        found = _measured([attrs.evolve(one, draw=draw)], terms)
        if all(derivative.is_measured and derivative.agrees for derivative in found):
            break
    return found


def _measured(group: Sequence[_Moved], terms: LossTerms) -> list[Derivative]:
    """Move the parameters of a group together; return a derivative for each term."""
    held = [(one.tensor, one.tensor.clone(), one.along) for one in group]

    def at(distance: float) -> tuple[float, ...]:
        for tensor, before, along in held:
            tensor.copy_(before + distance * along)
        return terms.values()

    try:
        found = slopes(at, terms.sizes)
    finally:
        for tensor, before, _ in held:
            tensor.copy_(before)
    expected = [one.slopes() for one in group]
    needs_main = terms.needs_main and group[0].is_masked() and not group[0].is_reached
    name = group[0].name if len(group) == 1 else f"{group[0].name} and {len(group) - 1} others"
    return [
        Derivative(
            name=name,
            of=term,
            gradient=sum(of_one[term] for of_one in expected),
            slope=slope.value,
            bound=slope.bound,
            is_measured=slope.is_measured,
            is_required=term == MAIN and needs_main,
        )
        for term, slope in zip(terms.names, found, strict=True)
    ]
