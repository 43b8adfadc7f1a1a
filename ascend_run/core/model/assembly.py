"""What the hooks return for one model, passed to its modules through their ModuleSpecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from ascend_run.plugin_api import contracts as c
from ascend_run.types.config import FieldSection

from .layer_slots import LayerNumbers

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import RouterBuilder


@attrs.frozen(kw_only=True)
class Assembly:
    """Return values of the provider hooks; None selects the built-in module."""

    ops: c.PlatformOps
    device: torch.device
    """Device on which parameters are created."""
    attention_kernel: Callable[[int], c.AttentionKernel]
    """Maps a layer index to the platform's kernel inside all wrappers."""
    position_biases: Mapping[int, c.PositionBias | None] = attrs.field(factory=dict)
    """Maps a layer index to its position bias; filled when its kernel is built."""
    attention_problems: dict[str, None] = attrs.field(factory=dict)
    """Features that the run needs and a kernel does not declare, as an ordered set.

    Collected while modules are built and raised once afterwards: an error inside a module build
    would be re-raised with Megatron's own text.
    """
    experts_kernel: c.ExpertsKernel
    norm: type[nn.Module] | None = None
    router: RouterBuilder | None = None
    layer_numbers: LayerNumbers
    """Maps each of the ``num_layers`` layer slots to the number of its layer, or None."""
    partition: c.SequencePartition | None = None
    """Sequence sharding; None if every rank holds full sequences."""
    wraps_output_layer: bool = False
    """True if a plugin implements ``ascend_output_layer``, so that the loss may not bypass it."""
    loss_chunk_bytes: int | None = None  #: ``train.loss_chunk_bytes``.
    model: FieldSection
    """``[model]`` of the run's config, for the options that Megatron's does not have."""
    groups: ProcessGroupCollection
