"""The saved tensors of one forward of one layer, between that forward and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
from torch import Tensor

from ascend_run.ops.saved_tensors import without_graph
from ascend_run.ops.transfer.saved_storages import Block, SavedView

if TYPE_CHECKING:
    from .swapper import Swapper


@attrs.frozen(eq=False, kw_only=True)
class _Handle(SavedView):
    """What autograd saves, with the forward that saves it."""

    call: Call


class Call:
    """One forward of one layer's modules, until their backward is done.

    Its states are, in order: ``leaving`` (copies in progress, device storage still held), ``away``,
    ``coming`` and ``here``. A backward that starts before the next forward finds it ``leaving`` and
    uses the device storage as it is.

    Args:
        number: Index of this forward in the step, from 0.
        layer: Chunk of the pipeline rank, and index in it.
        resident: Addresses of storages that stay on the device.
        previous: The forward of the layer before, in the same chunk and micro-batch.
    """

    def __init__(
        self,
        swapper: Swapper,
        *,
        number: int,
        layer: tuple[int, int],
        resident: frozenset[int],
        previous: Call | None,
    ) -> None:
        self.state = "leaving"
        self.number = number
        self.layer = layer
        self.resident = resident
        self._swapper = swapper
        self._previous = weakref.ref(previous) if previous is not None else None
        # By address, unique only while the storage is held, and version of the contents.
        self._leaving: dict[tuple[int, int], Block] = {}
        # Weak: a block is freed with the last autograd handle that refers to it.
        self._blocks: list[weakref.ref[Block]] = []

    @property
    def previous(self) -> Call | None:
        """The forward of the layer before, if its backward is still pending."""
        return self._previous() if self._previous is not None else None

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """Return what autograd saves: a handle, or the tensor itself if it is not worth a copy."""
        if not self._swapper.takes(tensor):
            return without_graph(tensor)
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor._version
        if key[0] in self.resident:
            return without_graph(tensor)
        block = self._leaving.get(key)
        if block is None:
            block = self._swapper.send(self, storage)
            self._leaving[key] = block
            self._blocks.append(weakref.ref(block))
        return _Handle(
            call=self,
            block=block,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    @staticmethod
    def unpack(kept: Tensor | _Handle) -> Tensor:
        """Return the saved tensor, bitwise unchanged."""
        if isinstance(kept, Tensor):
            return kept
        kept.call.make_ready()
        return kept.tensor()

    def let_go(self) -> None:
        """Drop the device storages, after their copies are complete."""
        for block in self._leaving.values():
            block.device = None
        self._leaving.clear()
        self.state = "away"

    def fetch(self) -> None:
        """Start copying to the device every block that is still needed and not there."""
        for block in self._live_blocks():
            block.device = block.still_held()
            if block.device is None:
                assert block.host is not None
                block.device = self._swapper.bring_back(block.host)
        self.state = "coming"

    def make_ready(self) -> None:
        """Make the device storages readable, and prefetch the next layers."""
        if self.state == "here":
            return
        if self.state == "leaving":
            self._swapper.keep(self)
            self._leaving.clear()
        else:
            if self.state == "away":
                self._swapper.late_fetches += 1
                self.fetch()
            self._swapper.copier.wait_device()
        self.state = "here"
        self._swapper.order.came(self.number)
        ahead = self._swapper.expected_after(self)
        for _ in range(self._swapper.prefetch):
            if ahead is None:
                return
            if ahead.state == "away":
                ahead.fetch()
            ahead = self._swapper.expected_after(ahead)

    def _live_blocks(self) -> Iterator[Block]:
        for reference in self._blocks:
            if (block := reference()) is not None:
                yield block
