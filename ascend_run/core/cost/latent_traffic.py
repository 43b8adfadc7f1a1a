"""Messages of latent attention under tensor parallelism: its linears are all cut along their rows.

Those that project down leave each rank some entries of a latent, which are gathered. With sequence
parallelism every one of them gathers its input's tokens, and a latent is cut to this rank's tokens
for its norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import Messages
from ascend_run.plugin_api.layout import Layout

from .sizes import Sizes

_FORWARD, _BACKWARD = "attention, forward", "attention, backward"


def latent_forward(
    config: RunConfig, layout: Layout, sizes: Sizes, runs: int
) -> Iterator[Messages]:
    """What comes before the projection out."""
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
) -> Iterator[Messages]:
    """Of the whole attention.

    Args:
        trained: ``part.name`` of parameters.
    """
    if layout.tp == 1:
        return
    tokens, own = (n * sizes.item_bytes for n in (sizes.tokens, sizes.shared_tokens))
    # Each rank has its own heads' part of the shared key's gradient.
    yield _times("all_reduce", runs, tokens * sizes.rotated_width, f"{_BACKWARD}: latents")
    shares = config.parallel.sequence_parallel
    if shares:
        yield _times("all_gather", runs, own * sizes.hidden, _BACKWARD)  # into the projection out
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
    """Widths of what is projected down."""
    rows = [sizes.query_latent, sizes.key_latent + sizes.rotated_width]
    return [width for width in rows if width]


def _linears(sizes: Sizes) -> dict[str, int]:
    """Name -> columns of every linear that is cut along its rows."""
    found = {"linear_q_proj": sizes.hidden}
    if sizes.query_latent:
        found = {"linear_q_down_proj": sizes.hidden, "linear_q_up_proj": sizes.query_latent}
    return {**found, "linear_kv_down_proj": sizes.hidden, "linear_kv_up_proj": sizes.key_latent}


def _times(operation: str, calls: int, nbytes: float, why: str) -> Messages:
    """Messages of ``nbytes`` each."""
    return Messages(
        operation=operation, group="tp", calls=calls, sent_bytes=calls * nbytes, why=why
    )
