"""What the plain formula keeps where autograd differentiates it. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.plugin_api import CostChange, KeptTensor, Moment, RankKind, WorkingMemory

_WIDE = 4
"""Bytes of float32, which the formula is taken in."""


def plain_cost(rank: RankKind) -> CostChange:
    """The input of each norm in float32, in the place of a narrower one, and the normalised rows.

    The final norm stands beside the layers, and so counts where the loss is taken; its input is
    there besides.
    """
    kept = {tensor.key: tensor.nbytes for tensor in next(iter(rank.kept.values()), ())}
    hidden = kept.get("input_norm.input", 0.0)
    more = _added(hidden, hidden, rank.item_bytes)
    last = _added(hidden, 0.0, rank.item_bytes)
    final = WorkingMemory(part="loss", name="final norm", nbytes=last, moment=Moment.LOSS)
    return CostChange(
        kept_added=(
            KeptTensor(part="input_norm", name="steps", nbytes=more),
            KeptTensor(part="mlp_norm", name="steps", nbytes=more),
            *(
                KeptTensor(part="self_attention", name="steps of norms", nbytes=nbytes)
                for nbytes in _inside_attention(kept, rank)
            ),
        ),
        working=(final,) if rank.is_last else (),
    )


def _inside_attention(kept: dict[str, float], rank: RankKind) -> Iterator[float]:
    """Norms of latents, or of queries and keys."""
    part, item = "self_attention", rank.item_bytes
    if latents := kept.get(f"{part}.normed_latents"):
        yield _added(latents, kept[f"{part}.latents"], item)
    elif f"{part}.statistics" in kept:
        query, key = kept[f"{part}.q"], kept[f"{part}.k"]
        # Their input is a view of the projection, which the values keep; but that queries which
        # share a key are copied out of it.
        copied = query if rank.heads != rank.query_groups else 0.0
        yield _added(query + key, copied, item)


def _added(rows: float, narrow: float, item: int) -> float:
    """Bytes more than a fused kernel keeps.

    Args:
        rows: Bytes of the norms' output in the model's dtype.
        narrow: Of them and the input, what a wide copy takes the place of.
    """
    wide = rows / item * _WIDE
    return wide if item == _WIDE else 2 * wide - narrow
