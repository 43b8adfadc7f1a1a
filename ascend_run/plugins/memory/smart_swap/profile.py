"""Record when each storage of a step is saved and used."""

from __future__ import annotations

import time
from collections.abc import Collection

import attrs
from torch import Tensor

from ascend_run.ops.transfer.saved_storages import Block
from ascend_run.ops.transfer.swap_plan import SavedStorage
from ascend_run.plugin_api import Device


@attrs.define(eq=False, kw_only=True)
class NumberedBlock(Block):
    """One storage of a step."""

    index: int  #: In the order in which the storages of a step are saved.


@attrs.define
class Profile:
    """The events of a step."""

    events: list[tuple[bool, int]] = attrs.field(factory=list)
    """Whether a storage is saved (or used), and its index."""
    times: list[float] = attrs.field(factory=list)
    """Of the events, from the first one on. Unit: seconds."""
    nbytes: list[int] = attrs.field(factory=list)  #: Of each storage.
    parts: list[str] = attrs.field(factory=list)  #: In which part of a layer it is saved.

    def storages(self, held: Collection[int]) -> list[SavedStorage]:
        """Return them for the plan.

        Args:
            held: Those that something else holds on the device, so that moving them frees nothing.
        """
        saves: dict[int, list[int]] = {}
        uses: dict[int, list[int]] = {}
        for at, (is_save, index) in enumerate(self.events):
            (saves if is_save else uses).setdefault(index, []).append(at)
        found = []
        for index, nbytes in enumerate(self.nbytes):
            saved, used = saves[index], uses.get(index) or saves[index][-1:]
            found.append(
                SavedStorage(
                    nbytes=nbytes,
                    saved=saved[0],
                    settled=saved[-1],
                    used=used[0],
                    freed=used[-1],
                    movable=saved[-1] < used[0] and index not in held,
                )
            )
        return found


class ProfiledStep:
    """A step in which nothing leaves the device, and every event is timed.

    Args:
        device: Whose kernels are waited for at each event.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begin = 0.0
        self.profile = Profile()

    def saved(self, block: NumberedBlock, part: str, tensor: Tensor) -> None:
        """Note that a tensor in a storage has been saved."""
        if block.index == len(self.profile.nbytes):
            self.profile.nbytes.append(block.nbytes)
            self.profile.parts.append(part)
        self._note(is_save=True, index=block.index)

    def used(self, block: NumberedBlock) -> None:
        """Note that a storage is about to be used."""
        self._note(is_save=False, index=block.index)

    def finish(self) -> None:
        """Do nothing: no copy is pending."""

    def _note(self, *, is_save: bool, index: int) -> None:
        self._device.synchronize()
        now = time.perf_counter()
        profile = self.profile
        self._begin = self._begin if profile.times else now
        profile.events.append((is_save, index))
        profile.times.append(now - self._begin)
