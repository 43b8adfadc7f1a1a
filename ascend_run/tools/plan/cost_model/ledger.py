"""The plain model's estimate for the ranks of one stage, to which plugins' changes are applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final

import attrs

from ascend_run.plugin_api.contracts import (
    Communication,
    CostChange,
    ParameterCost,
    Phase,
    RecomputedAhead,
    SavedChange,
    SavedTensor,
    Storage,
    WorkingMemory,
)

from .backward import Step
from .collectives import replacement, replaces, share_of
from .schedule import Waiting, reused_forwards

OFFLOADED: Final = (Storage.HOST, Storage.FILE)
"""Where saved activations take no device memory."""
_RECOMPUTATION = "recomputation"
"""Part of what is saved for the recomputation of a whole layer."""


@attrs.define
class Saved:
    """A saved activation after the changes so far."""

    part: str
    name: str
    nbytes: float
    storage: Storage = Storage.DEVICE
    ahead: int = 0
    """Offloaded: how many layers before its own backward it is prefetched; -1: with its part's."""
    again: int | None = None
    """If recomputed: the layer at whose backward its forward is recomputed."""
    discarded: bool = False  #: Whether it is recomputed without the rest of its part.
    added: bool = False
    """Whether a plugin saves it: if another one drops it, it is recomputed."""
    starts: bool = False
    """Whether others are recomputed from it: it stays, whether or not a gradient needs it."""

    @property
    def key(self) -> str:
        return f"{self.part}.{self.name}"


@attrs.frozen(kw_only=True)
class Offload:
    """Saved activations that one step copies off the device, and back. Unit: bytes."""

    left: float
    returned: float
    """Those of them that are not on the device anyway when their backward begins."""
    late: float
    """Part of ``returned`` that is not prefetched."""


