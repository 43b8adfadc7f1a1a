"""The CPU as a platform: gloo ranks, host memory, and a facade that Megatron trains behind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Claim,
    CostChange,
    Device,
    Layout,
    Manifest,
    Maturity,
    Numerics,
    PlatformOps,
    RankKind,
    RunConfig,
    Support,
    hookimpl,
)

_KERNELS_KEPT: Final = 128


class Cpu:
    """Train on host processors alone: the default, so that everything can be tried anywhere."""

    manifest = Manifest(
        name="cpu",
        summary="train on the CPU, with gloo between the ranks",
        claims=(Claim.PLATFORM,),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL},
        level=0,
        maturity=Maturity.BETA,
        attention=AttentionFeatures.all_but(),
    )

    @hookimpl
    def ascend_environment(self, local_world_size: int) -> Mapping[str, str]:
        """Share the cores among ranks that compute on them, and bound the kernels that oneDNN
        keeps, one for every shape that it has met.

        Tokens per expert differ in every step, so the default of 1024 fills with kernels that are
        never used again, about 1 MB each, and memory grows by a gigabyte. A step of fixed shapes
        needs a few dozen. What the user has set stays.
        """
        wanted = dict.fromkeys(
            ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), str(_KERNELS_KEPT)
        )
        if local_world_size > 1:
            cores = len(os.sched_getaffinity(0))
            wanted["OMP_NUM_THREADS"] = str(max(1, cores // local_world_size))
        return {name: value for name, value in wanted.items() if name not in os.environ}

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange:
        """Host and device are one memory, and some scores are at hand."""
        from .cost import platform_cost

        return platform_cost(config, layout, rank)

    @hookimpl
    def ascend_device(self, local_rank: int) -> Device:
        from .device import CpuDevice

        return CpuDevice(local_rank)

    @hookimpl
    def ascend_attention_kernel(self, ops: PlatformOps) -> AttentionKernel:
        return next(iter(ops.attention_kernels.values()))()

    @hookimpl
    def ascend_platform_ops(self) -> PlatformOps:
        from .operators import platform_ops

        return platform_ops()
