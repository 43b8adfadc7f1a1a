"""Cost of adapters beside frozen weights. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    Communication,
    CostChange,
    ParameterCost,
    SavedChange,
    SavedTensor,
    Storage,
)

from .dora_cost import AdaptedLinear, norm_messages, unscaled
from .expert_cost import (
    adapted_experts,
    expert_messages,
    kept_sums,
    no_gradients,
    read_activations,
)
from .saved_modules import frozen_parts
from .sizes import rank_of_part
from .targets import LINEARS, model_linears, wanted_parts

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, PipelineStage, RunConfig

    from . import LoraOptions

_SPLIT_COLUMNS = ("linear_proj", "linear_fc2")
"""Row-parallel linears, whose inputs are sharded over tensor-parallel ranks; of the others, the
outputs are."""
_READERS = {
    "self_attention.input": (
        "self_attention.linear_qkv",
        "self_attention.linear_q_proj",
        "self_attention.linear_q_down_proj",
        "self_attention.linear_kv_down_proj",
    ),
    "self_attention.normed_latents": (
        "self_attention.linear_q_up_proj",
        "self_attention.linear_kv_up_proj",
    ),
    "self_attention.attended": ("self_attention.linear_proj",),
    "mlp.input": ("mlp.linear_fc1",),
    "mlp.product": ("mlp.linear_fc2",),
    "shared_experts.input": ("mlp.shared_experts.linear_fc1",),
    "shared_experts.product": ("mlp.shared_experts.linear_fc2",),
}
"""Activation -> the linears for the gradients of whose weights it is saved."""
_NEVER_READ = ("router.input", "experts.input", "experts.weighted")
"""Activations saved for the gradients of weights that take no adapter."""
_DISPATCHES_AGAIN = "moe-zero-memory"
"""The plugin that at its level 1 keeps the router's input, to dispatch it again."""


_WIDE = 4
"""Bytes of a gradient of magnitudes, which are divided by norms in float32."""


def adapter_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: LoraOptions
) -> CostChange:
    """Return the cost of the adapters and the savings of the frozen base.

    The base is not trained, so the input of a linear is saved only if an adapter reads it. Each
    adapted part has two low-rank matrices, and the output of the first is saved for backward.
    """
    layers = tuple(n for n in rank.layers if n < config.model.num_layers)
    own = tuple(p for p in rank.parameters if p.layer is None or p.layer in layers)
    rank = attrs.evolve(rank, layers=layers, parameters=own)
    parameters = tuple(_parameters(config, layout, rank, options))
    narrow = rank.tokens * rank.item_bytes
    parts = [p for p in parameters if p.name.endswith("lora_A")]
    width = sum(sum(_ranks(_linear_of(p), config, options)) for p in parts) / max(1, len(layers))
    present = model_linears(config)
    adapted = {name for name in present if wanted_parts(options.target_modules, name, config)}
    unread = tuple(name for name, linears in _READERS.items() if adapted.isdisjoint(linears))
    linears = [*_linears(config, layout, rank, options)] if options.dora else []
    scattered = layout.tp if config.parallel.sequence_parallel else 1
    saved = [SavedTensor(part="self_attention", name="adapters", nbytes=width * narrow)]
    never = {*_NEVER_READ}
    dispatches_again = getattr(config.plugins.get(_DISPATCHES_AGAIN), "level", 0) == 1
    if dispatches_again or "router" in options.modules_to_save:
        never -= {"router.input"}  # which is that of shared experts, if any
        unread = tuple(name for name in unread if name != "shared_experts.input")
    experts = adapted_experts(config, layout, rank, options)
    if experts:
        never -= read_activations(options)
        saved.append(kept_sums(rank, experts))
    added = [parameter for one in experts for parameter in one.parameters]
    return CostChange(
        frozen=frozen_parts((p.key for p in rank.parameters), config, options),
        parameters=(*parameters, *(one.magnitudes for one in linears), *added),
        saved=(SavedChange(tensors=(*unread, *sorted(never)), storage=Storage.NONE),),
        saved_added=(*saved, *([unscaled(rank, linears, scattered)] if linears else [])),
        saved_added_layers=layers,
        working=no_gradients(rank, experts),
        communication=(
            *_messages(config, layout, rank, options, parameters),
            *norm_messages(rank, linears, layout.tp),
            *expert_messages(rank, layout, experts),
        ),
        flops=rank.num_microbatches
        * (sum(one.flops for one in linears) + sum(one.flops for one in experts)),
    )


def _linears(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: LoraOptions
) -> Iterator[AdaptedLinear]:
    for weight in rank.parameters:
        if weight.layer is None or _name(weight.key) not in LINEARS:
            continue
        if parts := wanted_parts(options.target_modules, _name(weight.key), config):
            columns = _columns(config, rank, weight)
            rows = weight.numel // columns
            shares = _rows(config, layout, rank, rows)
            yield AdaptedLinear(
                weight=weight,
                columns=columns,
                is_split=weight.name in _SPLIT_COLUMNS,
                ranks=_ranks(_name(weight.key), config, options),
                part_rows=[shares.get(part, int(rows)) for part in parts],
            )


