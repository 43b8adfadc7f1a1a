"""The state of Megatron's optimizers as pieces that any layout can load.

Each state tensor is cut as its parameter is, so the pieces do not depend on the layout, nor on
whether the optimizer's states are spread over data-parallel ranks: a distributed optimizer's flat
range of a parameter is cut into boxes of that parameter. Keys: ``optimizer/<state>/<parameter>``,
such as ``optimizer/exp_avg/decoder.layers.3.mlp.linear_fc1.weight``; ``main_param`` is the float32
copy of a half-precision parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from torch import Tensor

from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import ShardPiece

from .boxes import Box, boxes_of_range, whole
from .regions import Region, ShardedLocal

MAIN_PARAM = "main_param"


@attrs.frozen
class Stepped:
    """A parameter of the model and what the optimizer steps in its place."""

    parameter: Tensor
    stepped: Tensor
    inner: torch.optim.Optimizer
    flat_range: tuple[int, int] | None = None
    """Which elements of the flat parameter ``stepped`` holds, where it is a distributed
    optimizer's; else it has the parameter's shape."""


def optimizer_pieces(
    optimizer: Any, tensors: Sequence[ShardedLocal], prefix: str = "optimizer"
) -> list[ShardPiece]:
    """The pieces of an optimizer's state; they share its memory, so loading fills it.

    States that the optimizer would make in its first step are made here, as zeros.

    Args:
        tensors: The model's, of ``sharded_tensors``.

    Raises:
        CheckpointError: An optimizer or a state of a kind that cannot be cut like its parameter.
    """
    regions = {id(held.tensor): held.regions for held in tensors}
    stepped = list(stepped_parameters(optimizer))
    for inner in {id(s.inner): s.inner for s in stepped}.values():
        make_state(inner)
    pieces: list[ShardPiece] = []
    problems: list[str] = []
    for item in stepped:
        states = dict(item.inner.state[item.stepped])
        if item.stepped.dtype != item.parameter.dtype:
            states[MAIN_PARAM] = item.stepped
        for name, state in states.items():
            where = f"{prefix}/{name}"
            of_parameter = regions[id(item.parameter)]
            if isinstance(state, Tensor) and state.shape == item.stepped.shape:
                pieces += _cut_pieces(where, state, item, of_parameter)
            elif isinstance(state, Tensor) and state.ndim == 0:
                pieces += _scalar_pieces(where, state, item, of_parameter)
            else:
                shown = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
                problems.append(
                    f"{where}/{of_parameter[0].key}: a state of {shown}, which is neither a "
                    f"scalar tensor nor of the parameter's shape {list(item.stepped.shape)}"
                )
    if problems:
        raise _refusal(*problems)
    return pieces


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that a torch optimizer makes in its first step, as zeros.

    By a step with zero gradients and a zero learning rate for the parameters that have none yet;
    parameters, gradients and existing states stay as they are.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in parameters if not optimizer.state.get(p)]
    if not missing:
        return
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    values = [p.detach().clone() for p in missing]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if _is_tensor(group["lr"]) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    with torch.no_grad():
        for parameter, value in zip(missing, values, strict=True):
            parameter.copy_(value)
            for state in optimizer.state[parameter].values():
                if _is_tensor(state):
                    state.zero_()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def stepped_parameters(optimizer: Any) -> Iterator[Stepped]:
    """Every parameter that an optimizer steps on this rank.

    Raises:
        CheckpointError: An optimizer of a kind that does not say.
    """
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from stepped_parameters(part)
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        inner = optimizer
    elif getattr(optimizer, "is_stub_optimizer", False):
        return
    elif type(optimizer) in (
        FP32Optimizer,
        Float16OptimizerWithFloat16Params,
        DistributedOptimizer,
    ):
        inner = optimizer.optimizer
    else:
        inner = None
    if not isinstance(inner, torch.optim.Optimizer):
        raise _refusal(
            f"{type(optimizer).__name__}: expected one of torch's own, or Megatron's FP32, Float16 "
            "or Distributed optimizer"
        )
    if isinstance(optimizer, DistributedOptimizer):
        yield from _distributed(optimizer, inner)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for halves, mains in zip(
            optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
        ):
            for parameter, main in zip(halves, mains, strict=True):
                yield Stepped(parameter, main, inner)
        for group in optimizer.fp32_from_fp32_groups:
            for parameter in group:
                yield Stepped(parameter, parameter, inner)
    else:
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield Stepped(parameter, parameter, inner)


def _distributed(
    optimizer: DistributedOptimizer, inner: torch.optim.Optimizer
) -> Iterator[Stepped]:
    pairs = (
        *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    )
    for parameters, shards in pairs:
        for parameter, shard in zip(parameters, shards, strict=True):
            if shard is None:
                raise _refusal(
                    "use_precision_aware_optimizer keeps main parameters where only it can read "
                    "them; turn it off"
                )
            buffer, dtypes, bucket = optimizer.model_param_gbuf_map[parameter]
            ranges = optimizer.gbuf_ranges[buffer][dtypes][bucket]["param_map"][parameter]
            yield Stepped(parameter, shard, inner, (ranges["param"].start, ranges["param"].end))


def _refusal(*problems: str) -> CheckpointError:
    return CheckpointError("this optimizer cannot be checkpointed", problems)


def _scalar_pieces(
    prefix: str, state: Tensor, item: Stepped, regions: Sequence[Region]
) -> Iterator[ShardPiece]:
    """A state such as ``step``, the same on all ranks: whoever holds the first element writes."""
    starts_here = item.flat_range is None or item.flat_range[0] == 0
    for key in dict.fromkeys(region.key for region in regions):
        writes = starts_here and any(
            owns(region, item.flat_range) and not any(region.offset)
            for region in regions
            if region.key == key
        )
        yield ShardPiece(
            key=f"{prefix}/{key}",
            tensor=state.detach(),
            global_shape=(),
            offset=(),
            writes=writes,
        )


def _cut_pieces(
    prefix: str, state: Tensor, item: Stepped, regions: Sequence[Region]
) -> Iterator[ShardPiece]:
    """A state of the parameter's shape, or of a flat range of it, cut at the regions' borders."""
    for box, values in _boxes(state.detach(), item):
        for region in regions:
            if (shared := box.intersect(region.local)) is not None:
                part = values[shared.slices_in(box)]
                yield region.piece(prefix, part, shared, writes=owns(region, item.flat_range))


def _boxes(state: Tensor, item: Stepped) -> Iterator[tuple[Box, Tensor]]:
    """Boxes of the parameter and views of the state's elements there."""
    if item.flat_range is None:
        yield whole(state.shape), state
        return
    position = 0
    for box in boxes_of_range(item.parameter.shape, *item.flat_range):
        yield box, state[position : position + box.volume].view(box.shape)
        position += box.volume


def owns(region: Region, flat_range: tuple[int, int] | None) -> bool:
    """Whether this rank writes what it holds of a region: the data-parallel ranks of a distributed
    optimizer hold different ranges, not replicas."""
    return region.writes if flat_range is None else not any(region.replica[:-1])


def is_distributed(optimizer: Any) -> bool:
    """Whether the data-parallel ranks share what it steps among them."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return any(isinstance(part, DistributedOptimizer) for part in parts)
