"""The NPU's kernels as a feature of a CPU run, on the reference operators."""

from __future__ import annotations

from typing import Any

from ascend_run.plugin_api import Manifest, Numerics, hookimpl
from ascend_run.plugins.platforms.npu import Npu


class NpuKernels:
    """Attention and operator table of platform npu in place of the CPU's."""

    manifest = Manifest(
        name="npu-kernels",
        summary="the kernels of platform npu on reference operators",
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
    """Define the references on a rank, and check each call from now on."""
    from tests.support.npu_calls import check_from_now_on

    from .reference import define_reference_operators

    define_reference_operators()
    check_from_now_on()
