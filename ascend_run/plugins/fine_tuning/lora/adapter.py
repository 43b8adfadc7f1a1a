"""A LoRA adapter on Megatron's parallel linears, with tensor and sequence parallelism.

Column-parallel (the output is sharded): A is replicated on every rank, each B is sharded as the
output is; where ranks share key-value groups, each B of the QKV projection is replicated and a rank
takes its rows of the product. Row-parallel (the input is sharded): A is sharded as the input is, B
is replicated. Collectives are ``rank`` wide. Where the collectives of shared experts are not their
linears' own (``model.moe_shared_expert_overlap``), gradients of what is replicated are summed.
"""

# S sequence on this rank, B micro-batch, H input and O output of the linear on this rank, R rank
# of a part's adapter

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
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

from ascend_run.ops.late_parameters import await_parameters
from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api import ForwardLink
from ascend_run.types.forward import Forward

from .attaching import Offsets, add_adapter
from .linear_rows import ParallelLinear, is_local, rows_of_parts, shares_groups, tensor_group
from .sizes import rank_of_part, scale_of_part

if TYPE_CHECKING:
    from . import LoraOptions

ADDED_BY = "lora"
"""Value of ``ascend_added_by`` on the adapters' parameters, which no model family maps."""


class Adapter(nn.Module):
    """Compute ``scale * B A x`` for one linear: [S, B, H] -> [S, B, O].

    Parameters: ``lora_A`` [sum of R, H], one block of rows per part, and ``lora_B.<part>``
    [rows, R], with rows in the order of Hugging Face's linear of that part. Parts may differ in R.

    Args:
        linear: Megatron's linear; its weight determines the dtype.
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
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layer, self.name, self.is_on, self.is_fused = layer_index, name, True, False
        self.loaded: dict[str, Tensor] = {}
        """Parameter -> what ``as_loaded`` computes with."""
        self.parts = tuple(parts)
        self.ranks = [rank_of_part(part, options) for part in parts]
        self.scales = {part: scale_of_part(part, options) for part in parts}
        self.dropout = options.dropout
        self.is_column = isinstance(linear, ColumnParallelLinear)
        self.tp_group = tensor_group(linear)
        self.is_local = is_local(linear, name)
        self.sequence_parallel = bool(linear.sequence_parallel) and not self.is_local
        self.rows = rows_of_parts(linear, name)
        self.shares_groups = shares_groups(linear, name)
        weight = linear.weight
        self.lora_A = nn.Parameter(
            weight.new_empty(sum(self.ranks), weight.shape[1], device=device)
        )
        self.lora_B = nn.ParameterDict(
            {
                part: weight.new_zeros(math.prod(self.rows[part]), rank, device=device)
                for part, rank in zip(parts, self.ranks, strict=True)
            }
        )
        self.lora_magnitude: nn.ParameterDict | None = None
        if options.dora:
            self.lora_magnitude = nn.ParameterDict(
                {part: weight.new_zeros(math.prod(self.rows[part])) for part in parts}
            )
        magnitudes = [*(self.lora_magnitude or {}).values()]
        for parameter in self.parameters():  # replicated as dense parameters are
            mark(parameter, ascend_added_by=ADDED_BY, allreduce=True)
        split = [*self.lora_B.values(), *magnitudes] if self.is_column else [self.lora_A]
        for parameter in [] if self.shares_groups else split:
            set_tensor_model_parallel_attributes(parameter, True, 0 if self.is_column else 1, 1)
        # Replicated, but sees only this rank's tokens: Megatron all-reduces such gradients.
        whole = [self.lora_A] if self.is_column else [*self.lora_B.values(), *magnitudes]
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
        for part, block in self.blocks_of_a():
            digest = hashlib.sha256(f"{seed}/{where}/{part}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            bound = 1.0 / math.sqrt(width)
            drawn = torch.empty(len(block), width).uniform_(-bound, bound, generator=generator)
            block.copy_(drawn if self.is_column else drawn.chunk(size, dim=1)[rank])

    def forward(self, x_SBH: Tensor) -> Tensor:
        return self.update(self.dropped(x_SBH))

    def update(self, x_SBH: Tensor) -> Tensor:
        """Return ``scale * B A x`` of an input that is dropped already."""
        a = self._summed(self.lora_A) if self.is_local and self.is_column else self.lora_A
        return self.outer(self._exchanged(F.linear(x_SBH, a)))

    def blocks_of_a(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every part and its rows of ``lora_A``, [R, H]."""
        return zip(self.parts, self.lora_A.split(self.ranks), strict=True)

    def dropped(self, x: Tensor) -> Tensor:
        """Return the input with dropout; the same tensor if there is none."""
        if not self.training or self.dropout == 0.0:
            return x
        # Ranks with the same input must draw the same dropout mask, others an independent one.
        is_shared = self.is_column and not self.sequence_parallel
        with nullcontext() if is_shared else get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """Communicate the output of A as B needs it; gradients take the opposite direction."""
        group = self.tp_group
        if group.size() == 1 or self.is_local:
            return inner
        out: Tensor
        if self.is_column and self.sequence_parallel:
            out = gather_from_sequence_parallel_region(
                inner, tensor_parallel_output_grad=True, group=group
            )
        elif self.is_column:
            out = copy_to_tensor_model_parallel_region(inner, group=group)
        elif self.sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(inner, group=group)
        else:
            out = reduce_from_tensor_model_parallel_region(inner, group=group)
        return out

    def outer_matrix(self, dtype: torch.dtype, b: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return every part's B (default: its own) times its scale as one matrix, [sum of R, O];
        differentiable. Multiplying by it equals the parts' own matmuls but for the order of sums.
        """
        products, before, total = {}, 0, sum(self.ranks)
        for part, rank in zip(self.parts, self.ranks, strict=True):
            block = self.scales[part] * self.shared((b or self.lora_B)[part].to(dtype)).t()
            products[part] = F.pad(block, (0, 0, before, total - before - rank))
            before += rank
        return self.in_order(products)

    def outer(self, inner: Tensor) -> Tensor:
        """Apply every part's B and scale in Megatron's order of rows: [.., sum of R] -> [.., O]."""
        blocks = zip(self.parts, inner.split(self.ranks, dim=-1), strict=True)
        return self.in_order(
            {
                part: self.scales[part]
                * F.linear(block, self.shared(self.lora_B[part].to(inner.dtype)))
                for part, block in blocks
            }
        )

    def shared(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the rows of a part; where ranks share key-value groups, or the
        dispatcher sums the output, backward sums what the ranks contribute."""
        if not (self.shares_groups or (self.is_local and not self.is_column)):
            return tensor
        return self._summed(tensor)

    def _summed(self, tensor: Tensor) -> Tensor:
        """Return a replicated tensor whose gradient is summed over the ranks."""
        copied: Tensor = copy_to_tensor_model_parallel_region(tensor, group=self.tp_group)
        if copied.requires_grad:  # of a gradient with other strides, Megatron would sum a copy
            copied.register_hook(Tensor.contiguous)
        return copied

    def in_order(self, products: Mapping[str, Tensor]) -> Tensor:
        """Return [.., O] in Megatron's order from the [.., rows] of adapted parts; others are 0."""
        given = next(iter(products.values()))
        if len(self.rows) == 1:
            return given
        outputs = [
            products[part].unflatten(-1, (groups, rows))
            if part in products
            else given.new_zeros((*given.shape[:-1], groups, rows))
            for part, (groups, rows) in self.rows.items()
        ]
        out = torch.cat(outputs, dim=-1).flatten(-2)
        if self.shares_groups:
            return out.chunk(self.tp_group.size(), -1)[self.tp_group.rank()]
        return out

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return the update of this rank's weight, [O, H], float64."""
        return self.outer_matrix(torch.float64).t() @ self.lora_A.double()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, object]:
        """Return the sharded state dict in the form of Megatron's linears."""
        split = {"lora_A": 1}
        if self.is_column:
            kinds = ("lora_B", *(["lora_magnitude"] if self.lora_magnitude is not None else []))
            split = {f"{kind}.{part}": 0 for kind in kinds for part in self.parts}
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


def attach(
    linear: ParallelLinear,
    layer_index: int,
    name: str,
    parts: Sequence[str],
    options: LoraOptions,
    device: torch.device,
) -> ForwardLink:
    """Attach an adapter to a linear and return the link that adds its output.

    The adapter's parameters are named under the linear, and the link works with any implementation
    of the linear's forward.
    """
    from .magnitudes import decomposed

    adapter = Adapter(linear, layer_index, name, parts, options, device)
    add_adapter(linear, adapter)

    def wrap(inner: Forward) -> Forward:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            await_parameters(adapter)  # not all of its modules are called
            if adapter.is_on and adapter.lora_magnitude is not None:
                return decomposed(adapter, linear, inner, x, *args, **kwargs)
            out, bias = inner(x, *args, **kwargs)
            adds = adapter.is_on and not adapter.is_fused
            return (out + adapter(x) if adds else out), bias

        return forward

    # Dropout draws from Megatron's generators, and B's input needs a collective: not compilable.
    return ForwardLink(wrap=wrap, compilable=False)


def adapters(model: nn.Module) -> list[Adapter]:
    """Return every adapter of a linear of a model chunk, in layer order."""
    return [module for module in model.modules() if isinstance(module, Adapter)]
