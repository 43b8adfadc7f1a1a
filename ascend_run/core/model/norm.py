"""RMSNorm and LayerNorm on the platform's operators; works under sequence parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ascend_run.plugin_api.errors import ConfigError

from .assembly import Assembly


class Norm(nn.Module):
    """The normalisation that ``config.normalization`` names.

    Shapes and dtypes: [..., H] -> [..., H], dtype kept; statistics in float32 or wider.
    Source: RMSNorm, arXiv:1910.07467; LayerNorm, arXiv:1607.06450.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        assembly: Assembly,
    ) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ConfigError(
                f"model.normalization={config.normalization!r}: expected RMSNorm or LayerNorm"
            )
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.ops = assembly.ops
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(
                torch.zeros(hidden_size, dtype=config.params_dtype, device=device)
            )
        for parameter in self.parameters():
            # Megatron sums the gradients of such parameters over the tensor-parallel ranks, each
            # of which saw its own part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return self.ops.rms_norm(x, weight, self.eps)
        return self.ops.layer_norm(x, weight, self.bias, self.eps)
