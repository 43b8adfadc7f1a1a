"""Splits attention into parts of a few key-value heads and their query heads."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ascend_run.types.attention import AttentionSpec

# N query heads, G key-value heads, R = N / G; S queries, T keys


@attrs.frozen
class HeadPart:
    """Key-value heads ``first`` to ``end`` of G, and the ``repeat`` query heads of each."""

    first: int
    end: int
    groups: int
    repeat: int

    def of_groups(self, x: Tensor) -> Tensor:
        """Return a view of the part's key-value heads of [..., G, D]."""
        return x[..., self.first : self.end, :]

    def of_heads(self, x: Tensor) -> Tensor:
        """Return a view of the part's query heads of [..., N, D], or of a log-sum-exp [..., N,
        S]."""
        return x[..., self._heads, :]

    def of_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec with the sinks, slopes and bias of the part's heads."""
        if self.end - self.first == self.groups:
            return spec
        sinks, bias, slanted = spec.sinks, spec.bias, spec.position_bias
        if sinks is not None:
            sinks = sinks[self._heads]
        if bias is not None and has_heads(bias):
            bias = bias[..., self._heads, :, :]
        if slanted is not None:
            slanted = attrs.evolve(slanted, slopes=slanted.slopes[self._heads])
        return attrs.evolve(spec, sinks=sinks, bias=bias, position_bias=slanted)

    @property
    def _heads(self) -> slice:
        return slice(self.first * self.repeat, self.end * self.repeat)


def head_parts(heads: int, groups: int, at_once: int | None) -> tuple[HeadPart, ...]:
    """Split the heads into parts of ``at_once`` key-value heads; the last takes the remainder."""
    size = at_once or groups
    return tuple(
        HeadPart(first, min(first + size, groups), groups, heads // groups)
        for first in range(0, groups, size)
    )


def has_heads(bias: Tensor) -> bool:
    """Return whether a bias [..., N, S, T] differs by head."""
    return bias.dim() >= 3 and bias.shape[-3] > 1


def joined(parts: Sequence[Tensor], dim: int = -2) -> Tensor:
    """Concatenate the parts' tensors."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def joined_bias(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Combine the parts' gradients into that of the bias."""
    if has_heads(like):
        return joined(parts, -3)
    return parts[0] if len(parts) == 1 else torch.stack([*parts]).sum(0)
