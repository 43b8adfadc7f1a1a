"""Low-rank adapters of parallel linears, computed by the linears' own forward."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from .adapted_linear import Schedule, adapted_linear
from .parallel_linear import LinearCollectives, LinearImplementation, parallel_linear
from .plain_matmuls import Group


class LinearAdapter(Protocol):
    """A low-rank adapter of a parallel linear, which has it as its submodule ``adapter``."""

    is_on: bool
    """Whether it adds to the linear's output."""
    is_fused: bool
    """Whether another plugin has the linear's own forward add it. The adapter's plugin then does
    not."""
    training: bool
    dropout: float
    """Probability, in training, with which an element of the adapter's input is dropped."""
    lora_A: Any
    """Parameter, [R, K], of this rank's inputs."""
    lora_B: Any
    """Part -> parameter, [rows, its R]."""

    def dropped(self, x: Tensor) -> Tensor:
        """Apply dropout to the adapter's input; return it as it is without any."""
        ...

    def outer_matrix(self, dtype: torch.dtype, b: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return B of this rank's outputs times the scale, [R, N], of tensors in place of
        ``lora_B``, by default of these; differentiable."""
        ...


def adapter_of(linear: nn.Module) -> LinearAdapter | None:
    """Return the adapter of a linear; None if it has none."""
    found: LinearAdapter | None = getattr(linear, "adapter", None)
    return found


@attrs.frozen(kw_only=True)
class LinearWithAdapter:
    """A ``LinearImplementation.adapted``: computes a linear and its adapter, or the linear alone
    while the adapter is off."""

    adapter: LinearAdapter
    slices: int = 1
    """See ``Schedule``."""
    merge: bool = False
    """Merge the adapter into a weight with at most as many inputs as there are tokens."""

    def __call__(
        self,
        x: Tensor,
        weight_NK: Tensor | None,
        collectives: LinearCollectives,
        group: Group | None,
        implementation: LinearImplementation,
    ) -> Tensor:
        if not self.adapter.is_on:
            return parallel_linear(x, weight_NK, collectives, group, implementation)
        assert group is not None
        ranks = group.size() if collectives is LinearCollectives.COLUMN_SEQUENCE else 1
        tokens = x[..., 0].numel() * ranks
        schedule = self.schedule(tokens, x.shape[-1], collectives, group, implementation)
        read = self.adapter.dropped(x)
        return adapted_linear(
            x,
            functools.partial(implementation.values_of, weight_NK, x.dtype),
            self.adapter.lora_A.to(x.dtype),
            functools.partial(self.adapter.outer_matrix, x.dtype),
            schedule,
            adapter_x=None if read is x else read,
        )

    def schedule(
        self,
        tokens: int,
        inputs: int,
        collectives: LinearCollectives,
        group: Group,
        implementation: LinearImplementation,
    ) -> Schedule:
        """Return how the linear and its adapter compute and communicate.

        Args:
            tokens: Of a micro-batch, of all tensor-parallel ranks.
            inputs: Of the linear, on this rank.
        """
        return Schedule(
            collectives=collectives,
            group=group,
            matmul=implementation.matmul,
            slices=self.slices,
            merges=self.merge and tokens >= inputs,
        )