@attrs.define
class Ledger:
    """Mutable estimate of memory, communication and FLOPs of the ranks of one stage."""

    saved: dict[int, list[Saved]]
    """Layer -> tensors, in the order of the forward."""
    steps: dict[int, tuple[Step, ...]]
    """Layer -> the steps of its backward."""
    parameters: list[ParameterCost]
    communication: list[Communication]
    flops: float
    part_flops: dict[int, dict[str, float]]
    """Layer -> part -> forward FLOPs of one micro-batch."""
    part_communication: dict[int, dict[str, list[Communication]]]
    """Layer -> part -> communication of its forward in one step."""
    num_microbatches: int
    repeated: set[tuple[int | None, str]] = attrs.field(factory=set)
    """(layer, part) of every forward that is recomputed in backward."""
    working: list[WorkingMemory] = attrs.field(factory=list)
    removed: list[str] = attrs.field(factory=list)
    buffers: dict[str, float] = attrs.field(factory=dict)
    host_buffers: dict[str, float] = attrs.field(factory=dict)
    host_is_device: bool = False
    main_param_bytes: float = 4.0  #: Of an element of the master weights.
    optimizer_storage: Storage = Storage.DEVICE
    """Of optimizer states between steps."""
    optimizer_bytes: float | None = None
    """The most that is there of states, which the device then addresses; None: all of them and the
    master weights, which are copied."""
    optimizer_elements: float = 0.0
    """Whose optimizer states are on the device at once, if not between steps."""
    moved: list[SavedChange] = attrs.field(factory=list)
    """What was applied: plugins that share what they do return equal changes of it."""
    replacements: list[Communication] = attrs.field(factory=list)
    """Communication of plugins that replaces some of the plain model's."""
    again: dict[int, list[Communication]] = attrs.field(factory=dict)
    """Layer -> what its recomputed parts send once more."""
    again_flops: dict[int, float] = attrs.field(factory=dict)
    """Layer -> FLOPs of its recomputed parts in one step."""
    whole: set[int] = attrs.field(factory=set)  #: Layers that are recomputed whole.
    shares: dict[int, float] = attrs.field(factory=dict)
    """Layer -> share of its forwards that are recomputed, if not all of them are."""
    ahead: RecomputedAhead | None = None
    """How they are recomputed, if not by their own backward in every forward."""

    @property
    def elements_at_once(self) -> float | None:
        """Elements whose optimizer states are on the device at once; None: all, always."""
        return self.optimizer_elements if self.optimizer_storage in OFFLOADED else None

    def apply(self, change: CostChange) -> None:
        """Apply one plugin's change."""
        for saved in change.saved:
            if saved not in self.moved:
                self.moved.append(saved)
                self._move(saved)
        added = change.saved_added_layers
        for layer in self.saved if added is None else [n for n in added if n in self.saved]:
            self.saved[layer] += [
                self._added(tensor, layer)
                for tensor in change.saved_added
                if tensor.part != _RECOMPUTATION or layer in self.whole
            ]
        self.working += change.working
        self.removed += change.working_removed
        self.buffers |= change.buffers
        self.host_buffers |= change.host_buffers
        self.host_is_device |= change.host_is_device
        if change.main_param_bytes is not None:
            self.main_param_bytes = change.main_param_bytes
        if change.optimizer_storage is not None:
            self.optimizer_storage = change.optimizer_storage
            self.optimizer_bytes = change.optimizer_bytes
            self.optimizer_elements = change.optimizer_elements
        self.parameters = [
            attrs.evolve(
                p,
                trained=p.trained and not _matches(p.key, change.frozen),
                nbytes=change.stored.get((p.layer or 0, p.key), p.nbytes),
            )
            for p in self.parameters
        ]
        self.parameters += change.parameters
        for sent in change.communication:
            self.communication += [] if sent.replaces else self._with_repeated(sent)
        self.replacements += [m for m in change.communication if m.replaces]
        self.flops += change.flops

    def sent(self) -> list[Communication]:
        """Return all communication, after plugins' replacements."""
        found: list[Communication] = []
        again = (m for sending in self.again.values() for m in sending)
        repeated = [(m, (m.why, f"{m.why}, again")) for m in again]
        for plain, names in [*((m, (m.why,)) for m in self.communication), *repeated]:
            others = [new for new in self.replacements if replaces(new, plain, names)]
            found += [replacement(plain, new) for new in others if new.calls] if others else [plain]
        return found

    def recompute(self, parts: Sequence[str], groups: Iterable[Sequence[int]]) -> None:
        """Recompute the parts from the input of the first one. Each group of layers is recomputed
        at once, from the input of its first layer, when the backward of its last layer begins."""
        for group in groups:
            for layer in group:
                inside = [t for t in self.saved[layer] if _matches(t.part, parts)]
                first = inside[0] if inside and layer == group[0] else None
                for tensor in inside:
                    tensor.starts |= tensor is first
                    if tensor is not first and tensor.storage is not Storage.NONE:
                        tensor.storage, tensor.again = Storage.NONE, group[-1]
                repeated = [p for p in self.part_flops[layer] if _matches(p, parts)]
                self.repeated.update((layer, part) for part in repeated)
                self.repeated.update((layer, tensor.part) for tensor in inside)
                flops = self.num_microbatches * sum(
                    self.part_flops[layer].pop(part) for part in repeated
                )
                self.flops += flops
                self.again_flops[layer] = self.again_flops.get(layer, 0.0) + flops
                sending = self.part_communication[layer]  # a dispatcher has no FLOPs
                for part in [p for p in sending if _matches(p, parts)]:
                    self.again.setdefault(layer, []).extend(sending.pop(part))
                if "*" in parts:
                    self.whole.add(layer)

    def recompute_ahead(self, ahead: RecomputedAhead, chunks: Sequence[Sequence[int]]) -> None:
        """Recompute layers before the backward of their chunk, and some of its forwards only."""
        self.ahead = ahead
        for share, layers in zip(ahead.repeated, chunks, strict=bool(ahead.repeated)):
            for layer in layers:
                self.shares[layer] = share
                self.flops -= (1.0 - share) * self.again_flops.get(layer, 0.0)
                self.again[layer] = [share_of(share, m) for m in self.again.get(layer, ()) if share]

    def discard(self, tensors: Sequence[str], layer: int) -> None:
        """Do not save these tensors of a layer: its backward recomputes them, without a matmul."""
        for tensor in self.saved[layer]:
            if _matches(tensor.key, tensors) and tensor.storage is not Storage.NONE:
                tensor.storage, tensor.again, tensor.discarded = Storage.NONE, layer, True

    def working_bytes(self, step: Step | None, phase: Phase, part: str = "") -> float:
        """Return the working memory of one step, or of a phase outside of the layers."""
        name, own = (part, 0.0) if step is None else (step.part, step.working)
        if step is not None and _matches(step.key, self.removed):
            own = 0.0
        return own + sum(
            w.nbytes
            for w in self.working
            if w.phase is phase
            and (w.part in (name, step and step.key) or (step is None and not part))
        )

    def offloads(self, waiting: Sequence[Waiting]) -> dict[Storage, Offload]:
        """Return storage -> what a step copies there and back.

        Args:
            waiting: From ``schedule.in_flight``.
        """
        return {storage: self._offload(storage, waiting) for storage in OFFLOADED}

    def _offload(self, storage: Storage, waiting: Sequence[Waiting]) -> Offload:
        passes, left, returned, late = self.num_microbatches, 0.0, 0.0, 0.0
        last = [*self.saved][-1]
        pairs = [(layer, tensor) for layer, saved in self.saved.items() for tensor in saved]
        for layer, tensor in pairs:
            if tensor.storage is not storage:
                continue
            ahead = bool(tensor.ahead)
            reused = reused_forwards(waiting, passes, prefetched=ahead) if layer == last else 0
            left += passes * tensor.nbytes
            returned += (passes - reused) * tensor.nbytes
            late += 0.0 if ahead else (passes - reused) * tensor.nbytes
        return Offload(left=left, returned=returned, late=late)

    def forward_bytes(self) -> dict[str, float]:
        """Return part of a layer -> working memory of its forward, if there is any."""
        found: dict[str, float] = {}
        for w in self.working:
            if w.phase is Phase.FORWARD:
                found[w.part] = found.get(w.part, 0.0) + w.nbytes
        return found

    def _added(self, tensor: SavedTensor, layer: int) -> Saved:
        """A plugin's tensor, which is recomputed if its part is."""
        own = (t for t in self.saved[layer] if not (t.discarded or t.added))
        again = next((t.again for t in own if t.part == tensor.part and t.again is not None), None)
        storage = Storage.DEVICE if again is None else Storage.NONE
        return Saved(
            part=tensor.part,
            name=tensor.name,
            nbytes=tensor.nbytes,
            storage=storage,
            again=again,
            added=True,
        )

    def _with_repeated(self, sent: Communication) -> Iterator[Communication]:
        """Yield a plugin's communication, and, if it is of a part's forward, that of the share of
        the layers that are recomputed."""
        yield sent
        part = sent.why.partition(", forward")[0]
        layers = [n for n, saved in self.saved.items() if any(t.part == part for t in saved)]
        recomputed = [layer for layer in layers if (layer, part) in self.repeated]
        if repeated := sum(self.shares.get(layer, 1.0) for layer in recomputed):
            yield share_of(repeated / len(layers), sent)

    def _move(self, change: SavedChange) -> None:
        for layer in [n for n in self.saved if change.layers is None or n in change.layers]:
            for tensor in [*self.saved[layer]]:
                wanted = _matches(tensor.key, change.tensors) and tensor.nbytes >= change.at_least
                if wanted and tensor.again is not None and change.kept:
                    self.saved[layer].append(_kept_of(tensor, change.kept))
                stays = tensor.starts and change.storage is Storage.NONE
                if not wanted or stays or tensor.storage is Storage.NONE:
                    continue
                if change.storage in OFFLOADED and (layer, tensor.part) in self.repeated:
                    continue  # what is recomputed there is not saved
                tensor.nbytes *= change.factor
                if change.storage is not Storage.DEVICE:
                    tensor.storage, tensor.ahead = change.storage, change.ahead
                if tensor.added and change.storage is Storage.NONE:
                    tensor.again = layer
            self.saved[layer] = [
                t for t in self.saved[layer] if t.storage is not Storage.NONE or t.again is not None
            ]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _kept_of(tensor: Saved, share: float) -> Saved:
    """Take a share from a tensor that is recomputed, and return what then is kept."""
    kept = attrs.evolve(tensor, nbytes=share * tensor.nbytes, storage=Storage.DEVICE, again=None)
    tensor.nbytes -= kept.nbytes
    return kept
