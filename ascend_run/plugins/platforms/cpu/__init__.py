"""The CPU platform: gloo ranks, host memory, and a torch.cuda facade for Megatron."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    CostChange,
    Device,
    Layout,
    Manifest,
    Maturity,
    Numerics,
    Patch,
    PipelineStage,
    PlatformOps,
    RunConfig,
    Support,
    Wrapper,
    hookimpl,
)

from .memory import HostMemory
from .options import VARIABLES, CpuOptions

_KERNELS_KEPT: Final = 128


class Cpu:
    """Train on CPUs only: the default platform, so that everything can be tried on any machine."""

    manifest = Manifest(
        name="cpu",
        summary="train on the CPU, with gloo between the ranks",
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL},
        level=0,
        maturity=Maturity.BETA,
        attention=AttentionFeatures.all_but(),
    )
    config_class = CpuOptions

    def __init__(self, config: CpuOptions) -> None:
        self.config = config
        self._memory = HostMemory()
        self._choices: dict[str, str] = {}

    @hookimpl
    def ascend_check(self) -> Sequence[str]:
        found = {name: os.environ.get(name, "") for name in VARIABLES}
        return [
            f"cpu: the environment has {name}={value!r}; expected {' or '.join(VARIABLES[name])}: "
            "set one of them, or unset it to time both and use the faster one"
            for name, value in found.items()
            if value not in ("", *VARIABLES[name])
        ]

    @hookimpl
    def ascend_environment(self, local_world_size: int) -> Mapping[str, str]:
        """Share the cores between local ranks, and limit the primitive cache of oneDNN.

        oneDNN caches one kernel per shape. The number of tokens per expert differs in every step,
        so the default capacity of 1024 fills with kernels that are never reused, about 1 MB each,
        and memory grows by a gigabyte. A step of fixed shapes needs a few dozen. Variables that the
        user has set are kept.
        """
        wanted = dict.fromkeys(
            ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), str(_KERNELS_KEPT)
        )
        if local_world_size > 1:
            cores = len(os.sched_getaffinity(0))
            wanted["OMP_NUM_THREADS"] = str(max(1, cores // local_world_size))
        return {name: value for name, value in wanted.items() if name not in os.environ}

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
        """Return the cost of the platform.

        Device memory is host memory, and scores without a fused kernel are materialized.
        """
        from .cost import platform_cost

        return platform_cost(config, layout, rank, self.config)

    @hookimpl
    def ascend_device(self, local_rank: int) -> Device:
        from .device import CpuDevice

        return CpuDevice(local_rank, self._memory, self.config.keep_freed_memory)

    @hookimpl
    def ascend_configure(self) -> Wrapper[Mapping[str, Any]]:
        """Disable the fused residual addition of ``model.bias_dropout_fusion``.

        Megatron compiles it, and the compiled dropout bypasses the device's generator.
        """
        return lambda arguments: {**arguments, "bias_dropout_fusion": False}

    @hookimpl
    def ascend_machine_choices(self, config: RunConfig) -> Mapping[str, str]:
        return {f"plugins.cpu.{name}": value for name, value in self._choices_of(config).items()}

    @hookimpl
    def ascend_patches(self) -> Sequence[Patch]:
        """Return the torch.cuda facade for Megatron, and patches for absent accelerator packages.

        The accelerator packages that Megatron imports are not used here, even if they are
        installed.
        """
        from ascend_run.plugins.platforms import absent_package_patches

        from .facade import facade_patches

        return (*facade_patches(self._memory), *absent_package_patches())

    @hookimpl
    def ascend_attention_kernel(self, ops: PlatformOps) -> AttentionKernel:
        return next(iter(ops.attention_kernels.values()))()

    @hookimpl
    def ascend_platform_ops(self, config: RunConfig) -> PlatformOps:
        from .operators import (
            platform_ops,
            with_onednn_matmuls,
            with_wide_attention,
            with_wide_matmuls,
        )

        ops, choices = platform_ops(), self._choices_of(config)
        if choices.get("bf16_matmul_dtype") == "fp32":
            ops = with_wide_matmuls(ops)
        if choices.get("bf16_attention_dtype") == "fp32":
            ops = with_wide_attention(ops)
        if choices.get("fp32_matmul_library") == "onednn":
            ops = with_onednn_matmuls(ops)
        return ops

    def _choices_of(self, config: RunConfig) -> Mapping[str, str]:
        """Return the options of the run's dtype with what they select, the same for all models of
        the run."""
        if config.train.precision not in ("bf16", "fp32"):
            return {}
        if not self._choices:
            from .timed_choices import ATTENTION, FP32_LINEARS, LINEARS, agreed_choice

            values = {
                LINEARS: self.config.bf16_matmul_dtype,
                ATTENTION: self.config.bf16_attention_dtype,
            }
            if config.train.precision == "fp32":
                values = {FP32_LINEARS: self.config.fp32_matmul_library}
            self._choices = {
                work.option: agreed_choice(value, work) for work, value in values.items()
            }
        return self._choices
