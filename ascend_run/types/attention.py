"""Attention: a kernel's arguments, results and features.

Shape letters: see ``ascend_run.plugin_api.contracts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeVar

    Saved = TypeVar("Saved", bound=tuple[object, ...], default=Any)
else:  # the default is for type checkers, and Python has it from 3.13 on
    from typing import TypeVar

    Saved = TypeVar("Saved", bound=tuple[object, ...])
"""Record that a kernel's forward saves for its own backward; Any: of an unknown kernel."""


@attrs.frozen(kw_only=True)
class Mask:
    """Which keys a query attends to, as rules; only a kernel that needs a dense mask builds one.

    A query at position ``query_start + i`` attends to a key at ``key_start + j`` if every rule that
    is set allows it.
    """

    causal: bool = True  #: No key after the query.
    window: tuple[int, int] | None = None
    """Keys attended to on the left and on the right of the query's position; -1 is unbounded."""
    document_ends: tuple[int, ...] | None = None
    """Positions at which documents end; a query attends only to keys of its own document."""
    query_start: int = 0  #: Position of the first query, from 0. Unit: tokens.
    key_start: int = 0  #: Position of the first key, from 0. Unit: tokens.


@attrs.frozen(kw_only=True)
class Dropout:
    """Dropout on the attention probabilities, replayable in backward."""

    probability: float  #: Share that is dropped, from 0 to below 1.
    seed: int  #: Seed of the generator that draws the mask; the same in forward and backward.


@attrs.frozen(kw_only=True)
class PositionBias:
    """A bias that depends on the distance between a query and a key: ``-slope * distance``.

    The distance is the one between the mask's positions, ``query_start + i`` and
    ``key_start + j``. The dense matrix is never materialized: a kernel computes the tile that it
    works on.
    """

    slopes: Tensor  #: One per head, [N], at least 0; a constant, without a gradient.
    root: bool = False  #: Take the square root of the distance.


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """What one call of an attention kernel computes, apart from its tensors."""

    scale: float  #: Factor on ``q @ k.T`` before the softmax.
    mask: Mask = attrs.field(factory=Mask)  #: Default: causal.
    bias: Tensor | None = None  #: Added to the scaled scores; broadcasts to [B, N, S_q, S_k].
    bias_requires_grad: bool = True
    """Whether backward returns the bias's gradient; a mask passed as a bias has none."""
    position_bias: PositionBias | None = None  #: Also added to the scaled scores.
    sinks: Tensor | None = None
    """One extra logit per head, [N], that takes probability and contributes no value."""
    softcap: float | None = None  #: ``softcap * tanh(score / softcap)`` in place of the score.
    dropout: Dropout | None = None  #: On the probabilities; None: none.


class AttentionResult(NamedTuple, Generic[Saved]):
    """What a kernel's forward returns."""

    out: Tensor  #: [S_q, B, N, E], or [T_q, N, E] packed; the dtype of q.
    lse: Tensor
    """Log of the sum of exponentials of the scaled scores, [B, N, S_q] or [N, T_q]; float32, or
    float64 for float64 inputs."""
    saved: Saved = ()  # type: ignore[assignment]  # for kernels that save nothing else
    """Whatever else this kernel's backward reads: a NamedTuple of its own with tensors, shapes and
    the inner kernel's record, nested in tuples and dicts. Tensors at any depth are saved for
    backward by autograd; everything else is stored as is."""


@attrs.frozen(kw_only=True)
class AttentionFeatures:
    """What a kernel supports. A run that needs more is rejected before it starts."""

    window: bool = False  #: ``Mask.window``.
    documents: bool = False  #: ``Mask.document_ends``.
    bias: bool = False  #: ``AttentionSpec.bias``, and its gradient.
    position_bias: bool = False  #: ``AttentionSpec.position_bias``.
    sinks: bool = False  #: ``AttentionSpec.sinks``, and their gradient.
    softcap: bool = False  #: ``AttentionSpec.softcap``.
    dropout: bool = False  #: ``AttentionSpec.dropout``.
    packed: bool = False  #: Inputs [T, N, D], without a batch axis.
    unequal_lengths: bool = False  #: ``S_q != S_k``.
    unequal_widths: bool = False  #: ``D != E``: width of q and k, and of v.
    cached: bool = False  #: It is a ``CachedAttentionKernel``.

    def __and__(self, other: AttentionFeatures) -> AttentionFeatures:
        """Features of one kernel wrapped around another: those that both support."""
        mine, others = attrs.asdict(self), attrs.asdict(other)
        return AttentionFeatures(**{name: mine[name] and others[name] for name in mine})

    def names(self) -> frozenset[str]:
        """Names of the supported features."""
        return frozenset(name for name, there in attrs.asdict(self).items() if there)

    @classmethod
    def all_but(cls, *names: str) -> AttentionFeatures:
        """All features of ``forward`` except these: what a wrapping kernel passes through to the
        inner one. ``cached`` is not one of them: it is another method."""
        absent = {*names, "cached"}
        return cls(**{field.name: field.name not in absent for field in attrs.fields(cls)})


