"""Data and task: batches, datasets, losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .run import RunContext


@attrs.frozen(kw_only=True)
class BatchField:
    """How one named tensor of a batch is laid out and cut."""

    axes: tuple[str, ...]
    """Name of each axis: ``batch``, ``sequence``, or the plugin's own."""
    replicated: bool = False
    """Every context-parallel rank keeps it whole, though it has a ``sequence`` axis."""


@attrs.frozen(kw_only=True)
class Batch:
    """A micro-batch: named tensors with declared axes.

    A dense mask is the field ``attention_mask`` with the axes ``batch, query, key``: bool, True
    where a query may attend to a key, in place of the causal mask. It is whole on every rank. Who
    adds it needs ``AttentionFeatures(bias=True)``; our tasks hand it to the model.
    """

    tensors: Mapping[str, Tensor]
    fields: Mapping[str, BatchField]
    document_ends: tuple[int, ...] | None = None
    """Positions at which documents end, in each of its sequences, whole as they are; None where
    all is one. Who sets them does it before the sequence is cut, and on every rank."""
    row_ends: tuple[tuple[int, ...], ...] | None = None
    """The same where every row has ends of its own; one tuple a row. Core lays the rows behind one
    another, before it cuts the sequence: a task sees tensors [1, B * S] and ``document_ends``."""


@attrs.frozen
class LossSum:
    """A loss that is not yet a mean."""

    sum: Tensor
    """Scalar, differentiable."""
    count: Tensor
    """Scalar, integer: tokens (or samples) that the sum runs over on this rank."""


class Task(Protocol):
    """What is trained: models, data, forward step and metrics."""

    roles: Sequence[str]
    """Models it needs; the first one trains."""
    batch_fields: Mapping[str, BatchField]

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """What to train and evaluate on: a ``TokenBlend``, which core builds, or a map-style
        dataset of the task's own with at least so many items, each a mapping from the names of
        ``batch_fields`` to tensors without the batch axis; several of those are a
        ``SampleBlend``."""
        ...

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """One forward; the hidden state on every pipeline stage but the last, there the loss."""
        ...


@attrs.frozen(kw_only=True)
class TokenBlend:
    """Token files, each joined to one stream and cut to sequences of ``data.seq_length``.

    An item has ``tokens``, ``labels`` (the token after each), ``position_ids`` (int64) and
    ``loss_mask`` (float32), all [sequence].
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] = ()
    """Share of the samples that each gives; empty means in proportion to their tokens."""


@attrs.frozen(kw_only=True)
class SampleBlend:
    """Map-style datasets of a task's own, from which core takes samples in given shares."""

    datasets: tuple[Any, ...]
    """Each with as many items as the whole has."""
    weights: tuple[float, ...]
    """Share of the samples that each gives; above 0."""


class Datasets(NamedTuple):
    """What a task trains and evaluates on."""

    train: TokenBlend | SampleBlend | Any
    validation: TokenBlend | SampleBlend | Any | None


BatchIterator = Iterator[Batch]
