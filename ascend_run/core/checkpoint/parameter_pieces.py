"""A model's parameters as shards of global tensors, with layout-independent names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
from torch import Tensor, nn

from .boxes import whole
from .regions import sharded_tensors


@attrs.frozen(kw_only=True)
class ParameterPiece:
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


def parameter_pieces(
    chunks: Sequence[nn.Module], vocab_size: int, read: Callable[[Tensor], Tensor | None]
) -> Iterator[ParameterPiece]:
    """Yield shards of ``read(tensor)`` for every parameter and persistent buffer, as views.

    Args:
        vocab_size: Number of embedding rows without padding; padding rows are left out.
    """
    for held in sharded_tensors(chunks, vocab_size=vocab_size):
        value = read(held.tensor)
        for region in held.regions:
            shape = region.global_shape
            piece = None
            if value is not None:
                part = value[region.local.slices_in(whole(held.tensor.shape))]
                piece = region.piece("", part, region.local, writes=True)
            yield ParameterPiece(
                name=region.key,
                tensor=None if piece is None else piece.tensor,
                offset=region.offset if piece is None else piece.offset,
                global_shape=shape if piece is None else piece.global_shape,
                is_parameter=isinstance(held.tensor, nn.Parameter),
                trains=held.tensor.requires_grad,
                added_by=getattr(held.tensor, "ascend_added_by", None),
            )
