"""Samples to micro-batches: which rank reads what, and what of it a context-parallel rank keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import Batch, BatchField, DataError
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import SequencePartition, partition_of
from ascend_run.plugin_api.layout import Layout

from .samples import Samples

BATCH_AXIS = "batch"
SEQUENCE_AXIS = "sequence"
MASK = "attention_mask"
PAIR_AXES = (BATCH_AXIS, "query", "key")
"""Of that field, which says of every pair of positions whether it is seen."""


@attrs.frozen(kw_only=True)
class BatchPlan:
    """How a global batch is dealt out to data-parallel ranks, as Megatron does.

    A global batch is the next ``global_batch_size`` samples, whatever the layout. Micro-batch by
    micro-batch, every data-parallel rank in turn takes ``micro_batch_size`` consecutive samples.
    """

    micro_batch_size: int
    global_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1

    @classmethod
    def of_rank(cls, config: RunConfig, layout: Layout) -> Self:
        """This rank's part of a run's global batches."""
        return cls(
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            dp_rank=layout.coordinate("dp"),
            dp_size=layout.dp,
        )

    def __attrs_post_init__(self) -> None:
        assert self.global_batch_size % (self.micro_batch_size * self.dp_size) == 0

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank in a global batch."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def samples(self, consumed_samples: int, micro_batch: int) -> range:
        """This rank's samples of one micro-batch of the global batch that comes next."""
        first = consumed_samples + micro_batch * self.micro_batch_size * self.dp_size
        first += self.dp_rank * self.micro_batch_size
        return range(first, first + self.micro_batch_size)


def micro_batches(
    dataset: Samples,
    fields: Mapping[str, BatchField],
    plan: BatchPlan,
    consumed_samples: int = 0,
    num_global_batches: int | None = None,
) -> Iterator[Batch]:
    """The micro-batches of one rank, global batch after global batch.

    It holds no state but its position, so it goes on exactly wherever a run stopped, and an
    evaluation that starts it anew reads the same samples.

    Args:
        consumed_samples: Samples that the run has trained on.
        num_global_batches: Where to stop; default: where the dataset does not hold another one.

    Raises:
        DataError: The dataset ends before ``num_global_batches``, or lacks a field.
    """
    if num_global_batches is None:
        num_global_batches = max(len(dataset) - consumed_samples, 0) // plan.global_batch_size
    else:
        require_samples(dataset, plan, consumed_samples, num_global_batches)
    for batch in range(num_global_batches):
        begin = consumed_samples + batch * plan.global_batch_size
        for micro_batch in range(plan.num_micro_batches):
            samples = [dataset[index] for index in plan.samples(begin, micro_batch)]
            yield collate(samples, fields)


def require_samples(
    dataset: Samples,
    plan: BatchPlan,
    consumed_samples: int,
    num_global_batches: int,
    name: str = "the dataset",
) -> None:
    """See that a dataset lasts.

    Raises:
        DataError: It ends before ``num_global_batches`` more.
    """
    needed = consumed_samples + num_global_batches * plan.global_batch_size
    if len(dataset) < needed:
        raise DataError(
            f"{name} has {len(dataset)} samples, expected {needed}: {num_global_batches} global "
            f"batches of {plan.global_batch_size} after {consumed_samples} consumed ones"
        )


def collate(samples: list[Mapping[str, Tensor]], fields: Mapping[str, BatchField]) -> Batch:
    """Stack the declared fields of some samples along a new first axis, ``batch``.

    Raises:
        DataError: A sample lacks a field, or its shapes do not agree with the declaration.
    """
    tensors = {}
    for name, field in fields.items():
        missing = [key for key in fields if key not in samples[0]]
        if missing:
            raise DataError(
                f"samples lack {', '.join(missing)}, which the task declares; they have "
                f"{', '.join(sorted(samples[0]))}"
            )
        parts = [torch.as_tensor(sample[name]) for sample in samples]
        shapes = {tuple(part.shape) for part in parts}
        if field.axes[0] != BATCH_AXIS or len(shapes) > 1 or parts[0].dim() != len(field.axes) - 1:
            raise DataError(
                f"field {name} is declared with axes {', '.join(field.axes)}, but its samples have "
                f"shapes {', '.join(map(str, sorted(shapes)))}; the first axis must be "
                f"{BATCH_AXIS} and the others those of every sample"
            )
        tensors[name] = torch.stack(parts)
    return Batch(tensors=tensors, fields=fields)


