"""A LoRA adapter on Megatron's parallel linears, with tensor and sequence parallelism.

Column-parallel (the output is sharded): A is replicated on every rank, each B is sharded as the
output is; where ranks share key-value groups, each B of the QKV projection is replicated and a rank
takes its rows of the product. Row-parallel (the input is sharded): A is sharded as the input is, B
is replicated. Collectives are ``rank`` wide.
"""

# S sequence on this rank, B micro-batch, H input and O output of the linear on this rank, R rank,
# P adapted parts of the linear, G key-value groups on this rank, D head width

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_run.ops.linear.low_rank import scale_of
from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api import ForwardLink
from ascend_run.types.forward import Forward

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from . import LoraOptions

ParallelLinear: TypeAlias = ColumnParallelLinear | RowParallelLinear
Offsets: TypeAlias = tuple[tuple[int, int, int], ...]
"""As in Megatron: (axis, index of the shard, number of shards) per axis."""

ADDED_BY = "lora"
"""Value of ``ascend_added_by`` on the adapters' parameters, which no model family maps."""


class Adapter(nn.Module):
    """Compute ``scale * B A x`` for one linear: [S, B, H] -> [S, B, O].

    Parameters: ``lora_A`` [P * R, H], one block of rows per part, and ``lora_B.<part>`` [rows, R],
    with rows in the order of Hugging Face's linear of that part.

    Args:
        linear: Megatron's linear; its weight determines device and dtype.
        layer_index: Index of the layer slot in the full model, until ``number_layers``.
        name: Name of the linear in its layer.
        parts: From ``targets.linear_parts``, in Megatron's order.
    """

    def __init__(
        self,
        linear: ParallelLinear,
        layer_index: int,
        name: str,
        parts: Sequence[str],
        options: LoraOptions,
    ) -> None:
        super().__init__()
        self.layer, self.name = layer_index, name
        self.parts, self.rank = tuple(parts), options.rank
        self.scale = scale_of(options.alpha, options.rank, rslora=options.rslora)
        self.dropout = options.dropout
        self.is_column = isinstance(linear, ColumnParallelLinear)
        self.tp_group = _group(linear)
        self.sequence_parallel = bool(linear.sequence_parallel)
        self.rows = _rows_of_parts(linear, name)
        self.shares_groups = _shares_groups(linear, name)
        weight = linear.weight
        self.lora_A = nn.Parameter(weight.new_empty(len(parts) * self.rank, weight.shape[1]))
        self.lora_B = nn.ParameterDict(
            {part: weight.new_zeros(math.prod(self.rows[part]), self.rank) for part in parts}
        )
        for parameter in self.parameters():  # replicated as dense parameters are
            mark(parameter, ascend_added_by=ADDED_BY, allreduce=True)
        split = [*self.lora_B.values()] if self.is_column else [self.lora_A]
        for parameter in [] if self.shares_groups else split:
            set_tensor_model_parallel_attributes(parameter, True, 0 if self.is_column else 1, 1)
        # Replicated, but sees only this rank's tokens: Megatron all-reduces such gradients.
        whole = [self.lora_A] if self.is_column else [*self.lora_B.values()]
        for parameter in whole:
            mark(parameter, sequence_parallel=self.sequence_parallel)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize A Kaiming-uniform with a = sqrt(5), as PEFT does: uniform within 1 / sqrt(H).

        The values depend on the seed and the linear's name alone, so they are the same on any
        layout.
        """
        where = f"decoder.layers.{self.layer}.{self.name}"
        size, rank = self.tp_group.size(), self.tp_group.rank()
        width = self.lora_A.shape[1] * (1 if self.is_column else size)
        for part, block in zip(self.parts, self.lora_A.split(self.rank), strict=True):
            digest = hashlib.sha256(f"{seed}/{where}/{part}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            bound = 1.0 / math.sqrt(width)
            drawn = torch.empty(self.rank, width).uniform_(-bound, bound, generator=generator)
            block.copy_(drawn if self.is_column else drawn.chunk(size, dim=1)[rank])

    def forward(self, x_SBH: Tensor) -> Tensor:
        inner = F.linear(self._dropped(x_SBH), self.lora_A)
        return self.scale * self._outer(self._exchanged(inner))

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        # Ranks with the same input must draw the same dropout mask, others an independent one.
        is_shared = self.is_column and not self.sequence_parallel
        with nullcontext() if is_shared else get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """Communicate the output of A as B needs it; gradients take the opposite direction."""
        group = self.tp_group
        if group.size() == 1:
            return inner
        if self.is_column:
            if self.sequence_parallel:
                gathered: Tensor = gather_from_sequence_parallel_region(
                    inner, tensor_parallel_output_grad=True, group=group
                )
                return gathered
            copied: Tensor = copy_to_tensor_model_parallel_region(inner, group=group)
            return copied
        if self.sequence_parallel:
            scattered: Tensor = reduce_scatter_to_sequence_parallel_region(inner, group=group)
            return scattered
        summed: Tensor = reduce_from_tensor_model_parallel_region(inner, group=group)
        return summed

    def _outer(self, inner: Tensor) -> Tensor:
        """Apply every part's B in Megatron's order of rows: [.., P * R] -> [.., O]."""
        blocks = dict(zip(self.parts, inner.split(self.rank, dim=-1), strict=True))
        outputs = []
        for part, (groups, rows) in self.rows.items():
            if part in blocks:
                matrix = self.lora_B[part].to(inner.dtype)
                if self.shares_groups:  # backward sums what the ranks' rows contribute
                    matrix = copy_to_tensor_model_parallel_region(matrix, group=self.tp_group)
                product = F.linear(blocks[part], matrix)
                if len(self.rows) == 1:
                    return product
                outputs.append(product.unflatten(-1, (groups, rows)))
            else:
                outputs.append(inner.new_zeros((*inner.shape[:-1], groups, rows)))
        out = torch.cat(outputs, dim=-1).flatten(-2)
        if self.shares_groups:
            return out.chunk(self.tp_group.size(), -1)[self.tp_group.rank()]
        return out

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return the update of this rank's weight, [O, H], float64."""
        width = len(self.parts) * self.rank
        identity = torch.eye(width, dtype=torch.float64, device=self.lora_A.device)
        return self.scale * (self._outer(identity).t() @ self.lora_A.double())

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, object]:
        """Return the sharded state dict in the form of Megatron's linears."""
        split = {f"lora_B.{part}": 0 for part in self.parts} if self.is_column else {"lora_A": 1}
        split = {} if self.shares_groups else split
        result: dict[str, object] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return result


