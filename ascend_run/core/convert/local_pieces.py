"""A rank's parameters as pieces of the whole ones, under tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from torch import Tensor

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import ModelFamily, ShardPiece

from .parameter_rows import ParameterSource, parameter_sources


@attrs.frozen(kw_only=True)
class Coordinates:
    """Where a rank stands among those that share a layer."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1


def local_pieces(
    parameters: Iterable[tuple[str, Tensor]],
    family: ModelFamily,
    config: RunConfig,
    rank: Coordinates,
) -> list[ShardPiece]:
    """The pieces that ``load_hf_weights`` fills, as views of the parameters.

    Args:
        parameters: (name with its layer counted over the whole model, this rank's parameter), with
            Megatron's marks of tensor parallelism (``tensor_model_parallel``, ``partition_dim``).
            Query, key and value are cut by whole groups, so the groups must be at least as many as
            the tensor-parallel ranks, which the layout check asks for.
    """
    sources = parameter_sources(family, config)
    return [
        piece
        for name, parameter in parameters
        for piece in _pieces(name, parameter, sources.get(name), rank)
    ]


def _pieces(
    name: str, parameter: Any, source: ParameterSource | None, rank: Coordinates
) -> Iterator[ShardPiece]:
    shape, offset = list(parameter.shape), [0] * parameter.dim()
    form = source.form if source else "copy"
    if form == "stack_experts":
        shape[0], offset[0] = shape[0] * rank.ep_size, shape[0] * rank.ep_rank
    elif rank.tp_size > 1 and getattr(parameter, "tensor_model_parallel", False):
        axis = parameter.partition_dim
        if form == "concat" and axis == 0:
            assert source is not None
            yield from _interleaved_pieces(name, parameter, len(source.hf_names), rank)
            return
        shape[axis], offset[axis] = shape[axis] * rank.tp_size, shape[axis] * rank.tp_rank
    yield ShardPiece(
        key=name, tensor=parameter.detach(), global_shape=tuple(shape), offset=tuple(offset)
    )


def _interleaved_pieces(
    name: str, parameter: Tensor, parts: int, rank: Coordinates
) -> Iterator[ShardPiece]:
    """A rank of a gated fc1 holds its gate rows, then its up rows: a piece each."""
    whole = (parameter.shape[0] * rank.tp_size, *parameter.shape[1:])
    for part, rows in enumerate(parameter.detach().chunk(parts)):
        start = part * (whole[0] // parts) + rank.tp_rank * len(rows)
        yield ShardPiece(
            key=name, tensor=rows, global_shape=whole, offset=(start, *[0] * (rows.dim() - 1))
        )