def join_rows(batch: Batch) -> Batch:
    """A micro-batch whose rows end their documents at places of their own, as one row.

    The rows stand behind one another, each field [B, S, ...] as [1, B * S, ...], one of pairs of
    positions [B, S, S] as [1, B * S, B * S], and a document ends where a row does. So whatever
    keeps the documents of one row apart keeps these apart.

    Raises:
        DataError: A field is not [B, S, ...] as the others are, or the ends are not those of the
            rows.
    """
    if batch.row_ends is None:
        return batch
    rows, length = rows_and_length(batch)
    ends = [end for of_row in batch.row_ends for end in of_row]
    if len(batch.row_ends) != rows or not all(0 <= end <= length for end in ends):
        raise DataError(
            f"documents are said to end at {batch.row_ends}, expected one tuple for each of {rows} "
            f"rows, with positions from 0 to {length}"
        )
    places = {row * length + end for row, of in enumerate(batch.row_ends) for end in (*of, length)}
    whole = attrs.evolve(batch, row_ends=None, document_ends=tuple(sorted(places - {0})))
    return whole if rows == 1 else attrs.evolve(whole, tensors=_joined(batch, rows, length))


def _joined(batch: Batch, rows: int, length: int) -> dict[str, Tensor]:
    joined = {}
    for name, tensor in batch.tensors.items():
        axes = batch.fields[name].axes
        if axes == PAIR_AXES:
            # Nobody sees another row's tokens.
            joined[name] = torch.block_diag(*tensor).to(tensor.dtype).unsqueeze(0)
            continue
        if axes[:2] != (BATCH_AXIS, SEQUENCE_AXIS) or tensor.shape[:2] != (rows, length):
            raise DataError(
                f"field {name} has the axes {', '.join(axes)} and the shape "
                f"{tuple(tensor.shape)}; rows that have documents of their own are joined, so "
                f"expected {BATCH_AXIS}, {SEQUENCE_AXIS} and a shape that begins with "
                f"{(rows, length)}, as the other fields have"
            )
        joined[name] = tensor.flatten(0, 1).unsqueeze(0)
    return joined


def require_mask(batch: Batch) -> Batch:
    """The same micro-batch, whose ``attention_mask``, where it has one, is as ``Batch`` says.

    Raises:
        DataError: It is of another form, as Megatron's own.
    """
    mask = batch.tensors.get(MASK)
    if mask is None:
        return batch
    rows, length = rows_and_length(batch)
    axes = batch.fields[MASK].axes if MASK in batch.fields else ()
    wanted = (rows, length, length)
    if axes != PAIR_AXES or mask.dtype is not torch.bool or tuple(mask.shape) != wanted:
        raise DataError(
            f"field {MASK} has the axes {', '.join(axes) or 'of no field'}, {mask.dtype} and the "
            f"shape {tuple(mask.shape)}; expected {', '.join(PAIR_AXES)}, torch.bool and {wanted}, "
            "True where a query may attend to a key"
        )
    return batch


def rows_and_length(batch: Batch) -> tuple[int, int]:
    """B and S of a micro-batch that is not cut, by its first field that has both.

    Raises:
        DataError: None has.
    """
    for name, tensor in batch.tensors.items():
        if name in batch.fields and batch.fields[name].axes[:2] == (BATCH_AXIS, SEQUENCE_AXIS):
            return tensor.shape[0], tensor.shape[1]
    raise DataError(
        f"no field of a micro-batch has the axes {BATCH_AXIS}, {SEQUENCE_AXIS}; its fields are "
        f"{', '.join(batch.tensors)}"
    )


def cut_sequence(batch: Batch, partition: SequencePartition, cp_rank: int, cp_size: int) -> Batch:
    """What one context-parallel rank keeps of a micro-batch.

    Every field with a ``sequence`` axis is cut along it, position ids among them, so that
    positions can be read from the batch; fields declared ``replicated`` stay whole. Documents still
    end where they end in the whole sequence.
    """
    if cp_size == 1:
        return batch
    partition = partition_of(partition, batch.document_ends)
    tensors = {
        name: _cut(tensor, batch.fields[name], partition, cp_rank, cp_size)
        for name, tensor in batch.tensors.items()
    }
    return attrs.evolve(batch, tensors=tensors)


def _cut(
    tensor: Tensor, field: BatchField, partition: SequencePartition, cp_rank: int, cp_size: int
) -> Tensor:
    if field.replicated or SEQUENCE_AXIS not in field.axes:
        return tensor
    dim = field.axes.index(SEQUENCE_AXIS)
    chunks = partition.chunks(tensor.shape[dim], cp_rank, cp_size)
    parts = [tensor.narrow(dim, begin, end - begin) for begin, end in chunks]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device; the same batch where it is there already."""
    if all(tensor.device == device for tensor in batch.tensors.values()):
        return batch
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}
    return attrs.evolve(batch, tensors=moved)
