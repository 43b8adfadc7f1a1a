"""The interface of KV routes that ``shared_attention`` uses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import attrs
from torch import Tensor

from ascend_run.types.attention import Mask

from .blocks import Block
from .partitions import Span
from .schedule import Step
from .sums import KeySums

# s positions of this rank; B micro-batch (absent in packed layout); g key-value heads of a part; D
# width of k, E of v

Shape = tuple[int, ...]


@attrs.frozen(kw_only=True)
class RoutedBlock:
    """A block of the score matrix, with its keys and values."""

    block: Block
    keys: Tensor
    values: Tensor
    step: int
    """Step at which the keys are available; see ``Work.keys``."""
    order: int
    """Index of the block in one call: the same in forward and backward."""
    add: Callable[[Tensor, Tensor], None]
    """Accumulates the gradients of the block's keys and values, in backward; call it before the
    next block is received."""


@attrs.frozen(kw_only=True)
class RankKeys:
    """This rank's keys and values in a forward or backward.

    Both are split into parts of the heads: in each, keys [s, B, g, D] and values [s, B, g, E].
    """

    own: Sequence[Sequence[Tensor]]
    """Keys and values of each part; in backward only those that ``KeyRoute.reads`` names."""
    shapes: Sequence[tuple[Shape, Shape]]
    """Shapes of each part's keys and values."""
    like: Tensor
    """Gives the device of the gradients, and their dtype by ``sum_dtype``."""
    saved: list[Tensor] = attrs.field(factory=list)
    """What forward saves of the received tensors, and backward reads."""
    gradients: list[Sequence[Tensor]] = attrs.field(factory=list)
    """The result of backward: for each part, the gradients of keys and values."""


class Work(Protocol):
    """The blocks one rank computes in a call."""

    @property
    def queries(self) -> Sequence[Span]:
        """Positions of this rank's queries."""
        ...

    def keys(self, step: int) -> Sequence[Span]:
        """Return the positions of the keys available at a step."""
        ...


W = TypeVar("W", bound=Work)


class KeyRoute(Protocol[W]):
    """A KV route: how the keys of all ranks reach this rank's queries, and their gradients return.

    Forward and backward yield an iterator for each part of the heads, to be exhausted before the
    next. It yields every block once, in any order, and the next receive overlaps with the
    computation of what was yielded.
    """

    reads: frozenset[str]
    """Which of ``k`` and ``v`` backward reads."""
    groups_at_once: int | None
    """Key-value heads of a part; None: all of them."""
    rank: int
    size: int
    """Ranks that share the sequence."""
    max_blocks: int
    """Upper bound of ``RoutedBlock.order``."""

    def work(self, mask: Mask, num_queries: int, num_keys: int, placed: bool) -> W:
        """Return the work of this rank; arguments as in ``blocks.ring_steps``."""
        ...

    def forward(self, work: W, keys: RankKeys) -> Iterator[Iterator[RoutedBlock]]:
        """Route keys and values; at its end, ``keys.saved`` has what to save for backward."""
        ...

    def backward(self, work: W, keys: RankKeys) -> Iterator[Iterator[RoutedBlock]]:
        """Route keys and values again; at its end, ``keys.gradients`` has the gradients."""
        ...


def routed_blocks(
    number: int, step: Step, held: Sequence[Tensor], sums: KeySums, max_blocks: int
) -> Iterator[RoutedBlock]:
    """Yield each block of a step with its rows of keys and values.

    Args:
        held: The step's keys and values.
        sums: Accumulates the gradients.
        max_blocks: Upper bound of the number of blocks.
    """
    keys, values = held
    for index, block in enumerate(step.blocks):
        yield RoutedBlock(
            block=block,
            keys=keys[block.columns],
            values=values[block.columns],
            step=number,
            order=number * max_blocks + index,
            add=functools.partial(sums.add, block),
        )
