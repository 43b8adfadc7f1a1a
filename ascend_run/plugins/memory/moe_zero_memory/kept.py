"""Which layers keep the tokens of their experts at level 0. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import RunConfig

SHARE: Final = 0.3
"""Of what recomputing a whole layer would save: what level 0 may keep."""


def kept_share(config: RunConfig, expert_ranks: int) -> float:
    """Return the share of the layers that may keep their tokens, at most 1.

    A token of an expert takes H values. What the experts save besides depends on their kernel; the
    output of the first matmul is the least, 2 F values (F without a gate).

    Args:
        expert_ranks: Ranks that share an expert, each of which has a part of F.
    """
    model = config.model
    hidden: int = model.hidden_size
    width = (model.moe_ffn_hidden_size or model.ffn_hidden_size) / expert_ranks
    besides = 2 * width if model.gated_linear_unit else width
    share: float = SHARE * (hidden + besides) / hidden
    return min(1.0, share)


def keeps_tokens(config: RunConfig, expert_ranks: int, at: int) -> bool:
    """Return whether a layer keeps its tokens: spread evenly, and never more than their share.

    Args:
        at: Index among the layers of a rank, from 0.
    """
    share = kept_share(config, expert_ranks)
    return int(share * (at + 1)) > int(share * at)
