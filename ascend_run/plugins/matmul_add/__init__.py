"""Weight gradients of linears, summed in the buffer that is reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.ops.linear.linear_messages import buffers
from ascend_run.plugin_api import (
    CostChange,
    Manifest,
    Maturity,
    Numerics,
    PlatformOps,
    RankKind,
    RunConfig,
    Support,
    hookimpl,
)

from .cost import wide_factors

if TYPE_CHECKING:
    from torch import nn

    from ascend_run.plugin_api import contracts as c


class MatmulAdd:
    """``main_grad += dy.T @ x`` in one kernel, for every parallel linear of a layer.

    Without it the product is a tensor of its own, in the model's dtype, that data parallelism then
    adds to its buffer. Cost: no messages; on the CPU wide copies of both factors for a moment where
    they are narrower than the buffer. Numerics: the product is summed in the buffer's dtype
    (float32 in half precision) and never rounded to the model's. Source: Megatron-LM's gradient
    accumulation fusion.
    """

    manifest = Manifest(
        name="matmul-add",
        summary="add the weight gradients of linears to the reduced buffer in the product itself",
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=("--gradient-accumulation-fusion", "--no-gradient-accumulation-fusion"),
        source="Megatron-LM, megatron/core/tensor_parallel/layers.py",
    )

    @hookimpl
    def ascend_cost(self, config: RunConfig, rank: RankKind) -> CostChange:
        """On the CPU both factors of a product in half precision are copied to float32; in place
        of the tensor that is not written any more stands one without values."""
        wide = config.platform == "cpu" and rank.has_gradient_buffers and rank.item_bytes < 4
        factors = wide_factors(rank, config.model.hidden_size) if wide else ()
        return CostChange(working=tuple(factors), buffers=buffers(config))

    @hookimpl
    def ascend_linear(self, ops: PlatformOps) -> c.Wrapper[nn.Module]:
        from ascend_run.ops.linear.parallel_linear import change_way
        from ascend_run.ops.linear.weight_gradient import matmul_add_fp32

        return lambda linear: change_way(linear, matmul_add=ops.form(matmul_add_fp32))
