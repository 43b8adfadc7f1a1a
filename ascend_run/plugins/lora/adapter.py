"""An adapter on one of Megatron's parallel linears, with tensor and sequence parallelism.

Column-parallel (its output is split over ranks): A whole on every rank, each B split as the output
is. Row-parallel (its input is split): A split as the input is, B whole. Messages are ``rank`` wide.
"""

# S sequence on this rank, B micro-batch, H input and O output of the linear on this rank, R rank,
# P adapted parts of the linear, G key-value groups on this rank, D head width

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from . import LoraOptions

ADDED_BY = "lora"
"""Mark of the adapters' parameters, ``ascend_added_by``: no model family knows them."""


class Adapter(nn.Module):
    """``scale * B A x`` for one linear: [S, B, H] -> [S, B, O].

    Parameters: ``lora_A`` [P * R, H], one block of rows a part, and ``lora_B.<part>`` [rows, R],
    rows in the order in which Hugging Face's linear of that part has them.

    Args:
        linear: Megatron's; its weight says device and dtype.
        layer_index: Its place in the whole model, until ``number_layers``.
        name: Of the linear in its layer.
        parts: Of ``targets.linear_parts``, in Megatron's order.
    """

    def __init__(
        self,
        linear: nn.Module,
        layer_index: int,
        name: str,
        parts: Sequence[str],
        options: LoraOptions,
    ) -> None:
        super().__init__()
        self.layer, self.name = layer_index, name
        self.parts, self.rank = tuple(parts), options.rank
        self.scale = options.alpha / (math.sqrt(options.rank) if options.rslora else options.rank)
        self.dropout = options.dropout
        self.is_column = isinstance(linear, ColumnParallelLinear)
        self.tp_group = linear.tp_group
        self.sequence_parallel = bool(linear.sequence_parallel)
        self.rows = _rows_of_parts(linear, name)
        weight = linear.weight
        like = {"dtype": weight.dtype, "device": weight.device}
        self.lora_A = nn.Parameter(torch.empty(len(parts) * self.rank, weight.shape[1], **like))
        self.lora_B = nn.ParameterDict(
            {part: torch.zeros(math.prod(self.rows[part]), self.rank, **like) for part in parts}
        )
        for parameter in self.parameters():
            parameter.ascend_added_by = ADDED_BY
            parameter.allreduce = True  # replicated as dense parameters are
        split = [*self.lora_B.values()] if self.is_column else [self.lora_A]
        for parameter in split:
            set_tensor_model_parallel_attributes(parameter, True, 0 if self.is_column else 1, 1)
        # What is whole on every rank but sees only its tokens: Megatron sums such gradients.
        whole = [self.lora_A] if self.is_column else [*self.lora_B.values()]
        for parameter in whole:
            parameter.sequence_parallel = self.sequence_parallel

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """A Kaiming-uniform with a = sqrt(5), as PEFT has it: uniform within 1 / sqrt(H). It is a
        function of the seed and of what the linear is called, on any layout."""
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
        # Ranks that hold the same input drop the same of it, others draw apart.
        is_shared = self.is_column and not self.sequence_parallel
        with nullcontext() if is_shared else get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """The narrow product as the second one needs it; gradients travel the other way."""
        group = self.tp_group
        if group.size() == 1:
            return inner
        if self.is_column:
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(
                    inner, tensor_parallel_output_grad=True, group=group
                )
            return copy_to_tensor_model_parallel_region(inner, group=group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=group)
        return reduce_from_tensor_model_parallel_region(inner, group=group)

    def _outer(self, inner: Tensor) -> Tensor:
        """[.., P * R] -> [.., O]: every part's product, in Megatron's order of rows."""
        blocks = dict(zip(self.parts, inner.split(self.rank, dim=-1), strict=True))
        outputs = []
        for part, (groups, rows) in self.rows.items():
            if part in blocks:
                matrix = self.lora_B[part].to(inner.dtype)
                product = F.linear(blocks[part], matrix)
                if len(self.rows) == 1:
                    return product
                outputs.append(product.unflatten(-1, (groups, rows)))
            else:
                outputs.append(inner.new_zeros((*inner.shape[:-1], groups, rows)))
        return torch.cat(outputs, dim=-1).flatten(-2)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """What the adapter adds to this rank's weight, [O, H]; taken in float64."""
        width = len(self.parts) * self.rank
        identity = torch.eye(width, dtype=torch.float64, device=self.lora_A.device)
        return self.scale * (self._outer(identity).t() @ self.lora_A.double())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """As Megatron's linears answer it."""
        split = {f"lora_B.{part}": 0 for part in self.parts} if self.is_column else {"lora_A": 1}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def _rows_of_parts(linear: nn.Module, name: str) -> dict[str, tuple[int, int]]:
    """Every part of a linear -> (groups, rows in each), in Megatron's order of the output.

    The rows of queries, keys and values are interleaved by key-value group; those of other linears
    are one block a part.
    """
    config, rows = linear.config, linear.weight.shape[0]
    if name.endswith("linear_qkv"):
        groups = (config.num_query_groups or config.num_attention_heads) // linear.tp_group.size()
        width = config.kv_channels
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
    linear: nn.Module, layer_index: int, name: str, parts: Sequence[str], options: LoraOptions
) -> nn.Module:
    """The same linear, with an adapter added to what it answers and its own parameters' names."""
    adapter = Adapter(linear, layer_index, name, parts, options)
    linear.adapter = adapter
    inner_forward, inner_sharded = linear.forward, linear.sharded_state_dict

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = inner_forward(x, *args, **kwargs)
        return out + adapter(x), bias

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        own = inner_sharded(prefix, sharded_offsets, metadata)
        below = f"{prefix}adapter."
        kept = {key: value for key, value in own.items() if not key.startswith(below)}
        return kept | adapter.sharded_state_dict(below, sharded_offsets, metadata)

    linear.forward = forward
    linear.sharded_state_dict = sharded_state_dict
    return linear


def adapters(model: nn.Module) -> list[Adapter]:
    """Every adapter of a model chunk, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, Adapter)]


def number_layers(model: nn.Module) -> None:
    """Let every adapter know the number of its layer: places without a layer do not count."""
    numbers = getattr(model, "layer_numbers", ())
    for adapter in adapters(model) if numbers else ():
        adapter.layer = numbers[adapter.layer]


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add every adapter to its linear's weight, and set it to zero: the model computes the same."""
    for linear in [module for module in model.modules() if hasattr(module, "adapter")]:
        weight = linear.weight
        weight.copy_(weight.double() + linear.adapter.delta())
        for matrix in linear.adapter.lora_B.values():
            matrix.zero_()