class AttentionKernel(Protocol[Saved]):
    """Scaled dot-product attention with its log-sum-exp; the interface that features compose.

    Wrapping kernels (Ulysses, ring) implement it too: they take this rank's shard of the sequence
    and call an inner kernel. If a kernel derives from ``AttentionKernel[Record]``, type checkers
    compare what its forward saves with what its backward reads; ``tuple[()]`` is no record.
    """

    features: AttentionFeatures
    """What it supports; of a wrapping kernel, together with its inner one."""
    backward_reads: frozenset[str]
    """Which of ``q k v out lse`` backward reads; others are not saved and passed as None."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> AttentionResult[Saved]:
        """Compute the attention.

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
        saved: Saved,
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        """Compute the gradients.

        Returns:
            ``(dq, dk, dv)`` in the shapes of q, k and v; then the bias's gradient, if
            ``spec.bias_requires_grad``; then that of the sinks, if the spec has any.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class CachedKeys:
    """Keys and values of one layer, in pages, and whose they are in one step of generation.

    The fields of the sequences are in the order of the step. Each sequence's own tokens of the step
    are its last ones in the pages.
    """

    k: Tensor  #: [G, P, D]: the pages of all sequences one after the other, heads first.
    v: Tensor  #: [G, P, E].
    runs: Sequence[Sequence[tuple[int, int]]]
    """Half-open ranges of P with a sequence's tokens, in their order; adjacent pages are one."""
    queries: Sequence[tuple[int, int]]  #: Half-open range of T: a sequence's tokens in the step.
    starts: Sequence[int]  #: Position of a sequence's first token in the step, from 0.


class CachedAttentionKernel(AttentionKernel[Saved], Protocol[Saved]):
    """A kernel that reads keys in pages; ``features.cached`` says so. Optional: another kernel with
    ``unequal_lengths`` is called once per sequence."""

    def forward_cached(self, q: Tensor, keys: CachedKeys, spec: AttentionSpec) -> Tensor:
        """Compute the attention of a step; there is no backward.

        Args:
            q: [T, N, D]; any strides. Each of T is a token of one of the sequences.
            spec: Without a bias, documents and dropout. Its mask starts at 0 for queries and keys;
                positions are those of ``keys``.

        Returns:
            [T, N, E] in the dtype of q.
        """
        ...


class SequencePartition(Protocol):
    """Partition of a sequence over ranks, by the owner of ``context-parallel``."""

    @property
    def multiple(self) -> int:
        """The sequence length must be a multiple of ``multiple * cp``. 0: shards may differ in
        length, and the partition is an UnevenPartition."""
        ...

    def __hash__(self) -> int: ...

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        """Half-open position ranges of one rank's shard, in the order in which it stores them."""
        ...


@runtime_checkable
class DocumentPartition(SequencePartition, Protocol):
    """A partition that depends on where the documents of a batch end."""

    def of_documents(self, document_ends: tuple[int, ...]) -> SequencePartition:
        """The partition of a batch with these documents, used for its tensors, the rotary tables
        and the attention scores."""
        ...


@runtime_checkable
class UnevenPartition(SequencePartition, Protocol):
    """A partition whose shards may differ in length."""

    def full_length(self, held: int, rank: int, size: int) -> int:
        """Length of the full sequence of which a rank holds ``held`` positions.

        Raises:
            ConfigError: No sequence length is known for which the rank holds so many.
        """
        ...


def full_length(partition: SequencePartition | None, held: int, rank: int, size: int) -> int:
    """Length of the full sequence of which a rank holds ``held`` positions.

    Args:
        partition: None if the sequence is not sharded.
    """
    if isinstance(partition, UnevenPartition) and size > 1:
        return partition.full_length(held, rank, size)
    return held * size


def partition_of(
    partition: SequencePartition, document_ends: tuple[int, ...] | None
) -> SequencePartition:
    """Return the partition that applies to a batch with these document ends."""
    if document_ends and isinstance(partition, DocumentPartition):
        return partition.of_documents(document_ends)
    return partition
