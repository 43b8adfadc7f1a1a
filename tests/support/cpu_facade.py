"""The platform ``cpu`` without a run: its device activated and its patches applied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ascend_run.core.hooks import Hooks
from ascend_run.core.patches import applied_patches
from ascend_run.plugins.platforms.cpu import Cpu
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.plugins.platforms.cpu.options import CpuOptions


@contextmanager
def cpu_facade() -> Iterator[CpuDevice]:
    """Make Megatron use the CPU as its accelerator in this block."""
    hooks = Hooks([Cpu(CpuOptions())])
    device = hooks.require("ascend_device", local_rank=0)
    device.activate()
    try:
        with applied_patches(hooks):
            yield device
    finally:
        device.deactivate()
