"""A LoRA adapter on the experts of one layer: each expert's weights with an update of low rank.

As in PEFT (``target_parameters``) the update is added to the weights, and the experts are computed
with the sums, whatever kernel computes them. With expert tensor parallelism the B of fc1 and the A
of fc2 are sharded as the experts are; the other two are replicated and their gradients summed.

Source: PEFT, peft/tuners/lora/layer.py, ParamWrapper.
"""

# X experts of this rank, H hidden size, F expert FFN size on this rank, R rank of a part's adapter

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from ascend_run.ops.experts.expert_slices import weights_of
from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api import ExpertWeights, ForwardLink
from ascend_run.types.forward import Forward

from .adapter import ADDED_BY, Adapter
from .attaching import Offsets, add_adapter
from .sizes import rank_of_part, scale_of_part

if TYPE_CHECKING:
    from . import LoraOptions

AnyAdapter: TypeAlias = "Adapter | ExpertAdapter"

FIELDS = {"experts_fc1": "fc1", "experts_fc2": "fc2"}
"""Part -> the stacked weight that it adapts."""


class Matrices(nn.Module):
    """Named parameters, which a forward reads by calling it: what gathers the parameters of modules
    before their forwards (``ddp.overlap_param_gather``) then gathers these."""

    def __setitem__(self, name: str, values: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(values))

    def __getitem__(self, name: str) -> nn.Parameter:
        return self.get_parameter(name)

    def forward(self, name: str) -> Tensor:
        return self.get_parameter(name)


