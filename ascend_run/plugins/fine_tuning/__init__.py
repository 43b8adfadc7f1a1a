"""Parameter-efficient fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class LinearAdapter(Protocol):
    """A low-rank adapter of a parallel linear, which has it as its submodule ``adapter``."""

    is_on: bool
    """Whether it adds to the linear's output."""
    is_fused: bool
    """Whether another plugin has the linear's own forward add it. The adapter's plugin then does
    not."""
    lora_A: Any
    """Parameter, [R, K], of this rank's inputs."""

    def dropped(self, x: Tensor) -> Tensor:
        """Apply dropout to the adapter's input; return it as it is without any."""
        ...

    def outer_matrix(self, dtype: torch.dtype) -> Tensor:
        """Return B of this rank's outputs times the scale, [R, N]; differentiable."""
        ...


def adapter_of(linear: nn.Module) -> LinearAdapter | None:
    """Return the adapter of a linear; None if it has none."""
    found: LinearAdapter | None = getattr(linear, "adapter", None)
    return found
