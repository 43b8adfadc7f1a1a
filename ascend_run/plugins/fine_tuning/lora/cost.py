"""Cost of adapters beside frozen weights. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ascend_run.plugin_api import (
    Communication,
    CostChange,
    ParameterCost,
    SavedChange,
    SavedTensor,
    Storage,
)

from .targets import LINEARS, wanted_parts

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, PipelineStage, RunConfig

    from . import LoraOptions

_SPLIT_COLUMNS = ("linear_proj", "linear_fc2")
"""Row-parallel linears, whose inputs are sharded over tensor-parallel ranks; of the others, the
outputs are."""
_INPUTS = {
    "self_attention.linear_qkv": "self_attention.input",
    "self_attention.linear_proj": "self_attention.attended",
    "mlp.linear_fc1": "mlp.input",
    "mlp.linear_fc2": "mlp.product",
}
"""Linear -> the activation saved for the gradient of its weight."""
_NEVER_READ = (
    *("router.input", "experts.input", "experts.weighted"),
    *("shared_experts.input", "shared_experts.product"),
)
"""Activations saved for the gradients of weights that take no adapter."""


def adapter_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: LoraOptions
) -> CostChange:
    """Return the cost of the adapters and the savings of the frozen base.

    The base is not trained, so the input of a linear is saved only if an adapter reads it. Each
    adapted part has two low-rank matrices, and the output of the first is saved for backward.
    """
    parameters = tuple(_parameters(config, rank, options))
    narrow = rank.tokens * options.rank * rank.item_bytes
    parts = [p for p in parameters if p.name.endswith("lora_A") and p.layer == rank.layers[0]]
    width = sum(_parts_of(p.name, config, options, p.part) for p in parts)
    unread = tuple(
        tensor
        for linear, tensor in _INPUTS.items()
        if not wanted_parts(options.target_modules, linear, config)
    )
    return CostChange(
        frozen=("*",),
        parameters=parameters,
        saved=(SavedChange(tensors=(*unread, *_NEVER_READ), storage=Storage.NONE),),
        saved_added=(SavedTensor(part="self_attention", name="adapters", nbytes=width * narrow),),
        communication=tuple(_messages(config, layout, rank, options)),
    )


def _messages(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: LoraOptions
) -> Iterator[Communication]:
    """Yield the collectives of the low-rank matmuls, which match those of Megatron's linears."""
    if layout.tp == 1:
        return
    one = rank.tokens * options.rank * rank.item_bytes
    for weight in rank.parameters:
        if weight.layer is None or weight.key not in LINEARS:
            continue
        parts = len(wanted_parts(options.target_modules, weight.key, config))
        is_summed = "forward" if weight.name in _SPLIT_COLUMNS else "backward"
        for operation, direction, nbytes in _exchanges(config, layout, is_summed, parts * one):
            yield Communication(
                operation=operation,
                group="tp",
                calls=rank.num_microbatches,
                sent_bytes=rank.num_microbatches * nbytes,
                why=f"adapters, {direction}",
            )


def _exchanges(
    config: RunConfig, layout: Layout, is_summed: str, nbytes: float
) -> Iterator[tuple[str, str, float]]:
    """Yield a reduction and, under sequence parallelism, the opposite all-gather."""
    if not nbytes:
        return
    if not config.parallel.sequence_parallel:
        yield "all_reduce", is_summed, nbytes
        return
    yield "reduce_scatter", is_summed, nbytes
    other = "backward" if is_summed == "forward" else "forward"
    yield "all_gather", other, nbytes / layout.tp


def _parts_of(name: str, config: RunConfig, options: LoraOptions, part: str) -> int:
    linear = f"{part}.{name.partition('.')[0]}"
    return len(wanted_parts(options.target_modules, linear, config))


def _parameters(
    config: RunConfig, rank: PipelineStage, options: LoraOptions
) -> Iterator[ParameterCost]:
    for weight in rank.parameters:
        if weight.layer is None or weight.key not in LINEARS:
            continue
        parts = wanted_parts(options.target_modules, weight.key, config)
        if not parts:
            continue
        columns = _columns(rank, weight)
        shares = _rows(config, rank, weight.numel // columns)
        rows = sum(shares.get(part, weight.numel // columns) for part in parts)
        # The one that is replicated over tensor-parallel ranks.
        whole = "lora_B" if weight.name in _SPLIT_COLUMNS else "lora_A"
        for name, numel in (
            ("lora_A", len(parts) * options.rank * columns),
            ("lora_B", rows * options.rank),
        ):
            yield ParameterCost(
                part=weight.part,
                name=f"{weight.name}.{name}",
                numel=numel,
                layer=weight.layer,
                sees_own_tokens=name == whole,
            )


def _columns(rank: PipelineStage, weight: ParameterCost) -> int:
    """Return the inputs of a linear on this rank: the hidden size if its output is sharded."""
    hidden = next(p.numel for p in rank.parameters if p.key == "input_norm.weight")
    return weight.numel // hidden if weight.name in _SPLIT_COLUMNS else hidden


def _rows(config: RunConfig, rank: PipelineStage, rows: int) -> Mapping[str, int]:
    """Return the rows of each part's linear on this rank."""
    return {
        "linear_q": int(rank.heads * rank.head_width),
        "linear_k": int(rank.query_groups * rank.head_width),
        "linear_v": int(rank.query_groups * rank.head_width),
        "linear_fc1_gate": rows // 2,
        "linear_fc1_up": rows // 2,
    }