class ExpertAdapter(nn.Module):
    """Compute ``W + scale * B A`` for stacked weights: [X, 2F, H] and [X, H, F].

    Parameters, for a part: ``lora_A.<part>`` [X, R, in], and ``lora_B.<part>`` [X, out, R], of a
    gated fc1 in two: ``lora_B.experts_fc1_gate`` and ``lora_B.experts_fc1_up``, [X, F, R].

    Args:
        experts: Module with the stacked weights, which determine the dtype.
        layer_index: Index of the layer slot in the full model, until ``number_layers``.
        parts: Keys of ``FIELDS``.
    """

    def __init__(
        self,
        experts: Any,
        layer_index: int,
        parts: Sequence[str],
        options: LoraOptions,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layer, self.is_on = layer_index, True
        self.loaded: dict[str, Tensor] = {}
        """Parameter -> what ``as_loaded`` computes with."""
        self.parts, self.groups = tuple(parts), experts.groups
        self.scales = {part: scale_of_part(part, options) for part in parts}
        gated = experts.activation.gated
        self.blocks = {
            part: [f"{part}_gate", f"{part}_up"] if part == "experts_fc1" and gated else [part]
            for part in parts
        }
        """Part -> its keys in ``lora_B``, in the order of the weight's rows."""
        self.lora_A, self.lora_B = Matrices(), Matrices()
        for part, blocks in self.blocks.items():
            weight, rank = getattr(experts, FIELDS[part]), rank_of_part(part, options)
            count, rows, columns = weight.shape
            self.lora_A[part] = weight.new_empty(count, rank, columns, device=device)
            for block in blocks:
                self.lora_B[block] = weight.new_zeros(
                    count, rows // len(blocks), rank, device=device
                )
        for name, parameter in self.named_parameters():
            # Reduced as the gradients of the experts are.
            mark(parameter, ascend_added_by=ADDED_BY, allreduce=experts.fc1.allreduce)
            if self.groups.expt_tp.size() > 1 and (dim := split_dim(name)) is not None:
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize each A as PEFT does: uniform within 1 / sqrt(in).

        The values depend on the seed, the layer and the expert alone, so they are the same on any
        layout.
        """
        group = self.groups.expt_tp
        for part, stacked in self.lora_A.named_parameters():
            is_split = split_dim(f"lora_A.{part}") is not None
            width = stacked.shape[2] * (group.size() if is_split else 1)
            first = self.groups.ep.rank() * len(stacked)
            for expert, matrix in enumerate(stacked, first):
                where = f"{seed}/decoder.layers.{self.layer}.mlp.experts/{part}/{expert}"
                digest = hashlib.sha256(where.encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                bound = 1.0 / math.sqrt(width)
                drawn = torch.empty(len(matrix), width).uniform_(-bound, bound, generator=generator)
                matrix.copy_(drawn.chunk(group.size(), dim=1)[group.rank()] if is_split else drawn)

    def adapted(self, weights: ExpertWeights) -> ExpertWeights:
        """Return the weights with their updates, or as they are while the adapter is off;
        differentiable in A and B."""
        if not self.is_on:
            return weights
        summed = {
            FIELDS[part]: torch.baddbmm(
                getattr(weights, FIELDS[part]), *self._factors(part), alpha=self.scales[part]
            )
            for part in self.parts
        }
        return weights._replace(**summed)

    @torch.no_grad()
    def deltas(self) -> dict[str, Tensor]:
        """Return the update of each weight of this rank, float64."""
        deltas = {}
        for part in self.parts:
            b, a = self._factors(part)
            deltas[FIELDS[part]] = self.scales[part] * (b.double() @ a.double())
        return deltas

    def _factors(self, part: str) -> tuple[Tensor, Tensor]:
        """Return B [X, out, R] and A [X, R, in] of a part."""
        blocks = [
            self._shared(f"lora_B.{block}", self.lora_B(block)) for block in self.blocks[part]
        ]
        b = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        return b, self._shared(f"lora_A.{part}", self.lora_A(part))

    def _shared(self, name: str, parameter: Tensor) -> Tensor:
        """Return a parameter; backward sums the gradient of one that every rank of an expert has,
        since each has a part of the weight."""
        group = self.groups.expt_tp
        if group.size() == 1 or split_dim(name) is not None:
            return parameter
        copied: Tensor = copy_to_tensor_model_parallel_region(parameter, group=group)
        if copied.requires_grad:  # of a gradient with other strides, Megatron would sum a copy
            copied.register_hook(Tensor.contiguous)
        return copied

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, object]:
        """Return the tensors, sharded over experts and as the weights of an expert are."""
        groups, axis = self.groups, len(sharded_offsets)
        tp_rank, tp_size = groups.expt_tp.rank(), groups.expt_tp.size()
        sharded: dict[str, object] = {}
        for name, parameter in self.named_parameters():
            dim = split_dim(name)
            width = () if dim is None else ((axis + dim, tp_rank, tp_size),)
            sharded[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                (axis, groups.ep.rank(), groups.ep.size()),
                *width,
                replica_id=(0, tp_rank if dim is None else 0, groups.expt_dp.rank()),
                prepend_axis_num=axis,
            )
        return sharded


def split_dim(parameter: str) -> int | None:
    """Return the dimension over which expert tensor parallelism shards a parameter, if it does."""
    kind, _, part = parameter.partition(".")
    if kind == "lora_B" and part.startswith("experts_fc1"):
        return 1
    return 2 if (kind, part) == ("lora_A", "experts_fc2") else None


def attach_to_experts(
    experts: Any,
    layer_index: int,
    parts: Sequence[str],
    options: LoraOptions,
    device: torch.device,
) -> ForwardLink:
    """Attach an adapter to the experts of a layer and return the link that adds its updates.

    It is inside all other links of the experts, so that what recomputes them recomputes the sums.
    """
    adapter = ExpertAdapter(experts, layer_index, parts, options, device)
    add_adapter(experts, adapter)

    def wrap(inner: Forward) -> Forward:
        def forward(
            rows_TH: Tensor, counts_X: Tensor, probs_T: Tensor, weights: ExpertWeights | None = None
        ) -> Any:
            own = weights_of(experts) if weights is None else weights
            return inner(rows_TH, counts_X, probs_T, own)

        return forward

    return ForwardLink(wrap=wrap, compilable=False)


def every_adapter(model: nn.Module) -> list[AnyAdapter]:
    """Return every adapter of a model chunk, of linears and of experts, in layer order."""
    return [module for module in model.modules() if isinstance(module, Adapter | ExpertAdapter)]


def number_layers(model: nn.Module) -> None:
    """Renumber the adapters by layer: empty layer slots do not count."""
    numbers = getattr(model, "layer_numbers", ())
    for adapter in every_adapter(model) if numbers else ():
        adapter.layer = numbers[adapter.layer]
