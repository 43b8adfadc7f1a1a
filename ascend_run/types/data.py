"""Data and task: batches, datasets, losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import attrs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from .run import RunContext


@attrs.frozen(kw_only=True)
class BatchField:
    """Axes of one named tensor of a batch, and whether it is sharded."""

    axes: tuple[str, ...]  #: Name of each axis: ``batch``, ``sequence``, or the plugin's own.
    replicated: bool = False
    """Replicated on every context-parallel rank, although it has a ``sequence`` axis."""


@attrs.frozen(kw_only=True)
class Batch:
    """A micro-batch: named tensors with declared axes.

    A dense mask is the field ``attention_mask`` with the axes ``batch, query, key``: bool, True
    where a query may attend to a key, instead of the causal mask. It is replicated on every rank. A
    plugin that adds it needs ``AttentionFeatures(bias=True)``; the built-in tasks pass it to the
    model.
    """

    tensors: Mapping[str, Tensor]  #: Name -> tensor.
    fields: Mapping[str, BatchField]  #: Name -> its axes.
    document_ends: tuple[int, ...] | None = None
    """Positions in the full sequence at which documents end, the same in every row; None for one
    document per row. Set before the sequence is sharded, and on every rank."""
    row_ends: tuple[tuple[int, ...], ...] | None = None
    """The same if rows differ; one tuple per row. Core concatenates the rows before it shards the
    sequence: a task sees tensors of shape [1, B * S] and ``document_ends``."""


@attrs.frozen
class LossSum:
    """A loss before averaging."""

    sum: Tensor  #: Scalar, differentiable.
    count: Tensor  #: Scalar, integer: number of tokens (or samples) in the sum on this rank.
    tokens: Tensor | None = None
    """Scalar, integer: tokens that were trained on, for the speed; None if they are ``count``."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = attrs.field(factory=dict)
    """Name -> (sum, count), scalars of this rank; logged as the mean over all ranks."""


ForwardStep: TypeAlias = "Callable[[RunContext, nn.Module, Batch], Tensor | LossSum]"
"""One forward of a model that trains: see ``Task.forward_step``."""

FrozenStep: TypeAlias = "Callable[[RunContext, nn.Module, Batch], Tensor]"
"""One forward of a model that is not trained. Like ``Task.forward_step``, it returns the hidden
states; on the last pipeline stage a tensor without them, which core adds to the micro-batch."""


@attrs.frozen(kw_only=True)
class RoleSpec:
    """One model of a run."""

    name: str  #: ``policy``, ``reference`` ...
    model: Mapping[str, object] = attrs.field(factory=dict)
    """Fields of ``[model]`` that differ from the run's: ``num_labels`` gives it a score head."""
    forward_step: ForwardStep | None = None
    """Of a trained model beside the first: its step follows that one's, on the same micro-batches.
    The loss has ``Task.count`` and no metrics; it is logged as ``<name> loss``."""
    frozen_step: FrozenStep | None = None
    """If given, the model is frozen: it has no optimizer, is not part of checkpoints, and runs
    before the trained ones on each micro-batch, to which its results are added under its name."""
    is_base: bool = False
    """Whether it is no model of its own but the trained one, in ``RunPhase.REFERENCE``: without
    what is trained beside its frozen weights."""
    weights: str | None = None  #: Hugging Face folder; None: ``hf_path`` of its model, if set.
    ahead: bool = False
    """Whether a frozen model is no part of the steps: it stands only while the task runs it, by
    ``RunContext.frozen_pass``, and has no chunks otherwise."""


class Task(Protocol):
    """What is trained: models, data and forward step."""

    roles: Sequence[RoleSpec]  #: The first one trains; each other has one of the two steps.
    metrics: Sequence[str]  #: Names of ``LossSum.metrics``.
    batch_fields: Mapping[str, BatchField]  #: Name of each tensor of a batch -> its axes.

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the data to train and evaluate on.

        Returns:
            For each of the two a map-style dataset with at least that many items, each a mapping
            from the names of ``batch_fields`` to tensors without the batch axis; or a
            ``SampleBlend`` of several such datasets.
        """
        ...

    def count(self, context: RunContext, batch: Batch) -> Tensor:
        """Return ``LossSum.count`` of a micro-batch before its forward, on every pipeline stage."""
        ...

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Run one forward.

        Returns:
            The hidden states; on the last pipeline stage, the loss.
        """
        ...


class FrozenPass(Protocol):
    """Runs a frozen model over samples, outside of the steps."""

    repeatable: bool
    """Whether any run of the same config gets the same results; not in a dry run."""

    def __call__(
        self,
        context: RunContext,
        role: RoleSpec,
        samples: Samples,
        fields: Mapping[str, BatchField],
    ) -> Iterator[Batch]:
        """Yield this rank's micro-batches of one sample each, of all complete global batches; on
        the last pipeline stage, with the results of ``role.frozen_step``, as in a step.

        When: on every rank, once the models are built; each has to take all micro-batches.
        """
        ...


class Samples(Protocol):
    """A map-style dataset of named tensors, without the batch axis."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]: ...


@attrs.frozen(kw_only=True)
class SampleBlend:
    """Map-style datasets of a task, from which core draws samples in the given shares."""

    datasets: tuple[Samples, ...]  #: Each with as many items as the blend.
    weights: tuple[float, ...]  #: Share of the samples drawn from each; above 0.


class Datasets(NamedTuple):
    """The data of a task."""

    train: SampleBlend | Samples | None  #: None only for a run without steps.
    validation: SampleBlend | Samples | None  #: None: no evaluation.


Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"
"""Numpy arrays by name."""


class ArrayCache(Protocol):
    """Arrays that one rank computes and every rank reads."""

    def arrays(self, description: Mapping[str, object], compute: Callable[[], Arrays]) -> Arrays:
        """Return the read-only arrays for a description.

        Args:
            description: JSON values that fully determine the arrays: their kind, a version of the
                algorithm, and hashes of the files that they are computed from.
            compute: Called on a cache miss.
        """
        ...


class NoCache:
    """An ``ArrayCache`` that stores nothing."""

    def arrays(self, description: Mapping[str, object], compute: Callable[[], Arrays]) -> Arrays:
        """Return what ``compute`` returns."""
        return compute()


BatchIterator = Iterator[Batch]
"""Micro-batches of one rank, in the order of training."""
