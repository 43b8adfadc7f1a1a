"""Initial weights that depend on the seed and a parameter's global name, not on the layout.

Every parameter is drawn in full from its own generator and each rank keeps its shard, so a model
starts from the same bits on any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ascend_run.ops.linear.stored_weight import filled

from .layer_slots import count_layers, named_by_number

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from .gpt import GPT

_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "experts.fc2")
"""Parameters that write to the residual stream, drawn with std / sqrt(2 * layers)."""


def global_name(name: str, model: nn.Module) -> str:
    """Return a parameter's name with the global number of its layer."""
    match = _LOCAL_LAYER.match(name)
    if match is None:
        return name
    layer = cast("GPT", model).decoder.layers[int(match[1])]
    index = cast("TransformerLayer", layer).layer_number - 1
    return named_by_number(f"decoder.layers.{index}.{name[match.end() :]}", model)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of one model chunk with their global names."""
    for name, parameter in model.named_parameters():
        yield global_name(name, model), parameter


@torch.no_grad()
def initialize_weights(
    model: nn.Module,
    config: TransformerConfig,
    *,
    seed: int,
    vocab_size: int,
    groups: ProcessGroupCollection,
) -> None:
    """Initialize every parameter of a model chunk.

    Args:
        vocab_size: Vocabulary size without padding; padding rows are zero.
    """
    layers = count_layers(model)
    tied = model.share_embeddings_and_output_weights
    for name, parameter in named_parameters(model):
        if tied and name == "output_layer.weight":
            # The last pipeline stage's copy of the first stage's embedding.
            name = "embedding.word_embeddings.weight"
        std = _std(name, config, layers)
        with filled(parameter) as values:
            if name.endswith((".bias", "_bias")):
                values.zero_()
            elif "norm" in name:
                values.fill_(0.0 if config.layernorm_zero_centered_gamma else 1.0)
            elif name.endswith(("experts.fc1", "experts.fc2")):
                _fill_experts(name, values, config, std, seed, groups)
            else:
                _fill_sharded(name, values, config, std, seed, vocab_size, groups)


def _std(name: str, config: TransformerConfig, layers: int) -> float:
    std = config.init_method_std
    if "embeddings." in name and config.embedding_init_method_std is not None:
        return config.embedding_init_method_std
    if name.endswith(_RESIDUAL_OUTPUTS):
        return std / math.sqrt(2.0 * layers)
    return std


def _draw(key: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """Draw normal float32 values determined by the seed and the key."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def _fill_experts(
    name: str,
    parameter: Tensor,
    config: TransformerConfig,
    std: float,
    seed: int,
    groups: ProcessGroupCollection,
) -> None:
    first, tp_group = groups.ep.rank() * parameter.shape[0], groups.expt_tp
    if name.endswith("fc2"):
        dim, stride = 1, 1
    else:
        dim, stride = 0, 2 if config.gated_linear_unit else 1
    for local, expert in enumerate(parameter.unbind(0)):
        shape = list(expert.shape)
        shape[dim] *= tp_group.size()
        whole = _draw(f"{name}/{first + local}", tuple(shape), std, seed)
        expert.copy_(_part(whole, dim, stride, tp_group))


def _fill_sharded(
    name: str,
    parameter: Tensor,
    config: TransformerConfig,
    std: float,
    seed: int,
    vocab_size: int,
    groups: ProcessGroupCollection,
) -> None:
    """Initialize a dense parameter, or this tensor-parallel rank's shard of it."""
    tp_size = groups.tp.size()
    split = bool(getattr(parameter, "tensor_model_parallel", False)) and tp_size > 1
    dim = getattr(parameter, "partition_dim", 0)
    shape = list(parameter.shape)
    if split:
        shape[dim] *= tp_size
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        # The padding depends on the layout; the drawn values do not.
        whole = torch.zeros(shape)
        drawn = _draw(name, (vocab_size, shape[1]), std, seed)
        whole[:vocab_size] = drawn
    else:
        whole = _draw(name, tuple(shape), std, seed)
    if split:
        stride = getattr(parameter, "partition_stride", 1)
        if "linear_fc1" in name and config.gated_linear_unit:
            stride = 2  # gate rows and up rows are sharded separately
        whole = _part(whole, dim, stride, groups.tp)
    parameter.copy_(whole)


def _part(whole: Tensor, dim: int, stride: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of each of ``stride`` blocks along a dimension."""
    parts = [block.chunk(group.size(), dim)[group.rank()] for block in whole.chunk(stride, dim)]
    return torch.cat(parts, dim)
