"""RMSNorm, LayerNorm and the per-head L2 norm on the platform's operators.

They support sequence parallelism.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api.errors import ConfigError

from .assembly import Assembly


class Norm(nn.Module):
    """The norm selected by ``config.normalization``.

    Shapes and dtypes: [..., H] -> [..., H] in the weight's dtype, which may be narrower than the
    input's if the residual stream is float32; statistics in float32 or wider.

    Source: RMSNorm, arXiv:1910.07467; LayerNorm, arXiv:1607.06450.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, assembly: Assembly
    ) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ConfigError(
                f"model.normalization={config.normalization!r}: expected RMSNorm or LayerNorm"
            )
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.ops = assembly.ops
        dtype, device = config.params_dtype, assembly.device
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))
        for parameter in self.parameters():
            # Megatron sums the gradients of marked parameters over the tensor-parallel ranks, each
            # of which saw a different shard of the sequence.
            mark(parameter, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        # The platform's operators take a single dtype; the cast is a no-op for equal dtypes.
        weight = self.weight.to(x.dtype)
        weight = weight + 1 if self.zero_centered else weight
        if self.bias is None:
            out = self.ops.rms_norm(x, weight, self.eps)
        else:
            out = self.ops.layer_norm(x, weight, self.bias.to(x.dtype), self.eps)
        return out.to(self.weight.dtype)


class L2Norm(nn.Module):
    """``qk_l2_norm``: scale each query and key of a head to a mean square of 1, without weights.

    Shapes and dtypes: [..., D] -> [..., D], same dtype; statistics in float32 or wider.

    Source: Megatron's L2Norm, whose statistics are always float32.
    """

    ones: Tensor

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, assembly: Assembly
    ) -> None:
        super().__init__()
        self.eps = eps
        self.ops = assembly.ops
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=assembly.device)
        self.register_buffer("ones", ones, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.ones, self.eps)
