"""What is measured of one layer, from the calls of its parts."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import attrs
from torch import Tensor, nn

from .treatment import NOTHING, READERS, Treatment

NEVER: Final = 1 << 62
"""Bytes of a treatment that is not possible for a layer."""


class Layer:
    """What is known of one layer on this rank, and what becomes of its parts.

    Args:
        place: Chunk of the pipeline rank, and index in it.
    """

    def __init__(self, module: nn.Module, place: tuple[int, int]) -> None:
        self.module, self.place = module, place
        self.chosen: Treatment = NOTHING
        self.nbytes: dict[Treatment, int] = {}
        """Treatment -> bytes that the layer keeps, the most of all forwards."""
        self.moved: dict[str, int] = {}
        """Part -> bytes that leave the device if it is swapped, the most of all forwards."""
        self.nanoseconds: dict[str, int] = {}
        """Part -> time of its forward, the least of all."""
        self.waiting = 0
        """Forwards whose backward has not begun."""

    @property
    def index(self) -> int:
        """Its index in the whole model."""
        return int(getattr(self.module, "layer_number", 0)) - 1

    @property
    def has_experts(self) -> bool:
        return hasattr(getattr(self.module, "mlp", None), "router")

    def add(
        self,
        nbytes: Mapping[Treatment, int],
        moved: Mapping[str, int],
        nanoseconds: Mapping[str, int],
    ) -> None:
        """Take in what one forward has shown."""
        for treatment, size in nbytes.items():
            self.nbytes[treatment] = max(size, self.nbytes.get(treatment, 0))
        for part, size in moved.items():
            self.moved[part] = max(size, self.moved.get(part, 0))
        for part, spent in nanoseconds.items():
            self.nanoseconds[part] = min(spent, self.nanoseconds.get(part, spent))


class Handle:
    """What autograd saves in place of a tensor; it is freed with the node that saves it.

    Args:
        can_leave: Whether the device would have room for other things if the tensor left it.
    """

    def __init__(self, tensor: Tensor, *, can_leave: bool) -> None:
        self.tensor, self.can_leave = tensor, can_leave


@attrs.define(eq=False)
class Call:
    """One call of a part."""

    part: str
    given: Tensor  #: Its input.
    inner: list[Call] = attrs.field(factory=list)  #: The calls within it.
    handles: list[weakref.ref[Handle]] = attrs.field(factory=list)
    result: Tensor | None = None
    nanoseconds: int = 0
    saved: dict[int, Tensor] = attrs.field(factory=dict)
    """Storage -> a tensor in it that is kept for backward; by those, no address is used again."""
    stays: set[int] = attrs.field(factory=set)
    """Those of them that cannot be swapped."""

    def end(self, result: Tensor, nanoseconds: int) -> None:
        """Take in what is kept now. Of graphs that are gone, as that of a forward which is to be
        recomputed, nothing is."""
        self.result, self.nanoseconds = result, nanoseconds
        for reference in self.handles:
            if handle := reference():
                key = storage_of(handle.tensor)
                self.saved[key] = handle.tensor
                if not handle.can_leave:
                    self.stays.add(key)

    def sizes(self, *, swapped: bool = False) -> dict[int, int]:
        """Return storage -> bytes of what the call itself keeps.

        Args:
            swapped: Leave out what then is elsewhere.
        """
        keys = self.saved.keys() & self.stays if swapped else self.saved.keys()
        return {key: self.saved[key].untyped_storage().nbytes() for key in keys}

    def moved(self, lasting: Collection[int]) -> int:
        """Return the bytes that leave if what it saves is swapped."""
        gone = self.saved.keys() - self.stays - {*lasting}
        return sum(self.saved[key].untyped_storage().nbytes() for key in gone)


def kept(call: Call, treatment: Treatment, lasting: Collection[int]) -> int:
    """Return the bytes that a layer keeps with a treatment; NEVER if that is not possible.

    A part that is recomputed keeps its input, and nothing else that it alone saves; the output of a
    norm that is recomputed is freed. Of a part that is swapped nothing stays but what cannot leave.

    Args:
        call: Of the layer.
        lasting: Storages that are not a layer's own.
    """
    calls = {found.part: found for found in call.inner} | {"": call}
    again = [calls[part] for part in treatment.recomputed if part in calls]
    away = [calls[part] for part in treatment.swapped if part in calls]
    if (
        len(again) + len(away) < treatment.num_parts
        or not all(part.given.requires_grad for part in again)
        or not all(part.moved(lasting) for part in away)
    ):
        return NEVER
    if call in again:
        return call.given.untyped_storage().nbytes()
    sizes = {storage_of(part.given): part.given.untyped_storage().nbytes() for part in again}
    for found in calls.values():
        sizes |= {} if found in again else found.sizes(swapped=found in away)
    for norm in (part for part in again if part.part in READERS):
        assert norm.result is not None
        reader = calls.get(READERS[norm.part])
        freed = storage_of(norm.result)
        others = (found for found in calls.values() if found not in (norm, reader))
        is_read_elsewhere = any(freed in found.saved for found in others)
        if reader is None or is_read_elsewhere or freed == storage_of(norm.given):
            return NEVER
        sizes.pop(freed, None)
    return sum(sizes[key] for key in sizes.keys() - {*lasting})


def lasting_of(
    module: nn.Module, given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[int]:
    """Yield the storages that are not a layer's own: its weights, and masks and tables that it is
    given."""
    yield from map(storage_of, (*module.parameters(), *module.buffers()))
    for value in (*args, *kwargs.values()):
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, Tensor) and tensor is not given:
                yield storage_of(tensor)


def storage_of(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
