"""Communication volume of multi-token prediction, by process group."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ascend_run.plugin_api.contracts import Communication
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .saved import hidden_bytes
from .sizes import Sizes
from .volume import volume

_INDEX = 8


def mtp_batch(layout: Layout, sizes: Sizes) -> Iterator[Communication]:
    """Yield the all-gather of a batch's four fields, of which every depth takes a later token."""
    if layout.cp > 1 and sizes.mtp_layers:
        runs, nbytes = sizes.num_microbatches, 4 * sizes.tokens * _INDEX
        yield volume("all_gather", "cp", runs, nbytes, "multi-token prediction: later tokens")


def mtp_forward(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[Communication]:
    """Yield the communication of the projection of one depth of multi-token prediction."""
    runs, why = sizes.num_microbatches, "multi-token prediction, forward"
    if layout.tp == 1:
        return
    if config.parallel.sequence_parallel:
        yield volume("all_gather", "tp", runs, 2 * hidden_bytes(sizes), f"{why}: input")
    own = sizes.tokens * sizes.hidden // layout.tp * sizes.item_bytes
    yield volume("all_gather", "tp", runs, own, f"{why}: output")


def mtp_backward(
    config: RunConfig, layout: Layout, sizes: Sizes, *, trained: Collection[str]
) -> Iterator[Communication]:
    """Yield the communication of the backward of ``mtp_forward``."""
    runs, why = sizes.num_microbatches, "multi-token prediction, backward"
    if layout.tp == 1:
        return
    whole = 2 * sizes.tokens * sizes.hidden * sizes.item_bytes
    if not config.parallel.sequence_parallel:
        yield volume("all_reduce", "tp", runs, whole, f"{why}: input")
        return
    yield volume("all_gather", "tp", runs, hidden_bytes(sizes), f"{why}: output")
    if "mtp.eh_proj" in trained:
        yield volume("all_gather", "tp", runs, 2 * hidden_bytes(sizes), f"{why}: input")
    yield volume("reduce_scatter", "tp", runs, whole, f"{why}: input")
