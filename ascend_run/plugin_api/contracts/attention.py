"""Attention: what a kernel is given, answers, and can do.

Shape letters: see the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class Mask:
    """Which keys a query may see, as data; nobody holds a dense matrix unless a kernel must.

    A query at position ``query_start + i`` sees a key at ``key_start + j`` where every set rule
    allows it.
    """

    causal: bool = True
    window: tuple[int, int] | None = None
    """Keys seen to the left and to the right of a query's own position; -1 is unbounded."""
    document_ends: tuple[int, ...] | None = None
    """Positions at which documents end; a query sees only keys of its own document."""
    query_start: int = 0
    key_start: int = 0


@attrs.frozen(kw_only=True)
class Dropout:
    """Dropout on the attention probabilities, replayable in backward."""

    probability: float
    seed: int
    """Seed of the generator that draws the mask; the same in forward and backward."""


@attrs.frozen(kw_only=True)
class PositionBias:
    """A bias that follows from how far apart a query and a key are: ``-slope * distance``.

    The distance is that of the mask's positions, ``query_start + i`` and ``key_start + j``. Nobody
    holds the whole matrix: a kernel makes the part that it works on.
    """

    slopes: Tensor
    """One a head, [N], at least 0; a constant, without a gradient."""
    root: bool = False
    """Take the square root of the distance."""


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """What one call of an attention kernel has to compute, beside its tensors."""

    scale: float
    """Factor on ``q @ k.T`` before the softmax."""
    mask: Mask = attrs.field(factory=Mask)
    bias: Tensor | None = None
    """Added to the scaled scores; broadcasts to [B, N, S_q, S_k]."""
    bias_requires_grad: bool = True
    """Whether backward answers the bias's gradient; a mask that is given as a bias has none."""
    position_bias: PositionBias | None = None
    """Added to the scaled scores as well."""
    sinks: Tensor | None = None
    """One extra logit a head, [N], that takes probability and gives no value."""
    softcap: float | None = None
    """``softcap * tanh(score / softcap)`` in place of the score."""
    dropout: Dropout | None = None


class AttentionResult(NamedTuple):
    """What a kernel's forward answers."""

    out: Tensor
    """[S_q, B, N, E], or [T_q, N, E] packed; the dtype of q."""
    lse: Tensor
    """Log of the sum of exponentials of the scaled scores, [B, N, S_q] or [N, T_q]; float32, or
    float64 for float64 inputs."""
    saved: tuple[Tensor, ...] = ()
    """Whatever else this kernel's backward reads."""


@attrs.frozen(kw_only=True)
class AttentionFeatures:
    """What a kernel can do; what a run needs and a kernel does not declare is refused before
    anything runs."""

    window: bool = False
    documents: bool = False
    bias: bool = False
    position_bias: bool = False
    sinks: bool = False
    softcap: bool = False
    dropout: bool = False
    packed: bool = False
    unequal_lengths: bool = False
    unequal_widths: bool = False

    def __and__(self, other: AttentionFeatures) -> AttentionFeatures:
        """What two kernels, one around the other, can do together."""
        mine, others = attrs.asdict(self), attrs.asdict(other)
        return AttentionFeatures(**{name: mine[name] and others[name] for name in mine})

    def names(self) -> frozenset[str]:
        """Those that are there."""
        return frozenset(name for name, there in attrs.asdict(self).items() if there)

    @classmethod
    def all_but(cls, *names: str) -> AttentionFeatures:
        """Everything there is, except for these: what a wrapping kernel lets through."""
        return cls(**{field.name: field.name not in names for field in attrs.fields(cls)})


class AttentionKernel(Protocol):
    """Scaled dot-product attention with its log-sum-exp; the contract every feature composes.

    Wrapping kernels (Ulysses, ring) satisfy it too: on the outside they take this rank's part of
    the sequence, on the inside they call another kernel.
    """

    features: AttentionFeatures
    backward_reads: frozenset[str]
    """Which of ``q k v out lse`` backward reads; the others are not kept, and arrive as None."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        """Attend.

        Args:
            q: [S_q, B, N, D], or packed [T_q, N, D]; any strides.
            k: [S_k, B, G, D] or [T_k, G, D]; G divides N.
            v: [S_k, B, G, E] or [T_k, G, E].
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[Tensor, ...],
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        """Gradients ``(dq, dk, dv)``, in the shapes of q, k and v, then that of the bias where the
        spec has one that requires it, then that of the sinks where it has any."""
        ...


class SequencePartition(Protocol):
    """How the context-parallel ranks share one sequence; owned with ``sequence-exchange``."""

    multiple: int
    """The sequence must be a multiple of ``multiple * cp``; 0: ranks may hold parts of different
    lengths, and it is an UnevenPartition."""

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        """Half-open position ranges that one rank holds, in the order in which it holds them."""
        ...


@runtime_checkable
class DocumentPartition(SequencePartition, Protocol):
    """A partition that cuts a batch of several documents in its own way."""

    def of_documents(self, document_ends: tuple[int, ...]) -> SequencePartition:
        """How such a batch is cut: batch, rotary tables and scores alike."""
        ...


@runtime_checkable
class UnevenPartition(SequencePartition, Protocol):
    """A partition whose ranks may hold parts of different lengths."""

    def whole_length(self, held: int, rank: int, size: int) -> int:
        """How long the sequence is of which a rank holds so many positions.

        Raises:
            ConfigError: None is known of which it holds so many.
        """
        ...


def whole_length(partition: SequencePartition | None, held: int, rank: int, size: int) -> int:
    """How long the sequence is of which a rank holds so many positions; None: nobody cuts it."""
    if isinstance(partition, UnevenPartition) and size > 1:
        return partition.whole_length(held, rank, size)
    return held * size


def partition_of(
    partition: SequencePartition, document_ends: tuple[int, ...] | None
) -> SequencePartition:
    """What cuts a batch with these documents."""
    if document_ends and isinstance(partition, DocumentPartition):
        return partition.of_documents(document_ends)
    return partition