def _messages(
    config: RunConfig,
    layout: Layout,
    rank: PipelineStage,
    options: LoraOptions,
    parameters: Iterable[ParameterCost],
) -> Iterator[Communication]:
    """Yield the collectives of the low-rank matmuls, which match those of Megatron's linears."""
    if layout.tp == 1:
        return
    for matrix in parameters:
        parts = len(_ranks(_linear_of(matrix), config, options))
        if matrix.name == "linear_qkv.lora_B" and _shares_groups(config, layout):
            yield _reduced(rank, parts, matrix.numel * rank.item_bytes, "shared key-value heads")
        if _is_local(matrix, config) and matrix.name in ("linear_fc1.lora_A", "linear_fc2.lora_B"):
            yield _reduced(rank, 1, matrix.numel * rank.item_bytes, "overlapped shared experts")
    if _shares_groups(config, layout):
        for linear in _linears(config, layout, rank, options) if options.dora else ():
            if linear.weight.name == "linear_qkv":
                wide = sum(linear.part_rows) * _WIDE
                yield _reduced(rank, len(linear.ranks), wide, "shared key-value heads")
    one = rank.tokens * rank.item_bytes
    for weight in rank.parameters:
        if weight.layer is None or _name(weight.key) not in LINEARS or _is_local(weight, config):
            continue
        width = sum(_ranks(_name(weight.key), config, options))
        is_summed = "forward" if weight.name in _SPLIT_COLUMNS else "backward"
        for operation, direction, nbytes in _exchanges(config, layout, is_summed, width * one):
            yield Communication(
                operation=operation,
                group="tp",
                calls=rank.num_microbatches,
                sent_bytes=rank.num_microbatches * nbytes,
                why=f"{weight.part}, {direction}: adapters",
            )


def _reduced(rank: PipelineStage, parts: int, nbytes: float, which: str) -> Communication:
    """The gradients of replicated matrices of one linear, of each micro-batch."""
    return Communication(
        operation="all_reduce",
        group="tp",
        calls=rank.num_microbatches * parts,
        sent_bytes=rank.num_microbatches * nbytes,
        why=f"adapters of {which}, backward",
    )


def _is_local(weight: ParameterCost, config: RunConfig) -> bool:
    """Return whether the token dispatcher has the collectives of a linear."""
    return weight.part == "shared_experts" and bool(config.model.moe_shared_expert_overlap)


def _shares_groups(config: RunConfig, layout: Layout) -> bool:
    groups = config.model.num_query_groups or config.model.num_attention_heads
    return bool(groups < layout.tp)


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


def _linear_of(matrix: ParameterCost) -> str:
    return _name(f"{matrix.part}.{matrix.name.partition('.')[0]}")


def _name(key: str) -> str:
    """Return the linear in a layer that a key of the cost model is."""
    return f"mlp.{key}" if key.startswith("shared_experts.") else key


def _ranks(linear: str, config: RunConfig, options: LoraOptions) -> list[int]:
    """Return the ranks of the adapted parts of a linear."""
    parts = wanted_parts(options.target_modules, linear, config)
    return [rank_of_part(part, options) for part in parts]


def _parameters(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: LoraOptions
) -> Iterator[ParameterCost]:
    for weight in rank.parameters:
        if weight.layer is None or _name(weight.key) not in LINEARS:
            continue
        parts = wanted_parts(options.target_modules, _name(weight.key), config)
        if not parts:
            continue
        columns = _columns(config, rank, weight)
        shares = _rows(config, layout, rank, weight.numel // columns)
        ranks = _ranks(_name(weight.key), config, options)
        in_b = sum(
            shares.get(part, weight.numel // columns) * width
            for part, width in zip(parts, ranks, strict=True)
        )
        # The one that is replicated over tensor-parallel ranks.
        whole = "lora_B" if weight.name in _SPLIT_COLUMNS else "lora_A"
        for name, numel in (
            ("lora_A", sum(ranks) * columns),
            ("lora_B", in_b),
        ):
            yield ParameterCost(
                part=weight.part,
                name=f"{weight.name}.{name}",
                numel=numel,
                layer=weight.layer,
                sees_own_tokens=name == whole and not _is_local(weight, config),
            )


def _columns(config: RunConfig, rank: PipelineStage, weight: ParameterCost) -> int:
    """Return the inputs of a linear on this rank: if its output is sharded, the width of a latent
    or the hidden size."""
    hidden = next(p.numel for p in rank.parameters if p.key == "input_norm.weight")
    latents = {
        "linear_q_up_proj": config.model.q_lora_rank,
        "linear_kv_up_proj": config.model.kv_lora_rank,
    }
    if weight.name in _SPLIT_COLUMNS:
        return weight.numel // hidden
    return int(latents.get(weight.name, hidden))


def _rows(config: RunConfig, layout: Layout, rank: PipelineStage, rows: int) -> Mapping[str, int]:
    """Return the rows of each part's matrix on this rank: those of its linear, or all of them where
    ranks share key-value groups."""
    heads, groups = rank.heads, rank.query_groups
    if _shares_groups(config, layout):
        heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    return {
        "linear_q": int(heads * rank.head_width),
        "linear_k": int(groups * rank.head_width),
        "linear_v": int(groups * rank.head_width),
        **{
            f"{fc1}_{half}": rows // 2
            for fc1 in ("linear_fc1", "shared_experts_fc1")
            for half in ("gate", "up")
        },
    }
