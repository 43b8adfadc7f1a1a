"""The operators of the platforms' tables: the torch implementation of each, and its capabilities.

Platform-specific kernels are not listed here: ``PlatformOps`` has those.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import attrs


def _mirrored(operator: Operator) -> str:
    """The place in ``tests/ops`` that mirrors the module's in ``ascend_run.ops``."""
    return operator.module.removeprefix("ascend_run.ops.")


@attrs.frozen(kw_only=True)
class Operator:
    """One operator."""

    name: str
    """Name of the torch implementation: a function, or for attention a module's pair of
    functions."""
    module: str
    """Whole name, so that the text shows what it imports."""
    known_as: str
    """Name in MindSpeed's list of operators."""
    backward: bool = True
    """Whether it has a backward; without one, requiring a gradient is an error. Operators that
    accumulate gradients or take an optimizer step need none."""
    collective: bool = False
    """Whether it communicates."""
    quantised: bool = False
    """Whether it takes int8."""
    suite: str = attrs.field(default=attrs.Factory(_mirrored, takes_self=True))
    """Folder and name of its test file."""

    @property
    def suite_path(self) -> str:
        """Path of the test file from the root of the repository."""
        return f"tests/ops/{self.suite.replace('.', '/test_')}.py"

    def torch_form(self) -> Callable[..., Any]:
        form: Callable[..., Any] = getattr(importlib.import_module(self.module), self.name)
        return form


OPERATORS: Final = (
    Operator(name="rms_norm", module="ascend_run.ops.elementwise.rms_norm", known_as="rms_norm"),
    Operator(name="swiglu", module="ascend_run.ops.elementwise.swiglu", known_as="swiglu"),
    Operator(
        name="rotary",
        module="ascend_run.ops.elementwise.rotary",
        known_as="npu_rotary_position_embedding",
    ),
    Operator(
        name="dropout_add_layer_norm",
        module="ascend_run.ops.elementwise.dropout_add_norm",
        known_as="npu_dropout_add_layer_norm",
    ),
    Operator(
        name="dropout_add_rms_norm",
        module="ascend_run.ops.elementwise.dropout_add_norm",
        known_as="npu_dropout_add_rms_norm",
    ),
    Operator(
        name="ring_attention_update",
        module="ascend_run.ops.attention.ring_update",
        known_as="npu_ring_attention_update",
        backward=False,
    ),
    Operator(
        name="grouped_matmul",
        module="ascend_run.ops.experts.grouped_matmul",
        known_as="npu_gmm, host counts",
    ),
    Operator(
        name="listed_grouped_matmul",
        module="ascend_run.ops.experts.group_lists",
        known_as="npu_gmm, npu_gmm_v2",
    ),
    Operator(
        name="listed_grouped_outer",
        module="ascend_run.ops.experts.group_lists",
        known_as="npu_gmm, group_type 2",
    ),
    Operator(
        name="grouped_matmul_add_",
        module="ascend_run.ops.experts.group_lists",
        known_as="npu_groupmatmul_add_fp32",
        backward=False,
    ),
    Operator(
        name="quant_grouped_matmul",
        module="ascend_run.ops.experts.quantised_matmul",
        known_as="npu_quant_gmm, npu_quant_gmm_v2",
        backward=False,
        quantised=True,
    ),
    Operator(
        name="weight_quant_grouped_matmul",
        module="ascend_run.ops.experts.quantised_matmul",
        known_as="npu_weight_quant_gmm, npu_weight_quant_gmm_v2",
        backward=False,
        quantised=True,
    ),
    Operator(
        name="moe_token_permute",
        module="ascend_run.ops.experts.moe_permutation",
        known_as="npu_fused_moe_token_permute",
    ),
    Operator(
        name="moe_token_unpermute",
        module="ascend_run.ops.experts.moe_permutation",
        known_as="npu_fused_moe_token_unpermute",
    ),
    Operator(
        name="ffn", module="ascend_run.ops.experts.feed_forward", known_as="ffn", backward=False
    ),
    Operator(
        name="quantised_ffn",
        module="ascend_run.ops.experts.feed_forward",
        known_as="ffn, int8",
        backward=False,
        quantised=True,
    ),
    Operator(
        name="weight_quantised_ffn",
        module="ascend_run.ops.experts.feed_forward",
        known_as="ffn, antiquant",
        backward=False,
        quantised=True,
    ),
    Operator(
        name="ema_adamw_step_",
        module="ascend_run.ops.elementwise.ema_adamw",
        known_as="npu_apply_fused_ema_adamw",
        backward=False,
    ),
    Operator(
        name="HostMapped",
        module="ascend_run.ops.memory.host_mapped",
        known_as="empty_with_swapped_memory",
        backward=False,
    ),
    Operator(
        name="mm_all_reduce_add_rms_norm",
        module="ascend_run.ops.linear.reduced_matmul",
        known_as="npu_mm_all_reduce_add_rms_norm",
        backward=False,
        collective=True,
        quantised=True,
    ),
    Operator(
        name="mm_all_reduce_add_rms_norm_",
        module="ascend_run.ops.linear.reduced_matmul",
        known_as="npu_mm_all_reduce_add_rms_norm_",
        backward=False,
        collective=True,
        quantised=True,
    ),
    Operator(
        name="grouped_matmul_all_reduce",
        module="ascend_run.ops.linear.reduced_matmul",
        known_as="npu_grouped_mat_mul_all_reduce",
        backward=False,
        collective=True,
    ),
    Operator(
        name="all_to_all_all_gather_bmm",
        module="ascend_run.ops.experts.expert_collectives",
        known_as="npu_all_to_all_all_gather_bmm",
        collective=True,
    ),
    Operator(
        name="bmm_reduce_scatter_all_to_all",
        module="ascend_run.ops.experts.expert_collectives",
        known_as="npu_bmm_reduce_scatter_all_to_all",
        collective=True,
    ),
    Operator(
        name="matmul_add_fp32",
        module="ascend_run.ops.linear.weight_gradient",
        known_as="npu_matmul_add_fp32",
        backward=False,
        suite="linear.parallel_linear",
    ),
    Operator(
        name="all_gather_matmul",
        module="ascend_run.ops.linear.collective_matmul",
        known_as="lcal_coc: all_gather_matmul",
        collective=True,
        suite="linear.parallel_linear",
    ),
    Operator(
        name="matmul_reduce_scatter",
        module="ascend_run.ops.linear.collective_matmul",
        known_as="lcal_coc: matmul_reduce_scatter",
        collective=True,
        suite="linear.parallel_linear",
    ),
    Operator(
        name="matmul_all_reduce",
        module="ascend_run.ops.linear.collective_matmul",
        known_as="lcal_coc: matmul_all_reduce",
        collective=True,
        suite="linear.parallel_linear",
    ),
)
