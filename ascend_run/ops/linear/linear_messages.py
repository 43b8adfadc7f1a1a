"""What tensor-parallel linears send when their products are not the plain ones. No torch.

In the place of each collective of ``parallel_linear.PLAIN`` stand other messages, told as factors
of its calls and bytes. What hides behind the gradient of a weight stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

GATHERED: Final = ("self_attention.input", "mlp.input")
"""What is kept of a column-parallel linear, as many times as there are ranks where it is kept
gathered."""
GATHER_BUFFER: Final = "gathered hidden states"
"""Megatron's, by the name that the plan has for it."""
_PARTS: Final = ("attention", "feed-forward", "shared experts")
_GATHER, _SCATTER, _REDUCE = "all_gather", "reduce_scatter", "all_reduce"


@attrs.frozen
class Sent:
    """A share of one collective of the plain model, or what stands for it."""

    operation: str
    calls: float
    """For each call."""
    sent_bytes: float
    """For each byte that a rank puts in."""
    hidden: bool = False
    """Whether it is under way while something is multiplied."""


@attrs.frozen(kw_only=True)
class LinearMessages:
    """In the place of each collective."""

    all_gather: Sequence[Sent]
    reduce_scatter: Sequence[Sent]
    all_reduce: Sequence[Sent]

    def changes(self, *, keep_gathered: bool) -> Iterator[dict[str, Any]]:
        """Fields of a plugin's ``Messages``, one after the other.

        Args:
            keep_gathered: Whether a column-parallel linear does not gather its input again.
        """
        for part in _PARTS:
            for gathers in (f"{part}, forward", f"{part}, backward"):
                yield from _changes(_GATHER, gathers, self.all_gather)
            if keep_gathered:
                yield from _changes(_GATHER, f"{part}, backward: input", [Sent(_GATHER, 0, 0)])
            for sums in (f"{part}, forward", f"{part}, backward: frozen"):
                yield from _changes(_SCATTER, sums, self.reduce_scatter)
                yield from _changes(_REDUCE, sums, self.all_reduce)


def buffers(config: Any) -> dict[str, float]:
    """Name -> bytes: ``parallel_linear`` gathers into tensors that go with the product, and leaves
    Megatron's buffer empty where no dispatcher gathers into it either.

    Args:
        config: A ``RunConfig``.
    """
    model = config.model
    gathers = model.num_moe_experts and model.moe_token_dispatcher_type == "allgather"
    return {} if gathers else {GATHER_BUFFER: 0.0}


def in_slices(number: int, rows: int) -> LinearMessages:
    """``sliced_matmul``: each collective in pieces, of which one is seen.

    Args:
        rows: Of one rank; where tensors are not split along them, of all, which are more.
    """
    number = max(1, min(number, rows))

    def pieces(operation: str) -> list[Sent]:
        seen = Sent(operation, 1, 1 / number)
        return [seen, Sent(operation, number - 1, 1 - 1 / number, hidden=True)][:number]

    return LinearMessages(
        all_gather=pieces(_GATHER), reduce_scatter=pieces(_SCATTER), all_reduce=pieces(_REDUCE)
    )


def round_a_ring(ranks: int, rows: int) -> LinearMessages:
    """``collective_matmul``: blocks from rank to rank, each behind a product.

    Args:
        rows: Of a product that is summed; what the ranks cannot share is summed by one collective.
    """
    hops, part = ranks - 1, 1 / ranks
    sums = [Sent("send", hops, hops * part, hidden=True)]
    shared = rows % ranks == 0
    return LinearMessages(
        all_gather=[Sent("send", hops, hops, hidden=True)],
        reduce_scatter=sums,
        all_reduce=[*sums, Sent(_GATHER, 1, part)] if shared else [Sent(_REDUCE, 1, 1)],
    )


def inside_the_product() -> LinearMessages:
    """An operator that communicates while it multiplies: the same bytes, hidden."""
    return LinearMessages(
        all_gather=[Sent(_GATHER, 1, 1, hidden=True)],
        reduce_scatter=[Sent(_SCATTER, 1, 1, hidden=True)],
        all_reduce=[Sent(_REDUCE, 1, 1, hidden=True)],
    )


def _changes(instead_of: str, why: str, sent: Sequence[Sent]) -> Iterator[dict[str, Any]]:
    for one in sent:
        yield {**attrs.asdict(one), "group": "tp", "why": why, "instead_of": instead_of}
