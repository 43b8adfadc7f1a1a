"""Activations that the plain formula saves under autograd. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.plugin_api import (
    CostChange,
    Phase,
    PipelineStage,
    RunConfig,
    SavedTensor,
    WorkingMemory,
)

_WIDE = 4
"""Bytes of float32, the dtype in which the formula is computed."""
_NORMS = ("input_norm", "self_attn_bda", "mlp_norm", "mlp_bda")
"""Parts of a layer that are norms."""


def plain_cost(config: RunConfig, rank: PipelineStage) -> CostChange:
    """Return the saved activations of each norm: its input in float32 and the normalized rows.

    The float32 input replaces a narrower one. The final norm is outside the layers, so it counts
    with the loss, and its input is saved separately.
    """
    kept = {tensor.key: tensor.nbytes for tensor in next(iter(rank.saved.values()), ())}
    parts = [part for part in _NORMS if f"{part}.statistics" in kept]
    hidden = next((kept[f"{part}.input"] for part in parts), 0.0)
    item = _WIDE if config.model.fp32_residual_connection else rank.item_bytes
    more = _added(hidden, hidden, item)
    last = _added(hidden, 0.0, item)
    final = WorkingMemory(part="loss", name="final norm", nbytes=last, phase=Phase.LOSS)
    return CostChange(
        saved_added=(
            *(SavedTensor(part=part, name="steps", nbytes=more) for part in parts),
            *(
                SavedTensor(part="self_attention", name="steps of norms", nbytes=nbytes)
                for nbytes in _inside_attention(kept, rank)
            ),
        ),
        working=(final,) if rank.is_last else (),
    )


def _inside_attention(kept: dict[str, float], rank: PipelineStage) -> Iterator[float]:
    """Yield the added bytes of the norms of latents, or of queries and keys."""
    part, item = "self_attention", rank.item_bytes
    if latents := kept.get(f"{part}.normed_latents"):
        yield _added(latents, kept[f"{part}.latents"], item)
    elif f"{part}.statistics" in kept:
        query, key = kept[f"{part}.q"], kept[f"{part}.k"]
        # Their input is a view of the projection, which is already saved for the values; but
        # queries that share a key are copied out of it.
        copied = query if rank.heads != rank.query_groups else 0.0
        yield _added(query + key, copied, item)


def _added(rows: float, narrow: float, item: int) -> float:
    """Return the bytes that are saved beyond those of a fused kernel.

    Args:
        rows: Bytes of the norms' output in the model's dtype.
        narrow: Bytes of the output and input that a float32 copy replaces.
    """
    wide = rows / item * _WIDE
    return wide if item == _WIDE else 2 * wide - narrow
