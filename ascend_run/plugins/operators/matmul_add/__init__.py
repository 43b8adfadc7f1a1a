"""Gradient accumulation fusion: weight gradients of linears are added to the reduced buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.ops.linear.linear_communication import buffers
from ascend_run.ops.linear.wide_factors import wide_factors
from ascend_run.plugin_api import (
    CostChange,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    PlatformOps,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c


class MatmulAdd:
    """Compute ``main_grad += dy.T @ x`` in one kernel, for every parallel linear of a layer.

    Without the plugin, the weight gradient is a separate tensor in the model's dtype, which data
    parallelism adds to its buffer. Cost: no communication; on the CPU, temporary float32 copies of
    both factors if they are narrower than the buffer. Numerics: the weight gradient is accumulated
    in the buffer's dtype (float32 in half precision) and never rounded to the model's. Source:
    Megatron-LM's gradient accumulation fusion.
    """

    manifest = Manifest(
        name="matmul-add",
        summary="accumulate the weight gradients of linears in the gradient buffer within the GEMM",
        forward_links={"linear": LinkPlace.OWN},
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--no-gradient-accumulation-fusion", values={"": False, None: True}),
            LegacyFlag(flag="--gradient-accumulation-fusion"),
        ),
        source="Megatron-LM, megatron/core/tensor_parallel/layers.py",
    )

    @hookimpl
    def ascend_cost(self, config: RunConfig, rank: PipelineStage) -> CostChange:
        """Return the float32 copies of both factors of a half-precision matmul on the CPU.

        A placeholder without values replaces the weight gradient tensor that is no longer written.
        """
        wide = config.platform == "cpu" and rank.has_gradient_buffers and rank.item_bytes < 4
        factors = wide_factors(rank, config.model.hidden_size) if wide else ()
        return CostChange(working=tuple(factors), buffers=buffers(config))

    @hookimpl
    def ascend_linear(self, ops: PlatformOps) -> c.ModuleWrapper:
        from ascend_run.ops.linear.parallel_linear import linear_link
        from ascend_run.ops.linear.weight_gradient import matmul_add_fp32

        return lambda linear: linear_link(linear, matmul_add=ops.form(matmul_add_fp32))
