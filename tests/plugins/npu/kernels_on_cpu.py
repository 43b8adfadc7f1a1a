"""The NPU's kernels as a feature of a CPU run, over the reference operators."""

from __future__ import annotations

from typing import Any

from ascend_run.plugin_api import Claim, Manifest, Numerics, hookimpl
from ascend_run.plugins.npu import Npu


class NpuKernels:
    """Attention and operator table of platform npu in place of the CPU's."""

    manifest = Manifest(
        name="npu-kernels",
        summary="the kernels of platform npu on reference operators",
        claims=(Claim.ATTENTION_KERNEL, Claim.PLATFORM_OPS),
        numerics=Numerics.ROUNDING,
    )

    def __init__(self) -> None:
        self._platform = Npu()

    @hookimpl
    def ascend_attention_kernel(self, ops: Any) -> Any:
        _operators()
        return self._platform.ascend_attention_kernel(ops=ops)

    @hookimpl
    def ascend_platform_ops(self) -> Any:
        _operators()
        return self._platform.ascend_platform_ops()


def _operators() -> None:
    """On a rank: the references, each call of one checked from now on."""
    from tests.support.npu_calls import check_from_now_on

    from .reference import define_reference_operators

    define_reference_operators()
    check_from_now_on()
