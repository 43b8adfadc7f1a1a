"""What ranks that have shards of matrices send. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from ascend_run.plugin_api import Communication, ParameterCost, PipelineStage

from .parameters import ALGORITHM, MUON, parameter_options

_IN_MLP: Final = ("experts", "router", "shared_experts")


def gathered(
    rank: PipelineStage, by_adamw: Collection[str], item_bytes: int
) -> tuple[Communication, ...]:
    """Return the all-gathers of momentum, one for each matrix that is sharded.

    Args:
        by_adamw: Names of matrices that Muon does not update.
        item_bytes: Of an element of the iterations.
    """
    return tuple(_gathered(rank, by_adamw, item_bytes))


def _gathered(
    rank: PipelineStage, by_adamw: Collection[str], item_bytes: int
) -> Iterator[Communication]:
    for group, of_experts in (("tp", False), ("expt_tp", True)):
        sizes = [
            item_bytes * p.numel
            for p in rank.parameters
            if p.trained and not p.sees_own_tokens and (p.part == "experts") is of_experts
            if _is_by_muon(p, by_adamw)
        ]
        if sizes:
            yield Communication(
                operation="all_gather",
                group=group,
                calls=len(sizes),
                sent_bytes=sum(sizes),
                largest_bytes=max(sizes),
                why="orthogonalization",
            )


def _is_by_muon(parameter: ParameterCost, by_adamw: Collection[str]) -> bool:
    owner = f"mlp.{parameter.part}" if parameter.part in _IN_MLP else parameter.part
    name = f"{owner}.{parameter.name}"
    options = parameter_options(name, parameter.is_matrix, by_adamw=by_adamw, fused={})
    return bool(options[ALGORITHM] == MUON)
