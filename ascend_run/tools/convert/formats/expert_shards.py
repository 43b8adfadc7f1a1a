"""Experts in Megatron's files: each expert on its own, or matrices of all local experts.

Ours are two tensors per layer: fc1 [E, 2F, H] (gate rows, then up rows) and fc2 [E, H, F]; without
a gated unit, fc1 is [E, F, H]. Where experts have biases, there are fc1_bias [E, 2F], sharded as
the rows of fc1, and fc2_bias [E, H], which is replicated. Every function works on tensors of the
device ``meta`` too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from ascend_run.plugin_api.errors import CheckpointError

from .parameter_shards import Split, join, shard

# E = experts of the layer, e = experts of one file, F = width of an expert, f = of its shard,
# H = hidden size, G = 2 if gated, else 1

_INNER: Final = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<one>\d+)\.linear_(?P<linear>fc[12])\.(?P<kind>weight|bias)"
    r"|linear_(?P<fused>fc[12])\.(?P<fused_kind>weight|bias)(?P<number>\d+)"
    r"|weight(?P<matrix>[12]))"
)


def num_fc2_elements(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of elements of fc2 in a file's experts, whatever their names."""
    return sum(tensor.numel() for inner, tensor in tensors.items() if expert_part(inner) == "fc2")


class ExpertNames(StrEnum):
    """How the experts of a file are named."""

    SEQUENTIAL = "sequential"
    """``local_experts.N.linear_fc1.weight`` [G*f, H], ``.bias`` [G*f]: Megatron's SequentialMLP."""
    NUMBERED = "numbered"
    """``linear_fc1.weightN`` [G*f, H], ``.biasN`` [G*f]: Transformer Engine's grouped linear."""
    GROUPED = "grouped"
    """``weight1`` and ``weight2``: Megatron's and MindSpeed's grouped matmul. weight1 is [H, e*G*f]
    with the memory of [e, H, G*f], weight2 is [e*f, H] with that of [e, f, H]. No biases."""


def is_expert_name(inner: str) -> bool:
    """Return whether a name within a layer is of routed experts."""
    return inner.startswith("mlp.experts.")


def expert_part(inner: str) -> str | None:
    """Return ``fc1``, ``fc2``, ``fc1_bias`` or ``fc2_bias``: what a name within a layer is of.

    None: Megatron's experts have no such tensor.
    """
    if (match := _INNER.fullmatch(inner)) is None:
        return None
    if match["matrix"]:
        return f"fc{match['matrix']}"
    is_bias = "bias" in (match["kind"], match["fused_kind"])
    return f"{match['linear'] or match['fused']}{'_bias' if is_bias else ''}"


def is_replicated(name: str) -> bool:
    """Return whether each rank has all of every expert's ``fc1``, ``fc2``, or bias of either."""
    return name == "fc2_bias"


def split_experts(
    name: str,
    tensor: Tensor,
    names: ExpertNames,
    *,
    group: int,
    groups: int,
    rank: int,
    parts: int,
    gated: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that one file has of a part of the experts, named within their layer.

    Args:
        name: ``fc1``, ``fc2``, ``fc1_bias`` or ``fc2_bias``; biases not with ``GROUPED``.
        tensor: Of all experts.
        group, groups: Which consecutive experts.
        rank, parts: Which shard of each expert.
    """
    split = _split(name, gated=gated)
    experts = tensor.chunk(groups)[group]
    if names is ExpertNames.GROUPED:
        if name == "fc1":
            transposed = torch.stack([shard(one, split, rank, parts).t() for one in experts])
            yield "mlp.experts.weight1", transposed.view(tensor.shape[2], -1)
        else:
            transposed = torch.stack([shard(one, split, rank, parts).t() for one in experts])
            yield "mlp.experts.weight2", transposed.view(-1, tensor.shape[1])
        return
    linear, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    for number, one in enumerate(experts):
        if names is ExpertNames.SEQUENTIAL:
            inner = f"mlp.experts.local_experts.{number}.linear_{linear}.{kind}"
        else:
            inner = f"mlp.experts.linear_{linear}.{kind}{number}"
        yield inner, shard(one, split, rank, parts)


def join_experts(
    name: str, files: list[list[Mapping[str, Tensor]]], *, hidden: int, width: int, gated: bool
) -> Tensor:
    """Return a part of all experts; the inverse of ``split_experts``.

    Args:
        name: ``fc1``, ``fc2``, ``fc1_bias`` or ``fc2_bias``.
        files: Group of experts -> tensor-parallel rank of its experts -> tensors of the layer, by
            name within it.
        hidden, width: H and F.

    Raises:
        CheckpointError: A tensor is missing or of another shape.
    """
    experts: list[Tensor] = []
    for group in files:
        held = [_held(name, tensors, hidden, width // len(group), gated=gated) for tensors in group]
        if len({len(one) for one in held}) > 1:
            raise CheckpointError(f"{name}: its shards have different numbers of experts")
        experts += [
            join([*shards], _split(name, gated=gated)) for shards in zip(*held, strict=True)
        ]
    return torch.stack(experts)


def _held(
    name: str, tensors: Mapping[str, Tensor], hidden: int, width: int, *, gated: bool
) -> list[Tensor]:
    """Return the shards of a file's experts, in order, shaped as those of ``SEQUENTIAL``."""
    rows = width * (2 if gated else 1)
    shape = {
        "fc1": (rows, hidden),
        "fc2": (hidden, width),
        "fc1_bias": (rows,),
        "fc2_bias": (hidden,),
    }[name]
    numbered: dict[int, Tensor] = {}
    for inner, tensor in tensors.items():
        match = _INNER.fullmatch(inner)
        if match is None:
            raise CheckpointError(f"{inner} is no weight of an expert that can be read")
        if expert_part(inner) != name:
            continue
        if match["matrix"]:
            if tensor.dim() != 2 or tensor.numel() % math.prod(shape):
                raise CheckpointError(
                    f"{inner} is {list(tensor.shape)}, not a multiple of experts of {list(shape)}"
                )
            flat = (-1, hidden, rows) if name == "fc1" else (-1, width, hidden)
            return [one.t() for one in tensor.reshape(flat)]
        numbered[int(match["one"] or match["number"])] = tensor
    if sorted(numbered) != [*range(len(numbered))] or not numbered:
        raise CheckpointError(f"{name} is there for the experts {sorted(numbered)} of a file")
    for number, tensor in numbered.items():
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} of expert {number} is {list(tensor.shape)}, expected {list(shape)}"
            )
    return [numbered[n] for n in range(len(numbered))]


def _split(name: str, *, gated: bool) -> Split:
    if is_replicated(name):
        return Split.NONE
    if name == "fc2":
        return Split.COLUMNS
    return Split.GATED_ROWS if gated else Split.ROWS
