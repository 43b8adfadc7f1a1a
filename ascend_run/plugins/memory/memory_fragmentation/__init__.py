"""Long-lived tensors in a memory pool of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

from ascend_run.plugin_api import (
    Device,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    RunContext,
    RunPhase,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from .trace import AllocationTrace

Pool: TypeAlias = Callable[[], AbstractContextManager[None]]
_STAYS: Final = (RunPhase.MODEL, RunPhase.OPTIMIZER)
_CREATES_STATES: Final = (RunPhase.UPDATE, RunPhase.CHECKPOINT)
_OF_A_STEP: Final = (RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.REDUCTION, RunPhase.UPDATE)
_SETTINGS: Final[Mapping[str, Sequence[str]]] = {
    "cuda": ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "npu": ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}
"""Platform -> variables with the settings of its allocator, of which it reads one."""
_EXPANDABLE: Final = "expandable_segments:"


@attrs.frozen(kw_only=True)
class MemoryFragmentationConfig:
    """Options, set by ``plugins.memory-fragmentation.<field>=<value>``."""

    expandable_segments: bool = False
    """Let the device's allocator grow its segments, so that less is left between them."""
    traced_steps: int = attrs.field(default=2, validator=attrs.validators.ge(0))
    """On a device without pools, such as the CPU: the steps from the first one on whose allocations
    are recorded, and replayed by a model of the allocator. Unit: steps."""


class MemoryFragmentation:
    """Allocate weights, gradient buffers and optimizer states in a pool apart from activations and
    temporary tensors, so that none of them lies where a longer free range would be.

    Cost: free memory of one pool is not used for the other. Numerics: bitwise neutral. Source:
    MindSpeed's ``--memory-fragmentation``, whose pools are here those of the device's allocator.
    """

    manifest = Manifest(
        name="memory-fragmentation",
        summary="allocate long-lived tensors in a memory pool of their own",
        conflicts={
            "compile": "what a compiled graph allocates is not seen; leave one out",
            "swap-optimizer": "states that leave the device leave their pool unused; leave one out",
        },
        exercised_by="train with it on a GPU or NPU: the CPU has no pools, and plugins.memory-"
        "fragmentation.traced_steps > 0 shows what they would save",
        numerics=Numerics.BITWISE,
        platforms={"cpu": Support.EMULATED, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=3,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(LegacyFlag(flag="--memory-fragmentation"),),
        source="MindSpeed, docs/features/memory-fragmentation.md",
    )
    config_class = MemoryFragmentationConfig

    def __init__(self, config: MemoryFragmentationConfig) -> None:
        self.config = config
        self._device: Device | None = None
        self._pool: Pool | None = None
        self._trace: AllocationTrace | None = None
        self._steps = 0

    @hookimpl
    def ascend_environment(self, config: RunConfig) -> Mapping[str, str]:
        names = _SETTINGS.get(config.platform, ())
        if not (names and self.config.expandable_segments):
            return {}
        name = next((name for name in names if name in os.environ), names[0])
        return {name: _with_expandable_segments(os.environ.get(name, ""))}

    @hookimpl
    def ascend_phase(
        self, context: RunContext, phase: RunPhase
    ) -> Callable[[], AbstractContextManager[None]] | None:
        if context.device is not self._device:
            self._begin(context.device)
        pool, may_stay = self._pool, phase in (*_STAYS, *_CREATES_STATES)
        if pool is not None:
            return partial(_in_pool, pool, context, phase) if may_stay else None
        seen = self._trace is not None and (may_stay or phase in _OF_A_STEP)
        return partial(self._recorded, context, phase) if seen else None

    @hookimpl
    def ascend_after_step(self) -> None:
        self._steps += 1
        if self._steps >= self.config.traced_steps:
            self._report()

    @hookimpl
    def ascend_after_run(self) -> None:
        self._report()  # of a run with fewer steps

    def _begin(self, device: Device) -> None:
        self._device, self._pool = device, device.memory_pool()
        if self._pool is None and self.config.traced_steps:
            from .trace import AllocationTrace

            self._trace, self._steps = AllocationTrace(device.torch_device), 0

    def _recorded(self, context: RunContext, phase: RunPhase) -> AbstractContextManager[None]:
        stays = _allocates_what_stays(context, phase)
        if self._trace is None or (phase is RunPhase.CHECKPOINT and not stays):
            return nullcontext()
        return self._trace.within(long_lived=stays)

    def _report(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        one_pool, two_pools = trace.end()
        import structlog

        structlog.get_logger().info(
            "memory-fragmentation.replayed",
            steps=self._steps,
            allocated_bytes=one_pool.allocated,
            one_pool_bytes=one_pool.reserved,
            two_pools_bytes=two_pools.reserved,
        )


def _with_expandable_segments(given: str) -> str:
    """Return settings of the allocator in which this one is on, and the others as they are."""
    settings = [*filter(None, map(str.strip, given.split(",")))]
    wanted = f"{_EXPANDABLE}True"
    if {word for word in settings if word.startswith(_EXPANDABLE)} == {wanted}:
        return given
    others = [word for word in settings if not word.startswith(_EXPANDABLE)]
    return ",".join((*others, wanted))


def _in_pool(pool: Pool, context: RunContext, phase: RunPhase) -> AbstractContextManager[None]:
    return pool() if _allocates_what_stays(context, phase) else nullcontext()


def _allocates_what_stays(context: RunContext, phase: RunPhase) -> bool:
    """Return whether most of what a phase allocates lasts for the run.

    The first update, or the checkpoint that a run resumes from, creates the optimizer's states.
    """
    if phase in _STAYS:
        return True
    from ascend_run.ops.optimizer_states import torch_optimizers

    return phase in _CREATES_STATES and not any(
        state
        for model in context.models.values()
        for optimizer in torch_optimizers(model.optimizer)
        for state in optimizer.state.values()
    )
