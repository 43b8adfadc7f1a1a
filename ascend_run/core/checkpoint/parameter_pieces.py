"""A model's parameters as pieces of whole tensors, under the names that no layout changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
from torch import Tensor, nn

from .boxes import whole
from .regions import sharded_tensors


@attrs.frozen(kw_only=True)
class ParameterPiece:
    """The part of one parameter, or of what has its shape, that this rank holds."""

    name: str
    """Of the parameter in the whole model."""
    tensor: Tensor | None
    """None where there is nothing to read, such as a gradient that did not come about."""
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_parameter: bool
    """Or a buffer."""
    trains: bool
    added_by: str | None
    """The plugin that added it to the model, where one did."""


def parameter_pieces(
    chunks: Sequence[nn.Module], vocab_size: int, read: Callable[[Tensor], Tensor | None]
) -> Iterator[ParameterPiece]:
    """Pieces of what ``read`` answers for every parameter and persistent buffer; views, no copies.

    Args:
        vocab_size: True rows of the embedding; those that pad it are left out.
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
