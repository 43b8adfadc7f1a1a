"""Every call of a torch_npu operator, and no other code: one function per operator.

This code must be tested without the device: that the operator takes these arguments (against its
schema and its meta kernel), and that it computes what the caller expects (against a reference
kernel of the same name, written from its documentation).

The operators are reached through ``torch.ops.npu``, where ``torch_npu`` registers them. Source:
torch_npu's operator documentation (Ascend Extension for PyTorch, API reference).
"""

from .activation import swiglu, swiglu_backward
from .attention import (
    AFTER_SCALE,
    ALL_TOKENS,
    BAND,
    BEFORE_SCALE,
    COMPRESSED_BIAS_ROWS,
    COMPRESSED_MASK_SIZE,
    FULL,
    LAYOUTS,
    LEFT_UP_CAUSAL,
    RIGHT_DOWN_CAUSAL,
    ROOT_SLOPES,
    SLOPES,
    STATISTICS_WIDTH,
    WHOLE_MASK,
    AttentionOut,
    Bias,
    Call,
    Drawn,
    Sparsity,
    fusion_attention,
    fusion_attention_grad,
)
from .grouped import grouped_matmul, grouped_outer
from .norm import rms_norm, rms_norm_backward
from .rotary import rotary_mul

__all__ = [
    "AFTER_SCALE",
    "ALL_TOKENS",
    "BAND",
    "BEFORE_SCALE",
    "COMPRESSED_BIAS_ROWS",
    "COMPRESSED_MASK_SIZE",
    "FULL",
    "LAYOUTS",
    "LEFT_UP_CAUSAL",
    "RIGHT_DOWN_CAUSAL",
    "ROOT_SLOPES",
    "SLOPES",
    "STATISTICS_WIDTH",
    "WHOLE_MASK",
    "AttentionOut",
    "Bias",
    "Call",
    "Drawn",
    "Sparsity",
    "fusion_attention",
    "fusion_attention_grad",
    "grouped_matmul",
    "grouped_outer",
    "rms_norm",
    "rms_norm_backward",
    "rotary_mul",
    "swiglu",
    "swiglu_backward",
]
