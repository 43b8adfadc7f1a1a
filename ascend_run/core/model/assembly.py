"""What the plugins answered for one model, handed to the modules through their ModuleSpecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

from ascend_run.plugin_api import contracts as c

from .places import LayerNumbers


@attrs.frozen(kw_only=True)
class Assembly:
    """Providers' answers; a None stands for the kernel's own module."""

    ops: c.PlatformOps
    attention_kernel: Callable[[int], c.AttentionKernel]
    """Layer index -> the platform's kernel inside every wrapper."""
    position_biases: Mapping[int, c.PositionBias | None] = attrs.field(factory=dict)
    """Layer index -> what is added to its scores; there once its kernel is."""
    attention_problems: dict[str, None] = attrs.field(factory=dict)
    """What the kernels built so far do not declare and the run asks of them: a set, in order.
    Raised in one where the modules are built, which would put words of theirs to it."""
    experts_kernel: c.ExpertsKernel
    loss_kernel: c.LossKernel
    norm: type[nn.Module] | None = None
    router: Callable[..., nn.Module] | None = None
    layer_numbers: LayerNumbers
    """For each of ``num_layers`` places the number of its layer, or None."""
    partition: c.SequencePartition | None = None
    """Owner of the sequence's cut; None where every rank holds whole sequences."""
    wraps_output_layer: bool = False
    """A plugin wraps the output projection, so the loss may not bypass it."""
    activation: str = "silu"
    softcap: float | None = None
    """Of the attention's scores."""
    groups: Any = None
    """Megatron's ProcessGroupCollection."""
