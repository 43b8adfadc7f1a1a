"""Decide from measurements what becomes of each layer: alike on all ranks of a pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import distributed as dist

from .layer import NEVER, Layer
from .solver import Choice, Kind, fullest, most_at_once, smallest, solve, useful
from .treatment import PARTS, WHOLE, Treatment
from .waiting import Channel

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

_TIMED: Final = (WHOLE, *PARTS)
_STEPS: Final = 100
"""Units of cost of the slowest layer: times are not known better than to a hundredth of it."""
_MOST_STEPS: Final = 1000
"""The most units of any choice: copies to a slow disk may take far longer than a layer."""


@attrs.frozen(kw_only=True)
class KindOfLayer:
    """Layers that are alike, with what was measured of them."""

    layers: tuple[Layer, ...]
    in_flight: tuple[int, ...]
    """Forwards of such a layer that wait for their backward, at each moment of a step."""
    nbytes: dict[Treatment, int]  #: Of one forward.
    moved: dict[str, int]  #: Part -> bytes of one forward that leave if it is swapped.
    nanoseconds: dict[str, int]  #: Part -> time of its forward.
    channel: Channel | None  #: None: nothing is swapped.

    def spent(self, treatment: Treatment) -> int:
        """Return the time of a recomputation, or that copies are waited for. Unit: nanoseconds."""
        again = sum(self.nanoseconds[part] for part in treatment.recomputed)
        return again + self._waited(treatment)

    def _waited(self, treatment: Treatment) -> int:
        if self.channel is None or not treatment.swapped:
            return 0
        return self.channel.waited(self.nanoseconds, self.moved, treatment.swapped)

    def to_solve(self, unit: float) -> Kind:
        """Return it for the solver. Nothing is free: each part costs a unit at least.

        Args:
            unit: Nanoseconds of a unit of cost.
        """
        choices = []
        for treatment, nbytes in self.nbytes.items():
            again = [max(1, round(self.nanoseconds[p] / unit)) for p in treatment.recomputed]
            waits = max(len(treatment.swapped), round(self._waited(treatment) / unit))
            choices.append(Choice(treatment, nbytes, sum(again) + waits))
        return Kind(tuple(choices), len(self.layers), self.in_flight)

    def record(self) -> dict[str, Any]:
        """Return it for the log, without choices that others beat in both bytes and time."""
        return {
            "layers": self.indices(),
            "in_flight": max(self.in_flight),
            "choices": {
                choice.treatment.words: {
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
        return useful([Choice(one, size, self.spent(one)) for one, size in self.nbytes.items()])


@attrs.frozen(kw_only=True)
class Decision:
    """What becomes of the layers of this rank."""

    kinds: tuple[KindOfLayer, ...]
    chosen: tuple[tuple[Treatment, ...], ...]  #: Of each layer of each kind.
    expected: int  #: Bytes kept by all layers at the peak.
    least: int  #: Bytes if the layers keep as little as they can.

    def apply(self) -> None:
        """Let the layers do it."""
        for kind, chosen in zip(self.kinds, self.chosen, strict=True):
            for layer, treatment in zip(kind.layers, chosen, strict=True):
                layer.chosen = treatment

    def by_layer(self) -> dict[str, str]:
        """Return what becomes of each layer, in words."""
        return {str(index): treatment.words for index, _, treatment in self.items()}

    def speeds(self) -> dict[str, float]:
        """Return the speed of copies, if parts may be swapped. Unit: GB/s."""
        channel = self.kinds[0].channel
        if channel is None:
            return {}
        rates = {"to_host_gb": channel.to_host, "to_device_gb": channel.to_device}
        return {name: round((1 << 30) / spent, 3) for name, spent in rates.items()}

    def items(self) -> list[tuple[int, KindOfLayer, Treatment]]:
        """Return the index of each layer, its kind and what becomes of it."""
        found = [
            (layer.index, kind, treatment)
            for kind, chosen in zip(self.kinds, self.chosen, strict=True)
            for layer, treatment in zip(kind.layers, chosen, strict=True)
        ]
        return sorted(found, key=lambda item: item[0])


def decide(
    layers: Sequence[Layer],
    moments: Collection[Sequence[int]],
    groups: ProcessGroupCollection,
    device: torch.device,
    budget: int,
    channel: Channel | None = None,
) -> Decision | None:
    """Return what is within the budget and takes the least time; if nothing is, what keeps least.
    None if no layer has run.

    Collective over all ranks of a pipeline stage, which get the same: of each measurement the
    largest of all ranks counts.

    Args:
        moments: Forwards of each layer that waited at the same time; the schedule's, so they are
            those of all ranks of the stage.
        channel: Of the copies, as measured on this rank; None: nothing is swapped.
    """
    ran = [at for at, layer in enumerate(layers) if layer.nbytes]
    if not ran:
        return None
    layers = [layers[at] for at in ran]
    numbers = [[0, 0] if channel is None else [channel.to_host, channel.to_device]]
    (slowest,) = _largest(numbers, groups, device)
    if channel is not None:
        channel = attrs.evolve(channel, to_host=slowest[0], to_device=slowest[1])
    rows = _largest([_row(layer) for layer in layers], groups, device)
    moments = fullest({tuple(now[at] for at in ran) for now in moments})
    kinds = kinds_of(layers, rows, moments, channel)
    slowest_layer = max(max(kind.nanoseconds.values()) for kind in kinds)
    slowest_choice = max(choice.cost for kind in kinds for choice in kind.useful_choices())
    unit = max(1.0, slowest_layer / _STEPS, slowest_choice / _MOST_STEPS)
    problem = [kind.to_solve(unit) for kind in kinds]
    found = solve(problem, budget)
    if found is None:
        found = [(useful(kind.choices)[-1],) * kind.layers for kind in problem]
    return Decision(
        kinds=kinds,
        chosen=tuple(tuple(choice.treatment for choice in choices) for choices in found),
        expected=most_at_once(problem, found),
        least=smallest(problem),
    )


def kinds_of(
    layers: Sequence[Layer],
    rows: Sequence[Sequence[int]],
    moments: Sequence[Sequence[int]],
    channel: Channel | None,
) -> tuple[KindOfLayer, ...]:
    """Return the kinds of layers, which have the same choices and as many forwards in flight; of
    each measurement the largest of all layers of a kind counts.

    Args:
        rows: The measurements of each layer, as in ``_row``.
    """
    sizes = slice(1 + len(_TIMED) + len(PARTS), None)
    alike: dict[tuple[int, tuple[int, ...], tuple[bool, ...]], list[int]] = {}
    for at, row in enumerate(rows):
        in_flight = tuple(now[at] for now in moments)
        possible = tuple(nbytes < NEVER for nbytes in row[sizes])
        alike.setdefault((row[0], in_flight, possible), []).append(at)
    kinds = []
    for (_, in_flight, _), places in alike.items():
        numbers = [*map(max, zip(*(rows[at] for at in places), strict=True))]
        pairs = zip(layers[places[0]].nbytes, numbers[sizes], strict=True)
        kinds.append(
            KindOfLayer(
                layers=tuple(layers[at] for at in places),
                in_flight=in_flight,
                nbytes={treatment: size for treatment, size in pairs if size < NEVER},
                moved=dict(zip(PARTS, numbers[1 + len(_TIMED) :], strict=False)),
                nanoseconds=dict(zip(_TIMED, numbers[1:], strict=False)),
                channel=channel,
            )
        )
    return tuple(kinds)


def _row(layer: Layer) -> list[int]:
    """Return the measurements of one layer; all have the same number."""
    return [
        int(layer.has_experts),
        *(layer.nanoseconds.get(part, 0) for part in _TIMED),
        *(layer.moved.get(part, 0) for part in PARTS),
        *layer.nbytes.values(),
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
