"""NPU implementations of operators of ``ascend_run.ops``, which replace the torch ones.

One module per kind. An operator that torch_npu lacks is composed of others; arguments that a fused
operator does not support use the torch implementation, whose operations torch_npu runs one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import attrs

from ascend_run.ops.elementwise.ema_adamw import fused_ema_adamw_step_

from . import groups, linear, moe, norm, quantised, reduced, ring, swapped_memory


@attrs.frozen
class Form:
    """One operator on the NPU."""

    function: Callable[..., Any]
    """Takes the arguments and returns the result of the torch implementation of the same name."""
    calls: tuple[str, ...]
    """The operators of torch_npu (or torch) that it calls."""


_GROUPED: Final = "npu_grouped_matmul"
_REDUCED: Final = ("npu_mm_all_reduce_base", "npu_add_rms_norm", "npu_trans_quant_param")
FORMS: Final[Mapping[str, Form]] = {
    "dropout_add_layer_norm": Form(
        norm.dropout_add_layer_norm, ("npu_add_layer_norm", "torch.native_layer_norm_backward")
    ),
    "dropout_add_rms_norm": Form(
        norm.dropout_add_rms_norm, ("npu_add_rms_norm", "npu_rms_norm_backward")
    ),
    "listed_grouped_matmul": Form(groups.listed_grouped_matmul, (_GROUPED,)),
    "listed_grouped_outer": Form(groups.listed_grouped_outer, (_GROUPED,)),
    "grouped_matmul_add_": Form(groups.grouped_matmul_add_, ("npu_grouped_matmul_add_", _GROUPED)),
    "moe_token_permute": Form(
        moe.moe_token_permute, ("npu_moe_token_permute", "npu_moe_token_permute_grad")
    ),
    "moe_token_unpermute": Form(
        moe.moe_token_unpermute, ("npu_moe_token_unpermute", "npu_moe_token_unpermute_grad")
    ),
    "ring_attention_update": Form(ring.ring_attention_update, ("npu_ring_attention_update",)),
    "ema_adamw_step_": Form(fused_ema_adamw_step_, ("torch._fused_adamw_", "torch._fused_adam_")),
    "quant_grouped_matmul": Form(
        quantised.quant_grouped_matmul, (_GROUPED, "npu_trans_quant_param")
    ),
    "weight_quant_grouped_matmul": Form(quantised.weight_quant_grouped_matmul, (_GROUPED,)),
    "ffn": Form(quantised.ffn, ("npu_ffn",)),
    "quantised_ffn": Form(quantised.quantised_ffn, ("npu_ffn", "npu_trans_quant_param")),
    "weight_quantised_ffn": Form(quantised.weight_quantised_ffn, ("npu_ffn",)),
    "matmul_add_fp32": Form(linear.matmul_add_fp32, ("npu_grouped_matmul_add_",)),
    "all_gather_matmul": Form(linear.all_gather_matmul, ("npu_all_gather_base_mm",)),
    "matmul_reduce_scatter": Form(linear.matmul_reduce_scatter, ("npu_mm_reduce_scatter_base",)),
    "matmul_all_reduce": Form(linear.matmul_all_reduce, ("npu_mm_all_reduce_base",)),
    "mm_all_reduce_add_rms_norm": Form(reduced.mm_all_reduce_add_rms_norm, _REDUCED),
    "mm_all_reduce_add_rms_norm_": Form(reduced.mm_all_reduce_add_rms_norm_, _REDUCED),
    "grouped_matmul_all_reduce": Form(reduced.grouped_matmul_all_reduce, (_GROUPED,)),
    "HostMapped": Form(
        swapped_memory.SwappedMemory, ("empty_with_swapped_memory", "npu_apply_adam_w")
    ),
}
"""Name of the torch implementation -> NPU implementation."""


def fused(missing: Collection[str] = ()) -> dict[str, Callable[..., Any]]:
    """Return PlatformOps.fused without the operators that call a missing one: those use torch."""
    return {name: form.function for name, form in FORMS.items() if not {*missing} & {*form.calls}}
