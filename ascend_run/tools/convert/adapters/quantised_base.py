"""The base of a run's adapters with the values that ``qlora`` has made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.ops.linear.nf4 import compress, dequantise, quantise
from ascend_run.tools.convert.formats.model_source import ModelSource

_PLUGIN: Final = "qlora"
_LINEAR: Final = re.compile(r".*\blayers\.\d+\..*\.(linear_\w+)\.weight")
_ROW_PARALLEL: Final = ("linear_proj", "linear_fc2")
"""Linears whose inputs are sharded over tensor-parallel ranks; of the others, the outputs are."""


def with_run_values(base: ModelSource, values: Mapping[str, Any]) -> ModelSource:
    """Return the base as the run computed with it: its linears quantised, shard by shard, and
    dequantised; itself if the run has not quantised it.

    Args:
        values: The JSON values of the checkpoint.
    """
    record = values.get(_PLUGIN)
    if record is None:
        return base
    gated = bool(base.config.model.gated_linear_unit)

    def read(name: str) -> Tensor:
        weight = base.tensor(name)
        if (match := _LINEAR.fullmatch(name)) is None:
            return weight
        linear = match[1]
        dim = 1 if linear in _ROW_PARALLEL else 0
        blocks = 2 if gated and linear == "linear_fc1" else 1
        return _requantised(weight, record, dim, blocks)

    return attrs.evolve(base, read=read)


def _requantised(weight: Tensor, record: Mapping[str, Any], dim: int, blocks: int) -> Tensor:
    """Quantise and dequantise each rank's shard: of a gated fc1, rows of the gate and of the up
    projection."""
    ranks = record["tensor_model_parallel_size"]
    parts = [block.chunk(ranks, dim) for block in weight.chunk(blocks, dim)]
    shards = []
    for shard in zip(*parts, strict=True):
        values = _quantised(torch.cat(shard, dim), record)
        shards.append(values.chunk(blocks, dim))
    joined = [torch.cat(same, dim) for same in zip(*shards, strict=True)]
    return torch.cat(joined, dim).to(weight.dtype)


def _quantised(shard: Tensor, record: Mapping[str, Any]) -> Tensor:
    from ascend_run.core.model.transformer_config import PRECISIONS  # which imports Megatron

    dtype = PRECISIONS[record["precision"]]
    quantised = quantise(shard.to(dtype), record["blocksize"])
    return dequantise(compress(quantised) if record["use_double_quant"] else quantised, dtype)
