"""A model's parameters as shards of global tensors, with layout-independent names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
from torch import Tensor, nn

from ascend_run.core.checkpoint.boxes import whole
from ascend_run.core.checkpoint.regions import sharded_tensors


@attrs.frozen(kw_only=True)
class ParameterShard:
    """This rank's shard of a parameter, or of a tensor of its shape."""

    name: str
    """Name of the parameter in the full model."""
    tensor: Tensor | None
    """None if there is nothing to read, such as a missing gradient."""
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_parameter: bool
    """False for a buffer."""
    trains: bool
    added_by: str | None
    """The plugin that added the parameter to the model, if any."""


def parameter_shards(
    chunks: Sequence[nn.Module], vocab_size: int, read: Callable[[Tensor], Tensor | None]
) -> Iterator[ParameterShard]:
    """Yield shards of ``read(tensor)`` for every parameter and persistent buffer, as views.

    Args:
        vocab_size: Number of embedding rows without padding; padding rows are left out.
    """
    for held in sharded_tensors(chunks, vocab_size=vocab_size):
        value = read(held.tensor)
        for region in held.regions:
            shape = region.global_shape
            shard = None
            if value is not None:
                part = value[region.local.slices_in(whole(held.tensor.shape))]
                shard = region.shard("", part, region.local, writes=True)
            yield ParameterShard(
                name=region.key,
                tensor=None if shard is None else shard.tensor,
                offset=region.offset if shard is None else shard.offset,
                global_shape=shape if shard is None else shard.global_shape,
                is_parameter=isinstance(held.tensor, nn.Parameter),
                trains=held.tensor.requires_grad,
                added_by=getattr(held.tensor, "ascend_added_by", None),
            )
