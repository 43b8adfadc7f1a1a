"""Communication of latent attention under tensor parallelism, whose linears are all
column-parallel.

The outputs of the down projections, shards of the latents, are all-gathered. With sequence
parallelism each linear all-gathers its input, and the latents are scattered to this rank's tokens
for their norms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ascend_run.plugin_api.contracts import Communication
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .sizes import Sizes

_FORWARD, _BACKWARD = "attention, forward", "attention, backward"


def latent_forward(
    config: RunConfig, layout: Layout, sizes: Sizes, runs: int
) -> Iterator[Communication]:
    """Yield the forward communication before the output projection."""
    if layout.tp == 1:
        return
    for width in _latent_rows(sizes):
        part = sizes.tokens * width / layout.tp * sizes.item_bytes
        yield _times("all_gather", runs, part, f"{_FORWARD}: latents")
    if config.parallel.sequence_parallel:
        for columns in _linears(sizes).values():
            own = sizes.shared_tokens * columns * sizes.item_bytes
            yield _times("all_gather", runs, own, _FORWARD)


def latent_backward(
    config: RunConfig, layout: Layout, sizes: Sizes, runs: int, trained: Collection[str]
) -> Iterator[Communication]:
    """Yield the backward communication of the whole attention block.

    Args:
        trained: ``part.name`` of the trained parameters.
    """
    if layout.tp == 1:
        return
    tokens, own = (n * sizes.item_bytes for n in (sizes.tokens, sizes.shared_tokens))
    # Each rank has the gradient of the shared key from its own heads only.
    yield _times("all_reduce", runs, tokens * sizes.rotated_width, f"{_BACKWARD}: latents")
    shares = config.parallel.sequence_parallel
    if shares:
        yield _times("all_gather", runs, own * sizes.hidden, _BACKWARD)  # output projection
        for width in (sizes.query_latent, sizes.key_latent):
            if width:
                yield _times("all_gather", runs, own * width, f"{_BACKWARD}: latents")
    for name, columns in _linears(sizes).items():
        trains = f"self_attention.{name}" in trained
        if shares and trains:
            yield _times("all_gather", runs, own * columns, f"{_BACKWARD}: input")
        operation = "reduce_scatter" if shares else "all_reduce"
        why = _BACKWARD if trains else f"{_BACKWARD}: frozen"
        yield _times(operation, runs, tokens * columns, why)


def _latent_rows(sizes: Sizes) -> list[int]:
    """Widths of the down projections' outputs."""
    rows = [sizes.query_latent, sizes.key_latent + sizes.rotated_width]
    return [width for width in rows if width]


def _linears(sizes: Sizes) -> dict[str, int]:
    """Name -> input width of every column-parallel linear."""
    found = {"linear_q_proj": sizes.hidden}
    if sizes.query_latent:
        found = {"linear_q_down_proj": sizes.hidden, "linear_q_up_proj": sizes.query_latent}
    return {**found, "linear_kv_down_proj": sizes.hidden, "linear_kv_up_proj": sizes.key_latent}


def _times(operation: str, calls: int, nbytes: float, why: str) -> Communication:
    """Collectives of ``nbytes`` each."""
    return Communication(
        operation=operation, group="tp", calls=calls, sent_bytes=calls * nbytes, why=why
    )
