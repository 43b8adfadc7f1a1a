"""Optimizer state of Megatron's optimizers as shards that any parallel layout can load.

Each state tensor is sharded like its parameter, so shards depend neither on the layout nor on
whether states are sharded over data-parallel ranks: the flat parameter range of a distributed
optimizer is split into boxes of the parameter. Keys: ``optimizer/<state>/<parameter>``, such as
``optimizer/exp_avg/decoder.layers.3.mlp.linear_fc1.weight``; ``main_param`` is the float32 copy of
a half-precision parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from ascend_run.ops.optimizer_states import create_states
from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import OptimizerState, SteppedParameter, TensorShard
from ascend_run.types.optimizer import MAIN_PARAM

from .boxes import Box, boxes_of_range, whole
from .regions import Region, ShardedLocal

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def optimizer_shards(
    optimizer: MegatronOptimizer | torch.optim.Optimizer | None,
    tensors: Sequence[ShardedLocal],
    prefix: str = "optimizer",
    declared: Mapping[str, OptimizerState] | None = None,
) -> list[TensorShard]:
    """Return the shards of an optimizer's state; they share its memory, so loading fills it. Call
    it, and use them, while the master weights are ``materialized``.

    States that the optimizer would create in its first step are created here.

    Args:
        tensors: The model's tensors, from ``sharded_tensors``.
        declared: See ``create_states``.

    Raises:
        CheckpointError: The optimizer is not supported, keeps numbers outside of its states, or a
            state has neither the parameter's shape nor zero dimensions.
    """
    regions = {id(held.tensor): held.regions for held in tensors}
    stepped = list(stepped_parameters(optimizer))
    shards: list[TensorShard] = []
    problems = [
        f"{type(inner).__name__} changes {option!r} of its parameter groups, which are not saved; "
        "keep it in optimizer.state[parameter]"
        for inner in {id(s.inner): s.inner for s in stepped}.values()
        for option in create_states(inner, declared)
    ]
    for item in stepped:
        states = dict(item.inner.state[item.stepped])
        if item.stepped.dtype != item.parameter.dtype:
            states[MAIN_PARAM] = item.stepped
        for name, state in states.items():
            where = f"{prefix}/{name}"
            of_parameter = regions[id(item.parameter)]
            if isinstance(state, Tensor) and state.shape == item.stepped.shape:
                shards += _split_shards(where, state, item, of_parameter)
            elif isinstance(state, Tensor) and state.ndim == 0:
                shards += _scalar_shards(where, state, item, of_parameter)
            else:
                shown = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
                problems.append(
                    f"{where}/{of_parameter[0].key}: a state of {shown}, which is neither a "
                    f"scalar tensor nor of the parameter's shape {list(item.stepped.shape)}"
                )
    if problems:
        raise _not_supported(*problems)
    return shards


def stepped_parameters(
    optimizer: MegatronOptimizer | torch.optim.Optimizer | None,
) -> Iterator[SteppedParameter]:
    """Yield every parameter that an optimizer updates on this rank.

    Raises:
        CheckpointError: It is neither a torch optimizer nor describes what it updates.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, torch.optim.Optimizer):
            for members in part.param_groups:
                for parameter in members["params"]:
                    yield SteppedParameter(parameter, parameter, part)
        elif hasattr(part, "stepped"):
            yield from part.stepped()
        else:
            raise _not_supported(
                f"{type(part).__name__}: expected one of torch's own, or a MixedPrecisionOptimizer"
            )


@contextmanager
def materialized(optimizer: MegatronOptimizer | torch.optim.Optimizer | None) -> Iterator[None]:
    """Hold the master weights in the tensors of ``stepped_parameters``, to be read and written."""
    with ExitStack() as stack:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if hasattr(part, "materialized"):
                stack.enter_context(part.materialized())
        yield


def _not_supported(*problems: str) -> CheckpointError:
    return CheckpointError("this optimizer cannot be checkpointed", problems)


def _scalar_shards(
    prefix: str, state: Tensor, item: SteppedParameter, regions: Sequence[Region]
) -> Iterator[TensorShard]:
    """Yield shards of a scalar state such as ``step``, which is equal on all ranks.

    The rank that holds the parameter's first element writes it.
    """
    starts_here = item.flat_range is None or item.flat_range[0] == 0
    for key in dict.fromkeys(region.key for region in regions):
        writes = starts_here and any(
            owns(region, item.flat_range) and not any(region.offset)
            for region in regions
            if region.key == key
        )
        yield TensorShard(
            key=f"{prefix}/{key}",
            tensor=state.detach(),
            global_shape=(),
            offset=(),
            writes=writes,
        )


def _split_shards(
    prefix: str, state: Tensor, item: SteppedParameter, regions: Sequence[Region]
) -> Iterator[TensorShard]:
    """Yield shards of a state of the parameter's shape or flat range, split at region borders."""
    for box, values in _boxes(state.detach(), item):
        for region in regions:
            if (shared := box.intersect(region.local)) is not None:
                part = values[shared.slices_in(box)]
                yield region.shard(prefix, part, shared, writes=owns(region, item.flat_range))


def _boxes(state: Tensor, item: SteppedParameter) -> Iterator[tuple[Box, Tensor]]:
    """Yield boxes of the parameter with views of the state's elements."""
    if item.flat_range is None:
        yield whole(state.shape), state
        return
    position = 0
    for box in boxes_of_range(item.parameter.shape, *item.flat_range):
        yield box, state[position : position + box.volume].view(box.shape)
        position += box.volume


def owns(region: Region, flat_range: tuple[int, int] | None) -> bool:
    """Return whether this rank writes its part of a region.

    The data-parallel ranks of a distributed optimizer hold different ranges, not replicas.
    """
    return region.writes if flat_range is None else not any(region.replica[:-1])


def is_distributed(optimizer: MegatronOptimizer | torch.optim.Optimizer | None) -> bool:
    """Return whether the optimizer is sharded over data-parallel ranks."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return any(isinstance(part, DistributedOptimizer) for part in parts)
