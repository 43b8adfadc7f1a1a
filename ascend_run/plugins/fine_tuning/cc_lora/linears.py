"""The forward of a parallel linear that computes its adapter too."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

from ascend_run.ops.linear import sliced_matmul
from ascend_run.ops.linear.linear_adapter import LinearWithAdapter, adapter_of
from ascend_run.ops.linear.parallel_linear import linear_link
from ascend_run.ops.linear.plain_matmuls import CollectiveMatmuls
from ascend_run.plugin_api import ForwardLink, PlatformOps

if TYPE_CHECKING:
    from . import CcLoraOptions


def link(linear: nn.Module, options: CcLoraOptions, ops: PlatformOps) -> ForwardLink:
    """Return the link that slices a linear's collectives, and computes its adapter if it has
    one."""
    how: dict[str, Any] = {"number": options.slices}
    if ops.matmul is not None:
        how["matmul"] = ops.matmul
    sliced = CollectiveMatmuls(
        all_gather_matmul=functools.partial(sliced_matmul.all_gather_matmul, **how),
        matmul_reduce_scatter=functools.partial(sliced_matmul.matmul_reduce_scatter, **how),
        matmul_all_reduce=functools.partial(sliced_matmul.matmul_all_reduce, **how),
    )
    adapter = adapter_of(linear)
    # Where the linear has no collectives, its adapter sums gradients, which is not overlapped.
    if adapter is None or getattr(linear, "explicit_expert_comm", False):
        return linear_link(linear, fused=sliced)
    adapter.is_fused = True
    adapted = LinearWithAdapter(adapter=adapter, slices=options.slices, merge=options.merge)
    return linear_link(linear, fused=sliced, adapted=adapted)
