"""What the update of matrices takes of memory, and what ranks that have shards of them send. No
torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ascend_run.plugin_api import (
    Communication,
    CostChange,
    Layout,
    ParameterCost,
    Phase,
    PipelineStage,
    RunConfig,
    WorkingMemory,
)

from .parameters import ALGORITHM, MUON, ROWS, FusedRows, experts_at_once, fused_rows
from .parameters import parameter_options as options_of

if TYPE_CHECKING:
    from . import MuonConfig

_IN_MLP: Final = ("experts", "router", "shared_experts")
_LATENTS: Final = {"linear_q_up_proj": "q_lora_rank", "linear_kv_up_proj": "kv_lora_rank"}
"""Matrices of which no side is the hidden size, and the field of the model that one is."""
_WIDE: Final = 4
"""Bytes of float32: of momentum and gradients."""


def muon_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: MuonConfig
) -> CostChange:
    """Return the working memory of the largest update, and the all-gathers of momentum."""
    fused = fused_rows(config.model) if options.split_fused else {}
    matrices = [(p, rows) for p in rank.parameters for rows in _rows_by_muon(p, options, fused)]
    nbytes = 0
    for parameter, rows in matrices:
        ranks = layout.expt_tp if parameter.part == "experts" else layout.tp
        shared = ranks > 1 and not parameter.sees_own_tokens
        shape = _whole_shape(config, layout, parameter, ranks if shared else 1)
        nbytes = max(nbytes, update_bytes(shape, rows, options, ranks if shared else 1))
    return CostChange(
        working=(
            WorkingMemory(
                part="optimizer", name="orthogonalization", nbytes=nbytes, phase=Phase.UPDATE
            ),
        ),
        communication=tuple(_gathered([p for p, _ in matrices], options)),
    )


def update_bytes(
    shape: tuple[int, ...], rows: FusedRows | None, options: MuonConfig, ranks: int = 1
) -> int:
    """Return the working memory of the update of one parameter.

    The iterations have two copies of the largest matrix, or batch of experts' matrices, and one of
    its Gram matrix. Before them there is the look-ahead, and what it is converted to. What is
    gathered of all ranks stays beside them.

    Args:
        shape: [A, B] or [E, A, B], of the unsharded parameter.
        ranks: That have shards of it.
    """
    *experts, num_rows, num_columns = shape
    at_once = min(*experts, experts_at_once(num_rows * num_columns)) if experts else 1
    if rows is not None:
        num_rows = num_rows * max(rows.shares) // sum(rows.shares)
    numel = at_once * num_rows * num_columns
    item = _item_bytes(options)
    iterations = item * (2 * numel + at_once * min(num_rows, num_columns) ** 2)
    ahead = _WIDE if options.nesterov else 0
    if ranks > 1:
        whole = math.prod(shape)
        return item * whole + max(ahead * whole // ranks, iterations)
    # The iterations take as much of float32.
    return max((ahead + item) * numel if ahead > item else 0, iterations)


def _whole_shape(
    config: RunConfig, layout: Layout, parameter: ParameterCost, ranks: int
) -> tuple[int, ...]:
    """Return the sides of a matrix, or of stacked ones; those that are not fused in either order.

    Args:
        ranks: That have shards of it.
    """
    side: int = getattr(config.model, _LATENTS.get(parameter.name, "hidden_size"))
    numel = parameter.numel * ranks
    if parameter.part != "experts":
        return numel // side, side
    experts = config.model.num_moe_experts // layout.ep
    return experts, numel // experts // side, side


def _rows_by_muon(
    parameter: ParameterCost, options: MuonConfig, fused: dict[str, FusedRows]
) -> Iterator[FusedRows | None]:
    """Yield the fused rows of a parameter, or None, if Muon updates it; otherwise nothing."""
    owner = f"mlp.{parameter.part}" if parameter.part in _IN_MLP else parameter.part
    name = f"{owner}.{parameter.name}"
    found = options_of(name, parameter.is_matrix, by_adamw=options.adamw, fused=fused)
    if parameter.trained and found[ALGORITHM] == MUON:
        yield found[ROWS]


def _gathered(matrices: list[ParameterCost], options: MuonConfig) -> Iterator[Communication]:
    """Yield the all-gathers of momentum, one for each matrix that is sharded."""
    for group, of_experts in (("tp", False), ("expt_tp", True)):
        sizes = [
            _item_bytes(options) * p.numel
            for p in matrices
            if not p.sees_own_tokens and (p.part == "experts") is of_experts
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


def _item_bytes(options: MuonConfig) -> int:
    """Return the size of an element of the iterations."""
    return 2 if options.ns_dtype == "bfloat16" else 4
