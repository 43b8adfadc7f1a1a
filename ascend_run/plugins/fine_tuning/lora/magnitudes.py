"""DoRA: a weight as magnitudes of its rows times directions, ``m / |W + s B A| * (W + s B A)``.

m is trained; the norms are not differentiated, as in the paper, section 4.3, and in PEFT. They are
over a row's inputs: of a row-parallel linear, whose inputs are sharded, the squares are summed over
its ranks.

Source: arXiv:2402.09353.
"""

# S sequence on this rank, B micro-batch, H input and O output of the linear on this rank

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ascend_run.types.forward import Forward

from .adapter import Adapter
from .expert_adapter import ExpertAdapter
from .linear_rows import ParallelLinear


def decomposed(
    adapter: Adapter, linear: ParallelLinear, inner: Forward, x: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return what the linear returns, with the decomposed weight.

    With dropout, PEFT's definition: the weight is applied to the input as it is, and what the
    adapter changes to the dropped input.
    """
    out, bias = inner(x, *args, **kwargs)
    added = None if linear.skip_bias_add else linear.bias
    factors = _factors(adapter, linear.weight).to(out.dtype)
    dropped = adapter.dropped(x)
    plain = out if dropped is x else inner(dropped, *args, **kwargs)[0]
    plain = plain if added is None else plain - added
    scaled = factors * (plain + adapter.update(dropped))
    if dropped is not x:
        return out + (scaled - plain), bias
    return (scaled if added is None else scaled + added), bias


@torch.no_grad()
def row_norms(adapter: Adapter, weight_OH: Tensor) -> Tensor:
    """Return the norms of the rows of ``W + s B A``, [O], in float32 (float64 for float64).

    The sum of squares is expanded, so that no matrix of the weight's size is built for ``B A``.
    """
    wide = torch.promote_types(weight_OH.dtype, torch.float32)
    weight, a = weight_OH.to(wide), adapter.lora_A.to(wide)
    b = adapter.outer(torch.eye(len(a), dtype=wide, device=a.device)).t()
    squares = torch.linalg.vector_norm(weight, dim=1).square()
    squares += ((2.0 * weight @ a.t() + b @ (a @ a.t())) * b).sum(dim=1)
    if not adapter.is_column:
        dist.all_reduce(squares, group=adapter.tp_group)
    norms: Tensor = squares.sqrt()
    return norms


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Set the magnitudes to the norms of the rows, so that the linears compute what they did."""
    for adapter, linear in adapted_linears(model):
        norms = row_norms(adapter, linear.weight)
        if adapter.shares_groups:
            shards = [torch.empty_like(norms) for _ in range(adapter.tp_group.size())]
            dist.all_gather(shards, norms, group=adapter.tp_group)
            norms = torch.cat(shards)
        groups = next(iter(adapter.rows.values()))[0]
        sizes = [rows for _, rows in adapter.rows.values()]
        parts = norms.unflatten(0, (groups, -1)).split(sizes, dim=1)
        for part, values in zip(adapter.rows, parts, strict=True):
            if adapter.lora_magnitude is not None and part in adapter.lora_magnitude:
                adapter.lora_magnitude[part].copy_(values.flatten())


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Set every adapted weight to the one that its adapter makes of it, and zero B, so that the
    output is unchanged."""
    for experts in model.modules():
        adapter = getattr(experts, "adapter", None)
        if isinstance(adapter, ExpertAdapter):
            for name, delta in adapter.deltas().items():
                experts.get_parameter(name).add_(delta)
            for matrix in adapter.lora_B.parameters():
                matrix.zero_()
    for adapter, linear in adapted_linears(model):
        merged = linear.weight.double() + adapter.delta()
        if adapter.lora_magnitude is not None:
            merged *= _factors(adapter, linear.weight).double()[:, None]
        linear.weight.copy_(merged)
        for matrix in adapter.lora_B.values():
            matrix.zero_()


def adapted_linears(model: nn.Module) -> list[tuple[Adapter, ParallelLinear]]:
    """Return every adapter of a model chunk and its linear."""
    found = [(getattr(linear, "adapter", None), linear) for linear in model.modules()]
    return [
        (adapter, cast("ParallelLinear", linear))
        for adapter, linear in found
        if isinstance(adapter, Adapter)
    ]


def _factors(adapter: Adapter, weight_OH: Tensor) -> Tensor:
    """Return the factor of each row, [O]; 1 for rows of parts without an adapter."""
    assert adapter.lora_magnitude is not None
    norms = row_norms(adapter, weight_OH)
    magnitudes = {
        part: adapter.shared(vector.to(norms.dtype))
        for part, vector in adapter.lora_magnitude.items()
    }
    factors = adapter.in_order(magnitudes) / norms
    if len(adapter.rows) == len(adapter.parts):
        return factors
    ones = {part: torch.ones_like(vector) for part, vector in magnitudes.items()}
    return torch.where(adapter.in_order(ones) > 0, factors, 1.0)
