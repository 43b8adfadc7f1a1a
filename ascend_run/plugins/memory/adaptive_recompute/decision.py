"""Decide from measurements what each layer recomputes: alike on all ranks of a pipeline stage."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import distributed as dist

from .recorder import CHOICES, NEVER, PARTS, Layer
from .solver import Choice, Kind, most_at_once, smallest, solve, useful, words_for

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

_TIMED: Final = ("", *PARTS)
_STEPS: Final = 100
"""Units of cost of the slowest layer: times are not known better than to a hundredth of it."""


@attrs.frozen(kw_only=True)
class KindOfLayer:
    """Layers that are alike, with what was measured of them."""

    layers: tuple[Layer, ...]
    in_flight: tuple[int, ...]
    """Forwards of such a layer that wait for their backward, at each moment of a step."""
    nbytes: dict[tuple[str, ...], int]  #: Choice -> bytes of one forward.
    nanoseconds: dict[str, int]  #: Part -> time of its forward.

    def spent(self, parts: Sequence[str]) -> int:
        """Return the time of a recomputation. Unit: nanoseconds."""
        return sum(self.nanoseconds[part] for part in parts)

    def to_solve(self, unit: float) -> Kind:
        """Return it for the solver.

        Args:
            unit: Nanoseconds of a unit of cost.
        """
        choices = tuple(
            Choice(
                parts,
                nbytes,
                sum(max(1, round(self.nanoseconds[part] / unit)) for part in parts),
            )
            for parts, nbytes in self.nbytes.items()
        )
        return Kind(choices, len(self.layers), self.in_flight)

    def record(self) -> dict[str, Any]:
        """Return it for the log, without choices that others beat in both bytes and time."""
        return {
            "layers": self.indices(),
            "in_flight": max(self.in_flight),
            "choices": {
                words_for(choice.parts): {
                    "bytes": choice.nbytes,
                    "milliseconds": round(choice.cost / 1e6, 4),
                }
                for choice in self.useful_choices()
            },
        }

    def indices(self) -> list[int]:
        """Return the indices of the layers."""
        return [layer.index for layer in self.layers]

    def useful_choices(self) -> Sequence[Choice]:
        """Return what no other choice beats in both bytes and time; the cost is nanoseconds."""
        return useful(
            [Choice(parts, size, self.spent(parts)) for parts, size in self.nbytes.items()]
        )


@attrs.frozen(kw_only=True)
class Decision:
    """What the layers of this rank recompute."""

    kinds: tuple[KindOfLayer, ...]
    chosen: tuple[tuple[tuple[str, ...], ...], ...]  #: Of each layer of each kind.
    expected: int  #: Bytes kept by all layers at the peak.
    least: int  #: Bytes if the layers keep as little as they can.

    def apply(self) -> None:
        """Let the layers do it."""
        for kind, chosen in zip(self.kinds, self.chosen, strict=True):
            for layer, parts in zip(kind.layers, chosen, strict=True):
                layer.chosen = frozenset(parts)

    def by_layer(self) -> dict[str, str]:
        """Return what each layer recomputes, in words."""
        return {str(index): words for index, words, _, _ in self.items()}

    def items(self) -> list[tuple[int, str, KindOfLayer, tuple[str, ...]]]:
        """Return the index of each layer, what it recomputes, in words, its kind and its choice."""
        found = [
            (layer.index, words_for(parts), kind, parts)
            for kind, chosen in zip(self.kinds, self.chosen, strict=True)
            for layer, parts in zip(kind.layers, chosen, strict=True)
        ]
        return sorted(found, key=lambda item: item[0])


def decide(
    layers: Sequence[Layer],
    moments: Collection[Sequence[int]],
    groups: ProcessGroupCollection,
    device: torch.device,
    budget: int,
) -> Decision | None:
    """Return what is within the budget and takes the least time; if nothing is, what keeps least.
    None if no layer has run.

    Collective over all ranks of a pipeline stage, which get the same: of each measurement the
    largest of all ranks counts.

    Args:
        moments: Forwards of each layer that waited at the same time; the schedule's, so they are
            those of all ranks of the stage.
    """
    ran = [at for at, layer in enumerate(layers) if layer.nbytes]
    if not ran:
        return None
    layers = [layers[at] for at in ran]
    rows = _largest([_row(layer) for layer in layers], groups, device)
    kinds = kinds_of(layers, rows, _fullest({tuple(now[at] for at in ran) for now in moments}))
    unit = max(max(kind.nanoseconds.values()) for kind in kinds) / _STEPS
    problem = [kind.to_solve(max(unit, 1.0)) for kind in kinds]
    found = solve(problem, budget)
    if found is None:
        found = [(useful(kind.choices)[-1],) * kind.layers for kind in problem]
    return Decision(
        kinds=kinds,
        chosen=tuple(tuple(choice.parts for choice in choices) for choices in found),
        expected=most_at_once(problem, found),
        least=smallest(problem),
    )


def kinds_of(
    layers: Sequence[Layer], rows: Sequence[Sequence[int]], moments: Sequence[Sequence[int]]
) -> tuple[KindOfLayer, ...]:
    """Return the kinds of layers, which have the same choices and as many forwards in flight; of
    each measurement the largest of all layers of a kind counts.

    Args:
        rows: The measurements of each layer, as in ``_row``.
    """
    alike: dict[tuple[int, tuple[int, ...], tuple[bool, ...]], list[int]] = {}
    for at, (has_experts, *numbers) in enumerate(rows):
        in_flight = tuple(now[at] for now in moments)
        possible = tuple(nbytes < NEVER for nbytes in numbers[len(_TIMED) :])
        alike.setdefault((has_experts, in_flight, possible), []).append(at)
    kinds = []
    for (_, in_flight, _), places in alike.items():
        _, *numbers = map(max, zip(*(rows[at] for at in places), strict=True))
        sizes = zip(CHOICES, numbers[len(_TIMED) :], strict=True)
        kinds.append(
            KindOfLayer(
                layers=tuple(layers[at] for at in places),
                in_flight=in_flight,
                nbytes={parts: size for parts, size in sizes if size < NEVER},
                nanoseconds=dict(zip(_TIMED, numbers, strict=False)),
            )
        )
    return tuple(kinds)


def _row(layer: Layer) -> list[int]:
    """Return the measurements of one layer; all have the same number."""
    return [
        int(layer.has_experts),
        *(layer.nanoseconds.get(part, 0) for part in _TIMED),
        *(layer.nbytes[parts] for parts in CHOICES),
    ]


def _fullest(moments: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the moments at which something waits that does not at another one, in order."""
    return [
        now
        for now in sorted(moments)
        if not any(now != other and all(map(operator.le, now, other)) for other in moments)
    ]


def _largest(
    rows: Sequence[Sequence[int]], groups: ProcessGroupCollection, device: torch.device
) -> list[list[int]]:
    numbers = torch.tensor(rows, dtype=torch.int64, device=device)
    for group in (groups.tp, groups.dp_cp):
        if group.size() > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    found: list[list[int]] = numbers.tolist()
    return found
