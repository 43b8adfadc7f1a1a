"""The CPU with a meter: what it computes with, and what it copies, are readings of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Device,
    Manifest,
    Maturity,
    Metrics,
    Numerics,
    Patch,
    PlatformOps,
    ReportPanel,
    RunConfig,
    RunContext,
    Support,
    hookimpl,
)

from .meter import Meter

if TYPE_CHECKING:
    from ascend_run.plugins.platforms.cpu import Cpu


@attrs.frozen(kw_only=True)
class MeteredCpuConfig:
    """Options, set by ``plugins.metered-cpu.<field>=<value>``."""

    operators: bool = True
    """Count the calls of fused operators too, not the copies alone."""


class MeteredCpu:
    """The CPU under another name, which counts what it is asked for.

    Cost: an addition for each call. Numerics: those of the platform ``cpu``, bit for bit.
    """

    manifest = Manifest(
        name="metered-cpu",
        summary="train on the CPU and count calls of operators and copied bytes",
        numerics=Numerics.BITWISE,
        platforms={"metered-cpu": Support.REAL},
        behaves_as="cpu",
        level=0,
        maturity=Maturity.EXPERIMENTAL,
        attention=AttentionFeatures.all_but(),
        requires_api=">=0,<1",
    )
    config_class = MeteredCpuConfig

    def __init__(self, config: MeteredCpuConfig) -> None:
        self.config = config
        self.meter = Meter()

    @hookimpl
    def ascend_environment(self, local_world_size: int) -> Mapping[str, str]:
        return _cpu().ascend_environment(local_world_size=local_world_size)

    @hookimpl
    def ascend_device(self, local_rank: int) -> Device:
        from .device import MeteredDevice

        return MeteredDevice(local_rank, self.meter)

    @hookimpl
    def ascend_patches(self) -> Sequence[Patch]:
        return _cpu().ascend_patches()

    @hookimpl
    def ascend_attention_kernel(self, ops: PlatformOps) -> AttentionKernel:
        return _cpu().ascend_attention_kernel(ops=ops)

    @hookimpl
    def ascend_platform_ops(self, config: RunConfig) -> PlatformOps:
        operators = _cpu().ascend_platform_ops(config=config)
        return self.meter.counting(operators) if self.config.operators else operators

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {"metered-cpu": self._readings}

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return [
            ReportPanel(
                title="Copies between device and host",
                metrics=("metered-cpu/to_host_bytes", "metered-cpu/to_device_bytes"),
                unit="bytes",
            )
        ]

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        """Of this rank, since they were last asked for."""
        return self.meter.take()


def _cpu() -> Cpu:
    """The platform that does the work."""
    from ascend_run.plugins.platforms.cpu import Cpu
    from ascend_run.plugins.platforms.cpu.options import CpuOptions

    return Cpu(CpuOptions())
