"""What the token dispatchers of ``ops`` change of a run's cost. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.types.condition import Condition
from ascend_run.types.config import RunConfig
from ascend_run.types.cost import Communication, CostChange, PipelineStage, SavedChange, SavedTensor
from ascend_run.types.layout import Layout

from .chunk_limits import chunk_sizes

ALL_TO_ALL: Final = Condition(
    "model.moe_token_dispatcher_type",
    "==",
    "alltoall",
    why="it replaces the all-to-all dispatcher",
    fix="set model.moe_token_dispatcher_type=alltoall",
)
ALL_GATHER: Final = Condition(
    "model.moe_token_dispatcher_type",
    "==",
    "allgather",
    why="it replaces the all-gather dispatcher",
    fix="set model.moe_token_dispatcher_type=allgather",
)
CAPACITY: Final = Condition(
    "model.moe_expert_capacity_factor",
    ">",
    0,
    why="every expert takes the same number of tokens of each rank",
    fix="set model.moe_expert_capacity_factor",
)
PADDED: Final = Condition(
    "model.moe_pad_expert_input_to_capacity",
    "==",
    True,
    why="every expert takes the same number of tokens of each rank",
    fix="set model.moe_pad_expert_input_to_capacity=true",
)
NO_EXPERTS: Final = Condition(
    "model.num_moe_experts",
    "<=",
    0,
    why="there are no experts",
    fix="set model.num_moe_experts",
)
"""When a dispatcher is idle."""
_INDEX: Final = 8
_WIDE: Final = 4
_PLAIN: Final = _INDEX + _WIDE
"""Bytes of a row in ``dispatcher.indices`` of the plain model, with one rank for an expert."""
_BY_EXPERT: Final = 5
"""Bytes of each expert of a token in ``router.scores`` that only Megatron's dispatcher saves: its
weights and choices in the order of the experts."""


def not_padded(why: str) -> Condition:
    """Return the requirement that experts take only the tokens that selected them."""
    return Condition(
        "model.moe_pad_expert_input_to_capacity",
        "==",
        False,
        why=why,
        fix="set model.moe_pad_expert_input_to_capacity=false",
    )


def saved_indices(
    config: RunConfig, layout: Layout, rank: PipelineStage, *, fused: bool = False
) -> CostChange | None:
    """Return the change of the saved indices, or None without experts.

    One more index of each row; none of padded experts.

    Args:
        fused: With ``FusedPermutation``, which has the first row of each token if tokens have
            different numbers of rows.
    """
    experts = config.model.num_moe_experts
    if not rank.moe_layers or experts is None:
        return None
    tokens = own_tokens(config, layout, rank)
    added: tuple[SavedTensor, ...] = ()
    if fused and config.model.moe_expert_capacity_factor:
        added = (SavedTensor(part="dispatcher", name="first_rows", nbytes=tokens * _INDEX),)
    layers = tuple(sorted(rank.moe_layers))
    if config.model.moe_pad_expert_input_to_capacity:
        return CostChange(saved_added=added, saved_added_layers=layers)
    sizes = {tensor.key: tensor.nbytes for tensor in rank.saved[min(rank.moe_layers)]}
    less = tokens * experts * _BY_EXPERT / sizes["router.scores"]
    plain = _INDEX + _WIDE * layout.expt_tp
    changes = {"dispatcher.indices": 1 + _INDEX / plain, "router.scores": 1 - less}
    return CostChange(
        saved=tuple(SavedChange(tensors=(name,), factor=f) for name, f in changes.items()),
        saved_added=added,
        saved_added_layers=layers,
    )


def own_tokens(config: RunConfig, layout: Layout, rank: PipelineStage) -> int:
    """Return the tokens of a micro-batch that this rank dispatches."""
    return rank.tokens // layout.tp if config.parallel.sequence_parallel else rank.tokens


def overlapped(config: RunConfig) -> tuple[Communication, ...]:
    """Return the all-to-alls, overlapped if there are shared experts to compute behind them."""
    if not config.model.moe_shared_expert_overlap:
        return ()
    return tuple(
        Communication(
            operation="all_to_all",
            group="ep",
            calls=1.0,
            sent_bytes=1.0,
            why=f"experts, {direction}: {what}",
            overlapped=True,
            replaces="all_to_all",
        )
        for direction in ("forward", "backward")
        for what in ("tokens", "weights")
    )


def in_chunks(config: RunConfig, layout: Layout, num_chunks: int) -> tuple[Communication, ...]:
    """Return the exchanges in chunks. The first chunk of tokens and the last one of outputs have no
    experts to be behind, and are overlapped only with shared experts."""
    sizes = chunk_sizes((config.model.num_moe_experts or 0) // layout.ep, num_chunks)
    first, last = (size / sum(sizes) for size in (sizes[0], sizes[-1]))
    shared = config.model.moe_shared_expert_overlap
    exposed = {"tokens": (first + last) / 2, "weights": first}
    found = [
        Communication(
            operation="all_to_all",
            group="ep",
            calls=calls,
            sent_bytes=share,
            why=f"experts, {direction}: {what}",
            overlapped=hidden,
            replaces="all_to_all",
        )
        for direction in ("forward", "backward")
        for what, alone in exposed.items()
        for calls, share, hidden in ((1, alone, shared), (num_chunks - 1, 1 - alone, True))
    ]
    # Of each chunk, over the ranks of an expert's tensor parallelism.
    return *found, *(
        Communication(
            operation=operation,
            group="expt_tp",
            calls=num_chunks,
            sent_bytes=1.0,
            why="experts, *",
            replaces=operation,
        )
        for operation in ("all_gather", "reduce_scatter")
    )


def gathered(config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange | None:
    """Return the change by gathering K experts of a token, int32, and their weights, instead of a
    flag and a weight of all X; None without experts."""
    experts, topk = config.model.num_moe_experts, config.model.moe_router_topk
    if not rank.moe_layers or experts is None:
        return None
    ranks = layout.ep * layout.expt_tp
    saved = {tensor.key: tensor.nbytes for tensor in rank.saved[min(rank.moe_layers)]}
    changes = {"dispatcher.indices": 1 + 2 * _INDEX / _PLAIN, "dispatcher.chosen": 1 / 6}
    tokens = own_tokens(config, layout, rank)
    if ranks == 1:
        changes["router.scores"] = 1 - tokens * experts * _BY_EXPERT / saved["router.scores"]
    own = tokens * (topk + ranks) * _INDEX  # experts of own tokens, first rows of all tokens
    if config.model.moe_expert_capacity_factor:
        own += tokens * topk  # which of them kept the token
    smaller = [
        ("all_gather", "forward: choices", 4 * topk / experts),
        ("all_gather", "forward: weights", topk / experts),
        ("reduce_scatter", "backward: weights", topk / experts),
    ]
    return CostChange(
        saved=tuple(SavedChange(tensors=(n,), factor=factor) for n, factor in changes.items()),
        saved_added=(SavedTensor(part="dispatcher", name="choices", nbytes=own),),
        saved_added_layers=tuple(sorted(rank.moe_layers)),
        communication=tuple(
            Communication(
                operation=operation,
                group="tp_ep",
                calls=1.0,
                sent_bytes=factor,
                why=f"experts, {what}",
                replaces=operation,
            )
            for operation, what, factor in smaller
            if ranks > 1
        ),
    )


def gathered_in_chunks(
    config: RunConfig, layout: Layout, rank: PipelineStage, chunks: int, *, behind_shared: bool
) -> tuple[Communication, ...]:
    """Return the exchange of the tokens and outputs in chunks of tokens. The first chunk of tokens
    and the last one of outputs have no experts to be behind.

    Args:
        behind_shared: Whether outputs are exchanged behind shared experts, if there are any.
    """
    sizes = chunk_sizes(own_tokens(config, layout, rank), chunks)
    first, last = (size / sum(sizes) for size in (sizes[0], sizes[-1]))
    shared = behind_shared and bool(config.model.moe_shared_expert_intermediate_size)
    if chunks == 1 and not shared:
        return ()
    return tuple(
        Communication(
            operation=operation,
            group="tp_ep",
            calls=calls,
            sent_bytes=share,
            why=f"experts, {what}",
            overlapped=hidden,
            replaces=operation,
        )
        for operation, what, alone, by_shared in (
            ("all_gather", "forward: tokens", first, False),
            ("reduce_scatter", "forward: outputs", last, shared),
            ("all_gather", "backward: outputs", last, shared),
            ("reduce_scatter", "backward: tokens", first, False),
        )
        for calls, share, hidden in ((1, alone, by_shared), (chunks - 1, 1 - alone, True))
        if calls
    )
