"""Cost of a plan on the rank that sends most, by formula. No torch."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ascend_run.types.attention import Mask
from ascend_run.types.cost import Communication, CostChange, PipelineStage, SavedTensor

from .head_cost import HeadCost, Sent
from .key_cost import KeyCost
from .plan import WHOLE, ContextParallelPlan


@attrs.frozen(kw_only=True)
class Sequence:
    """The sequence that the ranks share; one document."""

    length: int
    rows: int
    """Samples of a micro-batch."""
    window: tuple[int, int] | None = None
    """Window of the causal mask."""


def context_parallel_cost(
    plan: ContextParallelPlan, rank: PipelineStage, sequence: Sequence, tp: int
) -> CostChange:
    """Return changes of saved activations, working memory and collectives.

    Args:
        tp: Tensor-parallel ranks, the stride between consecutive parts of the sequence.
    """
    exchange: HeadCost | None = None
    sent: list[tuple[int, Sent]] = []
    if plan.head_degree is not None:
        exchange = HeadCost.of(plan, rank, sequence.length, sequence.rows)
        sent += exchange.sent()
    if exchange is not None and plan.keys == "heads":
        return CostChange(saved=(*exchange.saved(),), communication=_communication(plan, sent, tp))
    keys = KeyCost(
        plan=plan,
        rank=rank,
        # Heads are repeated before the keys are sent on.
        groups=sum(exchange.share.copies) if exchange else rank.query_groups,
        factor=exchange.key_factor if exchange else 1.0,
        keeping=plan.kv_cache.caching(rank.layers),
    )
    sent += keys.sent(Mask(window=sequence.window), sequence.length, sequence.rows)
    received = SavedTensor(part="self_attention", name="received", nbytes=keys.received_bytes)
    return CostChange(
        saved=(*keys.saved(),),
        saved_added=(received,) if keys.keeping else (),
        saved_added_layers=keys.keeping,
        working=(*keys.working(),) if plan.keys == "gather" else (),
        communication=_communication(plan, sent, tp),
    )


def _communication(
    plan: ContextParallelPlan, found: Iterable[tuple[int, Sent]], tp: int
) -> tuple[Communication, ...]:
    """Return the communication of a step from that of one pass of a layer."""
    degree, window = plan.head_degree or 1, plan.window or plan.ring_degree
    # Size and stride of each group.
    of_rings = (window, tp * degree), (plan.ring_degree // window, tp * degree * window)
    dims = {plan.head_group: (degree, tp), **dict(zip(plan.key_groups, of_rings, strict=False))}
    dims[WHOLE] = 0, 1  # an axis of the layout
    return tuple(
        Communication(
            operation=sent.operation,
            calls=passes * sent.calls,
            sent_bytes=passes * sent.nbytes,
            why=sent.why,
            largest_bytes=sent.largest,
            overlapped=sent.overlapped,
            group=sent.group,
            group_size=dims[sent.group][0],
            group_stride=dims[sent.group][1],
        )
        for passes, sent in found
        if passes
    )
