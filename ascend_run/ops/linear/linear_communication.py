"""Communication of tensor-parallel linears with other matmuls than the plain ones. No torch.

Replaces each collective of ``plain_matmuls.PLAIN``, by factors of its calls and bytes. What
overlaps with the gradient of a weight is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

from ascend_run.types.config import RunConfig

GATHERED: Final = ("self_attention.input", "mlp.input")
"""Saved activations of a column-parallel linear; multiplied by the number of ranks if saved
gathered."""
GATHER_BUFFER: Final = "gathered hidden states"
"""Megatron's buffer, by its name in the plan."""
_PARTS: Final = ("attention", "feed-forward", "shared experts")
_GATHER, _SCATTER, _REDUCE = "all_gather", "reduce_scatter", "all_reduce"


@attrs.frozen
class Sent:
    """A fraction of one collective of the plain model, or what replaces it."""

    operation: str
    calls: float
    """Calls per call of the plain collective."""
    sent_bytes: float
    """Bytes sent per byte of a rank's input."""
    overlapped: bool = False
    """Whether it overlaps with a matmul."""


@attrs.frozen(kw_only=True)
class LinearCommunication:
    """The replacement of each collective."""

    all_gather: Sequence[Sent]
    reduce_scatter: Sequence[Sent]
    all_reduce: Sequence[Sent]

    def changes(self, *, keep_gathered: bool) -> Iterator[dict[str, Any]]:
        """Yield the fields of a plugin's ``Communication``, one dict each.

        Args:
            keep_gathered: Whether a column-parallel linear saves its gathered input.
        """
        for part in _PARTS:
            for gathers in (f"{part}, forward", f"{part}, backward"):
                yield from _changes(_GATHER, gathers, self.all_gather)
            if keep_gathered:
                yield from _changes(_GATHER, f"{part}, backward: input", [Sent(_GATHER, 0, 0)])
            for sums in (f"{part}, forward", f"{part}, backward: frozen"):
                yield from _changes(_SCATTER, sums, self.reduce_scatter)
                yield from _changes(_REDUCE, sums, self.all_reduce)


def buffers(config: RunConfig) -> dict[str, float]:
    """Return {name: bytes}: ``parallel_linear`` gathers into temporary tensors, and leaves
    Megatron's buffer empty unless a dispatcher gathers into it too."""
    model = config.model
    gathers = model.num_moe_experts and model.moe_token_dispatcher_type == "allgather"
    return {} if gathers else {GATHER_BUFFER: 0.0}


def in_slices(number: int, rows: int) -> LinearCommunication:
    """Return the communication of ``sliced_matmul``: each collective in slices, one of them
    exposed.

    Args:
        rows: Of one rank; of all ranks if tensors are not sharded along rows.
    """
    number = max(1, min(number, rows))

    def calls(operation: str) -> list[Sent]:
        seen = Sent(operation, 1, 1 / number)
        return [seen, Sent(operation, number - 1, 1 - 1 / number, overlapped=True)][:number]

    return LinearCommunication(
        all_gather=calls(_GATHER), reduce_scatter=calls(_SCATTER), all_reduce=calls(_REDUCE)
    )


def round_a_ring(ranks: int, rows: int) -> LinearCommunication:
    """Return the communication of ``collective_matmul``: sends between ranks, overlapped with
    matmuls.

    Args:
        rows: Of a matmul whose result is reduced; if the ranks cannot share them equally, one
            collective reduces it.
    """
    hops, part = ranks - 1, 1 / ranks
    sums = [Sent("send", hops, hops * part, overlapped=True)]
    shared = rows % ranks == 0
    return LinearCommunication(
        all_gather=[Sent("send", hops, hops, overlapped=True)],
        reduce_scatter=sums,
        all_reduce=[*sums, Sent(_GATHER, 1, part)] if shared else [Sent(_REDUCE, 1, 1)],
    )


def inside_the_product() -> LinearCommunication:
    """Return the communication of a fused operator: the same bytes, overlapped."""
    return LinearCommunication(
        all_gather=[Sent(_GATHER, 1, 1, overlapped=True)],
        reduce_scatter=[Sent(_SCATTER, 1, 1, overlapped=True)],
        all_reduce=[Sent(_REDUCE, 1, 1, overlapped=True)],
    )


def of_adapters(part: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of a plugin's ``Communication`` for adapters that their linears' forward
    computes: overlapped, and of a row-parallel output, one gather of the gradient serves both.

    Args:
        part: Pattern of the parts of a layer.
    """
    for operation, direction, calls in (
        (_GATHER, "forward", 1),
        (_GATHER, "backward", 0),
        (_SCATTER, "forward", 1),
        (_SCATTER, "backward", 1),
        (_REDUCE, "forward", 1),
        (_REDUCE, "backward", 1),
    ):
        sent = Sent(operation, calls, calls, overlapped=True)
        yield from _changes(operation, f"{part}, {direction}: adapters", [sent])


def _changes(replaces: str, why: str, sent: Sequence[Sent]) -> Iterator[dict[str, object]]:
    for one in sent:
        yield {**attrs.asdict(one), "group": "tp", "why": why, "replaces": replaces}
