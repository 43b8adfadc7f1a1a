"""The plain model's numbers for one kind of rank, and the plugins' changes applied to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import attrs

from ascend_run.plugin_api.contracts import (
    CostChange,
    KeptChange,
    KeptTensor,
    Messages,
    Moment,
    ParameterCost,
    Place,
    WorkingMemory,
)

from .backward import Step


@attrs.define
class Kept:
    """One kept tensor as it stands after the changes so far."""

    part: str
    name: str
    nbytes: float
    place: Place = Place.DEVICE
    ahead: int = 0
    """On the host: how many layers before its own backward it comes back."""
    again: int | None = None
    """Computed again: with the backward of which layer its own forward is repeated."""
    entry_bytes: float | None = None
    """What stands for it where the part is computed again from it, if that is narrower."""

    @property
    def key(self) -> str:
        return f"{self.part}.{self.name}"


@attrs.define
class Ledger:
    """What one kind of rank holds and sends, still to be changed."""

    kept: dict[int, list[Kept]]
    """Layer -> tensors, in the order of the forward."""
    steps: dict[int, tuple[Step, ...]]
    """Layer -> the steps of its backward."""
    parameters: list[ParameterCost]
    messages: list[Messages]
    flops: float
    part_flops: dict[int, dict[str, float]]
    """Layer -> part -> forward FLOPs of one micro-batch."""
    part_messages: dict[int, dict[str, list[Messages]]]
    """Layer -> part -> messages of its forward in one step."""
    num_micro_batches: int
    repeated: set[tuple[int | None, str]] = attrs.field(factory=set)
    """(layer, part) of every forward that runs again in backward."""
    working: list[WorkingMemory] = attrs.field(factory=list)
    removed: list[str] = attrs.field(factory=list)
    buffers: dict[str, float] = attrs.field(factory=dict)
    host_buffers: dict[str, float] = attrs.field(factory=dict)
    host_is_device: bool = False
    in_their_place: list[Messages] = attrs.field(factory=list)
    """Of plugins: what stands in the place of some of the messages."""

    def apply(self, change: CostChange) -> None:
        """One plugin's change; ``CostChange`` says what each field means."""
        for kept in change.kept:
            self._move(kept)
        added = change.kept_added_layers
        for layer in self.kept if added is None else [n for n in added if n in self.kept]:
            self.kept[layer] += [self._added(tensor, layer) for tensor in change.kept_added]
        for recomputation in change.recomputed:
            layers = self._layers(recomputation.layers)
            self.recompute(recomputation.parts, [(layer,) for layer in layers])
        self.working += change.working
        self.removed += change.working_removed
        self.buffers |= change.buffers
        self.host_buffers |= change.host_buffers
        self.host_is_device |= change.host_is_device
        self.parameters = [
            attrs.evolve(p, trained=False) if _matches(p.key, change.frozen) else p
            for p in self.parameters
        ]
        self.parameters += change.parameters
        self.messages += [m for m in change.messages if not m.instead_of]
        self.in_their_place += [m for m in change.messages if m.instead_of]
        self.flops += change.flops

    def sent(self) -> list[Messages]:
        """All messages, with what plugins send in the place of some."""
        found: list[Messages] = []
        for plain in self.messages:
            others = [new for new in self.in_their_place if _replaces(new, plain)]
            found += (
                [_in_place_of(plain, new) for new in others if new.calls] if others else [plain]
            )
        return found

    def recompute(self, parts: Sequence[str], groups: Iterable[Sequence[int]]) -> None:
        """Keep of the parts only what enters the first of them; each group of layers runs again as
        one, when the backward of its last layer begins, and keeps what enters its first layer."""
        for group in groups:
            for layer in group:
                inside = [t for t in self.kept[layer] if _matches(t.part, parts)]
                first = inside[0] if inside and layer == group[0] else None
                if first is not None and first.entry_bytes is not None:
                    entry = Kept(part=first.part, name="entry", nbytes=first.entry_bytes)
                    self.kept[layer].append(entry)
                    first = None
                for tensor in inside:
                    if tensor is not first and tensor.place is not Place.NOWHERE:
                        tensor.place, tensor.again = Place.NOWHERE, group[-1]
                repeated = [p for p in self.part_flops[layer] if _matches(p, parts)]
                self.repeated.update((layer, part) for part in repeated)
                self.flops += self.num_micro_batches * sum(
                    self.part_flops[layer].pop(part) for part in repeated
                )
                for part in repeated:
                    self.messages += self.part_messages[layer].pop(part, [])

    def working_bytes(self, step: Step | None, moment: Moment, part: str = "") -> float:
        """Working memory of one step, or of a moment outside of the layers."""
        name, own = (part, 0.0) if step is None else (step.part, step.working)
        if step is not None and _matches(step.key, self.removed):
            own = 0.0
        return own + sum(
            w.nbytes
            for w in self.working
            if w.moment is moment
            and (w.part in (name, step and step.key) or (step is None and not part))
        )

    def forward_bytes(self) -> dict[str, float]:
        """Part of a layer -> what its forward holds for a moment, where somebody says so."""
        found: dict[str, float] = {}
        for w in self.working:
            if w.moment is Moment.FORWARD:
                found[w.part] = found.get(w.part, 0.0) + w.nbytes
        return found

    def _added(self, tensor: KeptTensor, layer: int) -> Kept:
        """A plugin's tensor; where its part is computed again, so is this one."""
        beside = (t.again for t in self.kept[layer] if t.part == tensor.part)
        again = next((layer for layer in beside if layer is not None), None)
        place = Place.DEVICE if again is None else Place.NOWHERE
        return Kept(
            part=tensor.part, name=tensor.name, nbytes=tensor.nbytes, place=place, again=again
        )

    def _move(self, change: KeptChange) -> None:
        for layer in self._layers(change.layers):
            for tensor in self.kept[layer]:
                wanted = _matches(tensor.key, change.tensors) and tensor.nbytes >= change.at_least
                if not wanted or tensor.place is Place.NOWHERE:
                    continue
                tensor.nbytes *= change.factor
                if change.place is not Place.DEVICE:
                    tensor.place, tensor.ahead = change.place, change.ahead
            self.kept[layer] = [
                t for t in self.kept[layer] if t.place is not Place.NOWHERE or t.again is not None
            ]

    def _layers(self, wanted: tuple[int, ...] | None) -> list[int]:
        return [layer for layer in self.kept if wanted is None or layer in wanted]


def _replaces(new: Messages, plain: Messages) -> bool:
    is_its = (new.instead_of, new.group) == (plain.operation, plain.group)
    return is_its and fnmatchcase(plain.why, new.why)


def _in_place_of(plain: Messages, new: Messages) -> Messages:
    return attrs.evolve(
        plain,
        operation=new.operation,
        calls=plain.calls * new.calls,
        sent_bytes=plain.sent_bytes * new.sent_bytes,
        hidden=new.hidden,
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
