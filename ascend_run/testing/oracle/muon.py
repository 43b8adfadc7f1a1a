"""Muon for matrices, with AdamW for the rest.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; scales, arXiv:2502.16982. The
Newton-Schulz iterations are polynomials of the singular values, which are computed here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .optimizer import AdamW

_BY_ADAMW = {"embedding", "output_layer", "gate_weight", "lora_A", "lora_B"}


class Muon(AdamW):
    """The optimizer's state, and its step; ``mean`` is the momentum of a matrix."""

    @property
    def _options(self) -> Any:
        return self.config.plugins["muon"]

    def _is_orthogonalized(self, name: str) -> bool:
        """Whether Muon updates a parameter: a matrix that is in none of these modules."""
        others = _BY_ADAMW | {*self._options.adamw}
        is_matrix = self.parameters[name].ndim > 1 and not name.endswith("bias")
        return is_matrix and others.isdisjoint(name.split("."))

    def rate_of(self, name: str) -> float:
        return float(self._options.lr_multiplier) if self._is_orthogonalized(name) else 1.0

    def update(self, name: str, gradient: Tensor) -> Tensor:
        if not self._is_orthogonalized(name):
            return super().update(name, gradient)
        share, mean = self._options.momentum, self.mean[name]
        mean.copy_(share * mean + (1 - share) * gradient)
        momentum = share * mean + (1 - share) * gradient if self._options.nesterov else mean
        update = torch.empty_like(momentum)
        kinds = self._kinds_of_rows(name, momentum.shape[-2])
        for kind in kinds.unique():
            update[..., kinds == kind, :] = self._orthogonalized(momentum[..., kinds == kind, :])
        return update

    def _kinds_of_rows(self, name: str, rows: int) -> Tensor:
        """Return of which matrix each row of a parameter is: queries, keys, values; gate, up."""
        model, row = self.config.model, torch.arange(rows)
        if not self._options.split_fused:
            return torch.zeros(rows)
        if "linear_qkv" in name:
            groups = model.num_query_groups or model.num_attention_heads
            heads = model.num_attention_heads // groups
            width = rows // (groups * (heads + 2))
            kinds: Tensor = (row // width % (heads + 2) - heads + 1).clamp(min=0)
            return kinds
        is_gated = model.gated_linear_unit and name.endswith(("linear_fc1.weight", "experts.fc1"))
        return row // (rows // 2) if is_gated else torch.zeros(rows)

    def _orthogonalized(self, matrix: Tensor) -> Tensor:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        size = values.square().sum(dim=-1, keepdim=True).sqrt()
        values = values / size.clamp(min=1e-7)
        for _ in range(self._options.num_ns_steps):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        rows, columns = matrix.shape[-2:]
        scale = {
            "spectral": max(rows, columns) ** 0.5,
            "unit_rms_norm": (rows / columns) ** 0.5,
            "shape_scaling": max(1, rows / columns) ** 0.5,
        }[self._options.scale_mode]
        update: Tensor = (left * values[..., None, :]) @ right
        update = update * self._options.extra_scale_factor * scale
        return update
