"""What the ring costs. No torch."""

from __future__ import annotations

from typing import Literal

from ascend_run.plugin_api import CostChange, KeptChange, KeptTensor, Layout, Messages, RankKind

_SUM_BYTES = 4


def ring_cost(
    layout: Layout, rank: RankKind, keep: Literal["nothing", "keys", "all"], keep_every: int
) -> CostChange:
    """Keys and values go round in forward and again in backward, their gradients in float32.

    What is kept of them here does not go round again. A window may stop the ring early; this is
    the whole ring.
    """
    others = layout.cp - 1
    keys = rank.tokens * rank.query_groups * rank.head_width * rank.item_bytes
    gradients = 2 * keys * _SUM_BYTES / rank.item_bytes
    keeping = [layer for layer in rank.layers if layer % keep_every == 0] if others else []
    keeping = [] if keep == "nothing" else keeping
    runs = rank.num_micro_batches
    plain = (len(rank.layers) - len(keeping)) * runs
    kept_runs = len(keeping) * runs
    messages = [
        _sends(others * (plain + kept_runs), 2 * keys, "keys and values, forward"),
        _sends(others * plain, 2 * keys, "keys and values, backward"),
        _sends(others * (plain + kept_runs), gradients, "gradients of keys and values"),
    ]
    if keep == "keys":
        messages.append(_sends(others * kept_runs, keys, "values, backward"))
    held = {"keys": layout.cp * keys + keys, "all": layout.cp * 2 * keys}.get(keep, 0.0)
    own = ("self_attention.k", "self_attention.v")
    return CostChange(
        kept=(KeptChange(tensors=own, layers=tuple(keeping), factor=0.0),) if keeping else (),
        kept_added=(KeptTensor(part="self_attention", name="received", nbytes=held),)
        if keeping
        else (),
        kept_added_layers=tuple(keeping),
        messages=tuple(m for m in messages if m.calls),
    )


def _sends(calls: float, nbytes: float, why: str) -> Messages:
    return Messages(
        operation="send",
        group="cp",
        calls=calls,
        sent_bytes=calls * nbytes,
        why=why,
        hidden=True,
    )
