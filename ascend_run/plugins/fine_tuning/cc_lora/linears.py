"""The forward of a parallel linear that computes its adapter too."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ascend_run.ops.linear import sliced_matmul
from ascend_run.ops.linear.adapted_linear import Schedule, adapted_linear
from ascend_run.ops.linear.parallel_linear import (
    LinearCollectives,
    LinearImplementation,
    ParallelLinearFunction,
    linear_link,
    parallel_linear,
)
from ascend_run.ops.linear.plain_matmuls import CollectiveMatmuls, Group
from ascend_run.plugin_api import ForwardLink, PlatformOps
from ascend_run.plugins.fine_tuning import LinearAdapter, adapter_of

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
    if adapter is None:
        return linear_link(linear, fused=sliced)
    adapter.is_fused = True
    return linear_link(linear, fused=sliced, adapted=with_adapter(adapter, options))


def with_adapter(adapter: LinearAdapter, options: CcLoraOptions) -> ParallelLinearFunction:
    """Return the computation of a linear and its adapter; of the linear alone while the adapter is
    off."""

    def compute(
        x: Tensor,
        weight_NK: Tensor | None,
        collectives: LinearCollectives,
        group: Group | None,
        implementation: LinearImplementation,
    ) -> Tensor:
        if not adapter.is_on:
            return parallel_linear(x, weight_NK, collectives, group, implementation)
        assert group is not None
        assert weight_NK is not None
        ranks = group.size() if collectives is LinearCollectives.COLUMN_SEQUENCE else 1
        tokens = x[..., 0].numel() * ranks
        schedule = Schedule(
            collectives=collectives,
            group=group,
            matmul=implementation.matmul,
            slices=options.slices,
            merges=options.merge and tokens >= weight_NK.shape[1],
        )
        read = adapter.dropped(x)
        return adapted_linear(
            x,
            weight_NK,
            adapter.lora_A,
            functools.partial(adapter.outer_matrix, x.dtype),
            schedule,
            adapter_x=None if read is x else read,
        )

    return compute
