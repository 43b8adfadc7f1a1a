"""Which parameters Muon updates, and of which matrices their rows consist. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api import FieldSection

ALGORITHM: Final = "algorithm"
"""Per-parameter option: ``MUON`` or ``ADAMW``."""
MUON: Final = "muon"
ADAMW: Final = "adamw"
ROWS: Final = "rows"
"""Per-parameter option of a matrix: its FusedRows; None if it is not fused."""
_ALWAYS_ADAMW: Final = frozenset(
    {"embedding", "output_layer", "score", "gate_weight", "lora_A", "lora_B"}
)
"""Tables of tokens, heads of scores, the gate of the shared experts, which is one row, and low-rank
factors."""

_ELEMENTS_AT_ONCE: Final = 1 << 24
"""Of stacked experts. A batch of so many keeps a device busy; more take memory alone."""


@attrs.frozen
class FusedRows:
    """The rows of several matrices in one parameter: blocks, each with rows of every matrix."""

    num_blocks: int
    shares: tuple[int, ...]
    """Share of each matrix in the rows of a block."""
    by_rank: bool = False
    """Whether the blocks are those of one tensor-parallel rank: each has its own."""


def fused_rows(model: FieldSection) -> dict[str, FusedRows]:
    """Return the fused linears of a model, by name.

    The fused projection has for each key-value group the rows of its queries, its key and its
    value; ``linear_fc1`` of a gated MLP, and ``fc1`` of experts, the gate's rows, then those of up.
    Ranks share the groups of the model, and each has a share of the gate and one of up.
    """
    groups = model.num_query_groups or model.num_attention_heads
    heads = model.num_attention_heads // groups
    gated = FusedRows(1, (1, 1), by_rank=True)
    found = {"linear_qkv": FusedRows(groups, (heads, 1, 1))}
    return found | ({"linear_fc1": gated, "fc1": gated} if model.gated_linear_unit else {})


def parameter_options(
    name: str, is_matrix: bool, *, by_adamw: Collection[str], fused: Mapping[str, FusedRows]
) -> dict[str, Any]:
    """Return the per-parameter options of a parameter; see ``OptimizerSpec``."""
    words = name.removesuffix(".weight").split(".")
    if not is_matrix or not {*_ALWAYS_ADAMW, *by_adamw}.isdisjoint(words):
        return {ALGORITHM: ADAMW}
    return {ALGORITHM: MUON, ROWS: fused.get(words[-1])}


def experts_at_once(numel: int) -> int:
    """Return of how many experts a parameter is orthogonalized in one batch; numel is of each."""
    return max(1, _ELEMENTS_AT_ONCE // numel)
