"""The tensors of an adapter in PEFT's format, as this rank's shards of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ascend_run.ops.linear.peft_settings import MAGNITUDE, is_saved
from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api import RunConfig

from .adapter import ADDED_BY, Adapter, adapters
from .peft_config import PREFIX
from .saved_modules import EMBEDDING, OUTPUT_LAYER, VOCABULARY, peft_name, saved_modules
from .targets import peft_module

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from . import LoraOptions


@attrs.frozen(kw_only=True)
class StoredPart:
    """A tensor of PEFT's file and this rank's shard of it."""

    name: str
    tensor: Tensor
    dim: int = 0  #: Dimension that is sharded.
    index: int = 0
    size: int = 1  #: Number of shards.
    rows: int | None = None
    """Rows that are stored, of a vocabulary with padding; None: all."""

    @property
    def shape(self) -> list[int]:
        """Shape of the stored tensor."""
        shape = [*self.tensor.shape]
        shape[self.dim] *= self.size
        return [self.rows or shape[0], *shape[1:]]

    def fill(self, stored: Any) -> None:
        """Copy this rank's shard from a slice of a safetensors file."""
        width = self.tensor.shape[self.dim]
        begin = self.index * width
        end = min(begin + width, self.shape[self.dim])
        if begin < end:
            part = stored[begin:end] if self.dim == 0 else stored[:, begin:end]
            self.tensor.narrow(self.dim, 0, end - begin).copy_(part)

    def gathered(self, group: dist.ProcessGroup) -> Tensor:
        """Return the full tensor, on every rank of the tensor-parallel group."""
        whole = self.tensor.detach().contiguous()
        if self.size > 1:
            shards = [torch.empty_like(whole) for _ in range(self.size)]
            dist.all_gather(shards, whole, group=group)
            whole = torch.cat(shards, self.dim)
        return whole[: self.rows]


def stored_parts(model: nn.Module, config: RunConfig, options: LoraOptions) -> Iterator[StoredPart]:
    """Yield the tensors of the adapters and of the modules trained in full of a model chunk."""
    for adapter in adapters(model):
        yield from _of_adapter(adapter, config)
    yield from _in_full(_inner(model), config, options)


def _of_adapter(adapter: Adapter, config: RunConfig) -> Iterator[StoredPart]:
    shard = {"index": adapter.tp_group.rank(), "size": adapter.tp_group.size()}
    of_b = shard if adapter.is_column and not adapter.shares_groups else {}
    for part, block in adapter.blocks_of_a():
        name = PREFIX + peft_module(part, adapter.layer, config.model.family)
        of_a = {} if adapter.is_column else shard
        yield StoredPart(name=f"{name}.lora_A.weight", tensor=block, dim=1, **of_a)
        yield StoredPart(name=f"{name}.lora_B.weight", tensor=adapter.lora_B[part], **of_b)
        if adapter.lora_magnitude is not None:
            magnitude = adapter.lora_magnitude[part]
            yield StoredPart(name=f"{name}.{MAGNITUDE}", tensor=magnitude.data, **of_b)


def _in_full(model: nn.Module, config: RunConfig, options: LoraOptions) -> Iterator[StoredPart]:
    modules = saved_modules(config, options)
    for name, parameter in model.named_parameters():
        if not is_saved(name, modules):
            continue
        owner, _, kind = name.rpartition(".")
        module = owner.rpartition(".")[2]
        is_vocabulary = module in VOCABULARY
        if module == OUTPUT_LAYER and OUTPUT_LAYER not in options.modules_to_save:
            module = EMBEDDING  # the last stage's copy of a tied embedding
        theirs = peft_name(module, _layer(model, name), config.model.family)
        shard: dict[str, Any] = {}
        if is_vocabulary:
            group = model.get_submodule(owner).tp_group
            assert isinstance(group, dist.ProcessGroup)
            shard = {"index": group.rank(), "size": group.size(), "rows": config.model.vocab_size}
        yield StoredPart(name=f"{PREFIX}{theirs}.{kind}", tensor=parameter.data, **shard)


def _inner(model: nn.Module) -> nn.Module:
    """Return a model chunk without the wrappers of data parallelism and precision."""
    while not hasattr(model, "decoder"):
        model = cast("nn.Module", model.module)
    return model


def keep_loaded(model: nn.Module, config: RunConfig, options: LoraOptions) -> None:
    """Let the modules trained in full keep the values of the adapter's file where the base's
    weights are loaded later."""
    modules = saved_modules(config, options)
    for name, parameter in model.named_parameters():
        if is_saved(name, modules):
            mark(parameter, ascend_added_by=ADDED_BY)


def _layer(model: nn.Module, name: str) -> int | None:
    """Return the layer of a parameter, without empty slots; None outside of layers."""
    words = name.split(".")
    if words[:2] != ["decoder", "layers"]:
        return None
    layer = cast("TransformerLayer", model.get_submodule(".".join(words[:3])))
    slot = layer.layer_number - 1
    numbers = getattr(model, "layer_numbers", ())
    return int(numbers[slot]) if numbers else slot
