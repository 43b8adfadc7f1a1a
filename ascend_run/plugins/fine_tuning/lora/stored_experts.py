"""The tensors of experts' adapters in PEFT's format, as this rank's shards of them."""

# X experts of this rank, R rank of the adapter

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ascend_run.ops.linear.peft_experts import a_by_expert, b_by_expert, stacked_a, stacked_b

from .expert_adapter import ExpertAdapter, every_adapter, split_dim
from .peft_config import PREFIX
from .targets import adapted, peft_module

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions


@attrs.frozen(kw_only=True)
class StoredExperts:
    """A tensor of PEFT's file and this rank's shards of it."""

    name: str
    blocks: Sequence[Tensor]
    """An A [X, R, in]; or every block of a B, [X, out, R], one after the other along ``out``."""
    is_b: bool
    dim: int | None  #: Dimension that expert tensor parallelism shards, if any.
    experts: dist.ProcessGroup  #: Ranks with different experts.
    columns: dist.ProcessGroup  #: Ranks with different parts of an expert.

    @property
    def shape(self) -> list[int]:
        """Shape of the stored tensor."""
        count = len(self.blocks[0]) * self.experts.size()
        rows, columns = sum(self._rows), self.blocks[0].shape[2]
        if self.is_b:
            return [rows, columns * count]
        return [count * rows, columns * (self.columns.size() if self.dim == 2 else 1)]

    def fill(self, stored: Any) -> None:
        """Copy this rank's shards from a slice of a safetensors file."""
        count = len(self.blocks[0])
        form = b_by_expert if self.is_b else a_by_expert
        by_expert = form(stored[:], count * self.experts.size())
        own = by_expert.narrow(0, count * self.experts.rank(), count)
        for block, rows in zip(self.blocks, own.split(self._rows, dim=1), strict=True):
            if self.dim is None:
                block.copy_(rows)
            else:
                block.copy_(rows.chunk(self.columns.size(), self.dim)[self.columns.rank()])

    def gathered(self) -> Tensor:
        """Return the full tensor, on every rank of both groups."""
        wholes = []
        for block in self.blocks:
            whole = block.detach().contiguous()
            if self.dim is not None:
                whole = _gathered(whole, self.dim, self.columns)
            wholes.append(_gathered(whole, 0, self.experts))
        form = stacked_b if self.is_b else stacked_a
        return form(torch.cat(wholes, dim=1))

    @property
    def _rows(self) -> list[int]:
        """Rows of each block of the full tensor, of one expert."""
        size = self.columns.size() if self.dim == 1 else 1
        return [block.shape[1] * size for block in self.blocks]


def stored_experts(
    model: nn.Module, config: RunConfig, options: LoraOptions
) -> Iterator[StoredExperts]:
    """Yield the tensors of the experts' adapters of a model chunk."""
    parts = adapted(options.target_modules, config)
    for adapter in every_adapter(model):
        if isinstance(adapter, ExpertAdapter):
            for part in adapter.parts:
                module = peft_module(part, adapter.layer, config.model.family, parts)
                yield from _of_part(adapter, part, f"{PREFIX}{module}")


def _of_part(adapter: ExpertAdapter, part: str, name: str) -> Iterator[StoredExperts]:
    groups = {"experts": adapter.groups.ep, "columns": adapter.groups.expt_tp}
    yield StoredExperts(
        name=f"{name}.lora_A.weight",
        blocks=[adapter.lora_A[part]],
        is_b=False,
        dim=split_dim(f"lora_A.{part}"),
        **groups,
    )
    yield StoredExperts(
        name=f"{name}.lora_B.weight",
        blocks=[adapter.lora_B[block] for block in adapter.blocks[part]],
        is_b=True,
        dim=split_dim(f"lora_B.{part}"),
        **groups,
    )


def _gathered(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return tensor
    tensor = tensor.contiguous()
    shards = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(shards, tensor, group=group)
    return torch.cat(shards, dim)
