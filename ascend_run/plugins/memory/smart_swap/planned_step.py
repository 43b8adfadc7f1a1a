"""Swap the storages of a step as planned, as long as it is the step that was profiled."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from ascend_run.ops.transfer.swap_plan import Copies, SwapPlan

from .copy_streams import CopyStreams
from .profile import NumberedBlock, Profile

_NOTHING: Final = Copies()


class PlannedStep:
    """A step whose storages leave and come back at planned events.

    At the first event that differs from the profile, nothing leaves any more; what is away then is
    copied back when it is used.
    """

    def __init__(self, streams: CopyStreams, profile: Profile, plan: SwapPlan) -> None:
        self._streams, self._profile, self._plan = streams, profile, plan
        self._copies = plan.copies()
        self._at = 0
        self._differs = False
        # Weak: a block is freed with the last autograd handle that refers to it.
        self._blocks: weakref.WeakValueDictionary[int, NumberedBlock] = (
            weakref.WeakValueDictionary()
        )
        self._unsent: dict[int, tuple[Tensor, int]] = {}
        """Storage -> a tensor in it, and the version of its contents when it was saved."""
        self._leaving: list[NumberedBlock] = []
        self._coming: list[NumberedBlock] = []
        self.sent_bytes = 0
        self.late_fetches = 0
        """Storages that were used before their copy back had started."""
        self.held: set[int] = set()
        """Storages that something else held on the device all the time."""

    @property
    def as_planned(self) -> bool:
        """Whether all events of the profile have come, and no other one."""
        return not self._differs and self._at == len(self._profile.events)

    def saved(self, block: NumberedBlock, part: str, tensor: Tensor) -> None:
        """Note that a tensor in a storage has been saved."""
        at = self._reach(is_save=True, block=block)
        if self._differs:
            return
        if block.index in self._plan.away:
            self._blocks[block.index] = block
            self._unsent[block.index] = tensor.detach(), tensor._version
        self._act(at)

    def used(self, block: NumberedBlock) -> None:
        """Make a storage readable, which is about to be used."""
        at = self._reach(is_save=False, block=block)
        if block.device is None:
            self.late_fetches += 1
            self._fetch(block)
        if block in self._coming:
            self._streams.to_device.wait_device()
            self._coming.clear()
        if not self._differs:
            self._act(at)

    def finish(self) -> None:
        """Wait for copies that are in flight."""
        if self._coming:
            self._streams.to_device.wait_device()
            self._coming.clear()
        self._keep_leaving()

    def _reach(self, *, is_save: bool, block: NumberedBlock) -> int:
        at, self._at = self._at, self._at + 1
        events = self._profile.events
        if self._differs:
            return at
        if (
            at >= len(events)
            or events[at] != (is_save, block.index)
            or self._profile.nbytes[block.index] != block.nbytes
        ):
            self._differs = True
            self._keep_leaving()
        return at

    def _act(self, at: int) -> None:
        copies = self._copies.get(at, _NOTHING)
        if copies.released:
            self._streams.to_host.wait_host()
            for gone in self._leaving:
                gone.device = None
            self._leaving.clear()
        self._send(copies.sent)
        for index in copies.fetched:
            if (block := self._blocks.get(index)) is not None and block.device is None:
                self._fetch(block)

    def _send(self, indices: Iterable[int]) -> None:
        for index in indices:
            tensor, version = self._unsent.pop(index)
            block = self._blocks.get(index)
            if block is None or block.device is None or tensor._version != version:
                continue  # freed, or changed since: then it stays
            self._leaving.append(block)
            block.host = self._streams.to_host.to_host(block.device)
            self.sent_bytes += block.nbytes

    def _fetch(self, block: NumberedBlock) -> None:
        block.device = block.still_held()
        if block.device is not None:
            self.held.add(block.index)
            return
        host = block.host
        assert host is not None
        block.device = torch.empty(host.shape, dtype=host.dtype, device=self._streams.device)
        self._streams.to_device.to_device(host, block.device)
        self._coming.append(block)

    def _keep_leaving(self) -> None:
        """Finish the copies to the host, and keep what is copied on the device as well."""
        if self._leaving:
            self._streams.to_host.wait_host()
        self._leaving.clear()
        self._unsent.clear()