def _group(linear: ParallelLinear) -> dist.ProcessGroup:
    """Return the tensor-parallel group of the linear."""
    assert linear.tp_group is not None
    return linear.tp_group


def _shares_groups(linear: ParallelLinear, name: str) -> bool:
    """Return whether several ranks share a key-value group, so that a rank's rows of the QKV
    projection are a part of one, in which queries, keys and values have unequal shares."""
    groups = cast("TransformerConfig", linear.config).num_query_groups
    assert groups is not None  # Megatron fills it in
    return name.endswith("linear_qkv") and groups < _group(linear).size()


def _rows_of_parts(linear: ParallelLinear, name: str) -> dict[str, tuple[int, int]]:
    """Return (groups, rows per group) of every part of a linear, in Megatron's order of the output.

    The rows of queries, keys and values are interleaved by key-value group; those of other linears
    are one block per part.
    """
    config, rows = cast("TransformerConfig", linear.config), linear.weight.shape[0]
    if name.endswith("linear_qkv"):
        assert config.num_query_groups is not None  # Megatron fills both in
        assert config.kv_channels is not None
        groups, width = config.num_query_groups, config.kv_channels
        if not _shares_groups(linear, name):
            groups //= _group(linear).size()
        queries = config.num_attention_heads // config.num_query_groups
        return {
            "linear_q": (groups, queries * width),
            "linear_k": (groups, width),
            "linear_v": (groups, width),
        }
    if name.endswith("linear_fc1") and config.gated_linear_unit:
        return {"linear_fc1_gate": (1, rows // 2), "linear_fc1_up": (1, rows // 2)}
    return {name.rpartition(".")[2]: (1, rows)}


def attach(
    linear: ParallelLinear, layer_index: int, name: str, parts: Sequence[str], options: LoraOptions
) -> ForwardLink:
    """Attach an adapter to a linear and return the link that adds its output.

    The adapter's parameters are named under the linear, and the link works with any implementation
    of the linear's forward.
    """
    adapter = Adapter(linear, layer_index, name, parts, options)
    linear.add_module("adapter", adapter)
    inner_sharded: Callable[..., dict[str, Any]] = linear.sharded_state_dict

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        own = inner_sharded(prefix, sharded_offsets, metadata)
        below = f"{prefix}adapter."
        kept = {key: value for key, value in own.items() if not key.startswith(below)}
        return kept | adapter.sharded_state_dict(below, sharded_offsets, metadata)

    vars(linear)["sharded_state_dict"] = sharded_state_dict  # on this instance only

    def wrap(inner: Forward) -> Forward:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            out, bias = inner(x, *args, **kwargs)
            return out + adapter(x), bias

        return forward

    # Dropout draws from Megatron's generators, and B's input needs a collective: not compilable.
    return ForwardLink(wrap=wrap, compilable=False)


def adapters(model: nn.Module) -> list[Adapter]:
    """Return every adapter of a model chunk, in layer order."""
    return [module for module in model.modules() if isinstance(module, Adapter)]


def number_layers(model: nn.Module) -> None:
    """Renumber the adapters by layer: empty layer slots do not count."""
    numbers = getattr(model, "layer_numbers", ())
    for adapter in adapters(model) if numbers else ():
        adapter.layer = numbers[adapter.layer]


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add every adapter to its linear's weight, and zero its B so that the output is unchanged."""
    for linear in [*model.modules()]:
        adapter = getattr(linear, "adapter", None)
        if isinstance(adapter, Adapter):
            weight = cast("ParallelLinear", linear).weight
            weight.copy_(weight.double() + adapter.delta())
            for matrix in adapter.lora_B.values():
                matrix.zero_()
