"""The NPU's operators for linears, as a feature of a CPU run, on the reference operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import attrs

from ascend_run.plugin_api import Manifest, Numerics, PlatformOps, hookimpl

FORMS = ("matmul_add_fp32", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


class NpuLinears:
    """The CPU's operator table with the NPU's linears."""

    manifest = Manifest(
        name="npu-linears",
        summary="products of linears by platform npu on reference operators",
        numerics=Numerics.ROUNDING,
    )

    @hookimpl
    def ascend_platform_ops(self) -> PlatformOps:
        from ascend_run.plugins.platforms.cpu.operators import platform_ops
        from ascend_run.plugins.platforms.npu.forms import linear
        from tests.plugins.platforms.npu.reference import define_reference_operators

        define_reference_operators()
        forms = {name: _over_gloo(getattr(linear, name)) for name in FORMS}
        return attrs.evolve(platform_ops(), fused=forms)


def _over_gloo(form: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator so that its group is the reference operators' group of all ranks."""
    from ascend_run.plugins.platforms.npu import communicators

    def run(*args: Any) -> Any:
        with mock.patch.object(communicators, "communicator_name", return_value="hccl"):
            return form(*args)

    return run
