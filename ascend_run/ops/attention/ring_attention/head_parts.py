"""An attention's heads, a few key-value heads and their queries at a time."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from .inner import Spec

# N query heads, G key-value heads, R = N / G; S queries, T keys


@attrs.frozen
class HeadPart:
    """Key-value heads ``first`` to ``end`` of G, and the ``repeat`` query heads of each."""

    first: int
    end: int
    groups: int
    repeat: int

    def of_groups(self, x: Tensor) -> Tensor:
        """[..., G, D] -> those of the part; a view, as all of these."""
        return x[..., self.first : self.end, :]

    def of_heads(self, x: Tensor) -> Tensor:
        """The same of [..., N, D], and of a log-sum-exp [..., N, S]."""
        return x[..., self._heads, :]

    def of_spec(self, spec: Spec) -> Spec:
        """With what the part's heads have of sinks, slopes and bias."""
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
    """Of so many key-value heads each, the last of what is left."""
    size = at_once or groups
    return tuple(
        HeadPart(first, min(first + size, groups), groups, heads // groups)
        for first in range(0, groups, size)
    )


def has_heads(bias: Tensor) -> bool:
    """Whether a bias [..., N, S, T] has one for each head."""
    return bias.dim() >= 3 and bias.shape[-3] > 1


def joined(parts: Sequence[Tensor], dim: int = -2) -> Tensor:
    """The parts' tensors beside each other again."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def joined_bias(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The gradient of a bias from those of its parts."""
    if has_heads(like):
        return joined(parts, -3)
    return parts[0] if len(parts) == 1 else torch.stack([*parts]).sum(0)
