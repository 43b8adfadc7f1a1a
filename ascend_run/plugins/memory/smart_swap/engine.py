"""Profile a step, and swap in later ones what autograd saves, as planned from it.

While a module runs forward, autograd passes every tensor that it saves to ``Engine.pack`` and saves
the result instead. The result is a view without memory: it refers to the block of a storage, which
is on the device or away. ``Engine.unpack`` returns the tensor again, from the same bytes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import structlog
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.ops.saved_tensors import without_graph
from ascend_run.ops.transfer.saved_storages import (
    SavedView,
    addresses,
    arguments_that_stay,
    can_leave,
    whole,
)
from ascend_run.ops.transfer.swap_plan import Link, SwapPlan, plan_swaps
from ascend_run.plugin_api import Device, Forward, ForwardLink
from ascend_run.plugins.memory import in_mib

from .copy_streams import CopyStreams
from .planned_step import PlannedStep
from .profile import NumberedBlock, Profile, ProfiledStep

Step: TypeAlias = ProfiledStep | PlannedStep
MOST_PROFILES: Final = 3
"""Steps that are profiled in a row without one that comes out as planned."""


class Engine:
    """Swaps the saved tensors of all wrapped modules of one rank.

    Args:
        min_bytes: Smaller storages stay on the device. Unit: bytes.
        warmup_steps: Steps before the one that is profiled.
        budget: Of saved bytes on the device. Unit: bytes.
        link: Its speeds; None: measured when a step has been profiled.
    """

    def __init__(
        self, device: Device, *, min_bytes: int, warmup_steps: int, budget: int, link: Link | None
    ) -> None:
        self.streams = CopyStreams(device)
        self.plan: SwapPlan | None = None
        self.step: Step | None = None
        """The present step; None: nothing is looked at."""
        self._device, self._min_bytes, self._budget = device, min_bytes, budget
        self._link, self._warm_up = link, warmup_steps
        self._profile = Profile()
        self._unfollowed = 0
        """Profiles in a row after which no step came out as planned."""
        self._held: frozenset[int] = frozenset()
        """Storages that something else holds on the device."""
        self._reported = self._under_way = False
        self._count = 0
        # A storage is not replaced by another one while its block refers to it, if only weakly.
        self._known: weakref.WeakValueDictionary[tuple[int, int], NumberedBlock] = (
            weakref.WeakValueDictionary()
        )
        """Storage and version of its contents -> its block."""
        self._stays: dict[nn.Module, frozenset[int]] = {}
        """Module -> addresses of its parameters and buffers in this step."""

    def links(self, layer: nn.Module, parts: Sequence[str]) -> Mapping[str, ForwardLink]:
        """Return links that swap the saved tensors of parts of a layer."""
        found = {part: layer.get_submodule(part) for part in parts}
        wraps = {part: partial(self._watching, module, part) for part, module in found.items()}
        return {part: ForwardLink(wrap=wrap, compilable=False) for part, wrap in wraps.items()}

    def begin_step(self) -> None:
        """Decide what the next step is for; the same if the last one has failed."""
        before, failed = self.step, self._under_way
        self._under_way = True
        if before is not None:
            before.finish()
        self._known.clear()
        self._stays.clear()
        self._count = 0
        if self._warm_up:
            return
        if isinstance(before, PlannedStep):
            self.step = self._planned(self.plan) if failed else self._after(before)
        elif isinstance(before, ProfiledStep) and before.profile.events and not failed:
            self._profile, self._held, self._reported = before.profile, frozenset(), False
            self.step = self._planned()
        elif self._unfollowed < MOST_PROFILES:
            self.step = ProfiledStep(self._device)

    def end_step(self) -> None:
        """Note that the step has come to its end."""
        self._under_way = False
        self._warm_up = max(0, self._warm_up - 1)

    def pack(
        self, step: Step, part: str, stays: frozenset[int], tensor: Tensor
    ) -> Tensor | SavedView:
        """Return what autograd saves: a view, or the tensor itself if it stays."""
        if not can_leave(tensor, self._device.torch_device, self._min_bytes):
            return without_graph(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() in stays or _is_discarded(tensor):
            return without_graph(tensor)
        key = storage._cdata, tensor._version
        block = self._known.get(key)
        if block is None or block.device is None:
            block = self._known[key] = NumberedBlock(
                index=self._count,
                nbytes=storage.nbytes(),
                source=StorageWeakRef(storage),
                device=whole(storage),
            )
            self._count += 1
        step.saved(block, part, tensor)
        return SavedView(
            block=block,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    @staticmethod
    def unpack(step: Step, kept: Tensor | SavedView) -> Tensor:
        """Return the saved tensor, bitwise unchanged."""
        if isinstance(kept, Tensor):
            return kept
        block = kept.block
        assert isinstance(block, NumberedBlock)
        step.used(block)
        return kept.tensor()

    def _watching(self, module: nn.Module, part: str, inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            step = self.step
            if step is None or not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            stays = self._held_by(module) | arguments_that_stay(args, kwargs)
            pack, unpack = partial(self.pack, step, part, stays), partial(self.unpack, step)
            with saved_tensors_hooks(pack, unpack):
                return inner(*args, **kwargs)

        return forward

    def _held_by(self, module: nn.Module) -> frozenset[int]:
        held = self._stays.get(module)
        if held is None:
            held = self._stays[module] = addresses([*module.parameters(), *module.buffers()])
        return held

    def _after(self, done: PlannedStep) -> Step | None:
        """Return the step after a planned one."""
        if done.as_planned:
            self._unfollowed = 0
            if not self._reported:
                self._reported = True
                _log("swapped", bytes=done.sent_bytes, held_elsewhere=len(done.held))
            if done.held <= self._held:
                return self._planned(self.plan)
            self._held |= done.held
            return self._planned()
        self._unfollowed += 1
        if self._unfollowed < MOST_PROFILES:
            _log("differs", late_fetches=done.late_fetches, next="profiles the step again")
            return ProfiledStep(self._device)
        _log(
            "stopped",
            warns=True,
            why=f"steps differ from each other: none of {MOST_PROFILES} profiles fits the next one",
            fix="give all micro-batches one shape, or use swap-attention",
        )
        return None

    def _planned(self, plan: SwapPlan | None = None) -> PlannedStep:
        """Return a step with a plan; None: a new one."""
        if plan is None:
            link = self._link = self._link or self.streams.measured()
            profile = self._profile
            storages = profile.storages(self._held)
            plan = self.plan = plan_swaps(storages, profile.times, link, self._budget)
            self._report(plan, link)
        return PlannedStep(self.streams, self._profile, plan)

    def _report(self, plan: SwapPlan, link: Link) -> None:
        by_part: Counter[str] = Counter()
        for index in plan.away:
            by_part[self._profile.parts[index]] += self._profile.nbytes[index]
        _log(
            "planned",
            storages=len(self._profile.nbytes),
            swapped=len(plan.away),
            swapped_bytes=dict(by_part),
            bytes_before=plan.bytes_before,
            expected_bytes=plan.bytes_at_peak,
            to_host_gb=round(link.to_host / 1e9, 3),
            to_device_gb=round(link.to_device / 1e9, 3),
        )
        if 0 < self._budget < plan.bytes_at_peak:
            _log(
                "over_budget",
                warns=True,
                budget_bytes=self._budget,
                expected_bytes=plan.bytes_at_peak,
                fix="no other copy would be overlapped; set plugins.smart-swap.activation_mb to "
                f"{in_mib(plan.bytes_at_peak)}, or recompute as well",
            )


def _is_discarded(tensor: Tensor) -> bool:
    """Whether another plugin empties its storage until backward."""
    base = tensor if tensor._base is None else tensor._base
    return bool(getattr(base, "ascend_discarded", False))


def _log(event: str, *, warns: bool = False, **fields: object) -> None:
    log = structlog.get_logger()
    (log.warning if warns else log.info)(f"smart-swap.{event}", **fields)
