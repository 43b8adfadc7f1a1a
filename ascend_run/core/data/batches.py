"""Batch samples: assign them to data-parallel ranks, shard them over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import Batch, BatchField, DataError
from ascend_run.plugin_api.contracts import SequencePartition, partition_of
from ascend_run.types.config import RunConfig
from ascend_run.types.data import Samples
from ascend_run.types.layout import Layout

BATCH_AXIS = "batch"
SEQUENCE_AXIS = "sequence"
MASK = "attention_mask"
PAIR_AXES = (BATCH_AXIS, "query", "key")
"""Axes of ``attention_mask``, which holds for each pair of positions whether it is visible."""


@attrs.frozen(kw_only=True)
class BatchPlan:
    """Assignment of a global batch's samples to data-parallel ranks, as in Megatron.

    A global batch is the next ``global_batch_size`` samples, independent of the layout. In each
    micro-batch, the data-parallel ranks take ``micro_batch_size`` consecutive samples each, in
    order.
    """

    micro_batch_size: int
    global_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1

    @classmethod
    def of_rank(cls, config: RunConfig, layout: Layout) -> Self:
        """Return the plan of this rank."""
        return cls(
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            dp_rank=layout.coordinate("dp"),
            dp_size=layout.dp,
        )

    def __attrs_post_init__(self) -> None:
        assert self.global_batch_size % (self.micro_batch_size * self.dp_size) == 0

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per rank in a global batch."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def samples(self, consumed_samples: int, micro_batch: int) -> range:
        """Return this rank's sample indices of one micro-batch of the next global batch."""
        first = consumed_samples + micro_batch * self.micro_batch_size * self.dp_size
        first += self.dp_rank * self.micro_batch_size
        return range(first, first + self.micro_batch_size)


def micro_batches(
    dataset: Samples, fields: Mapping[str, BatchField], plan: BatchPlan, consumed_samples: int = 0
) -> Iterator[Batch]:
    """Yield the micro-batches of one rank, of all complete global batches in a dataset.

    The only state is the position, so a resumed run continues exactly where it stopped, and every
    evaluation reads the same samples.

    Args:
        consumed_samples: Samples that the run has trained on.

    Raises:
        DataError: The dataset lacks a field.
    """
    end = len(dataset) - plan.global_batch_size + 1
    for begin in range(consumed_samples, end, plan.global_batch_size):
        for micro_batch in range(plan.num_microbatches):
            samples = [dataset[index] for index in plan.samples(begin, micro_batch)]
            yield collate(samples, fields)


def require_samples(
    dataset: Samples, plan: BatchPlan, consumed_samples: int, num_global_batches: int, name: str
) -> None:
    """Check that a dataset has enough samples.

    Raises:
        DataError: It has fewer than ``num_global_batches`` more global batches.
    """
    needed = consumed_samples + num_global_batches * plan.global_batch_size
    if len(dataset) < needed:
        raise DataError(
            f"{name} has {len(dataset)} samples, expected {needed}: {num_global_batches} global "
            f"batches of {plan.global_batch_size} after {consumed_samples} consumed ones"
        )


def collate(samples: list[Mapping[str, Tensor]], fields: Mapping[str, BatchField]) -> Batch:
    """Stack the declared fields of samples along a new first axis, ``batch``.

    Raises:
        DataError: A sample lacks a field, or its shape does not match the declaration.
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
    """Join the rows of a micro-batch into one row if they have document ends of their own.

    Rows are concatenated: each field [B, S, ...] becomes [1, B * S, ...], a field over pairs of
    positions [B, S, S] becomes [1, B * S, B * S], and each row end becomes a document end. Whatever
    keeps documents of one row apart therefore keeps rows apart.

    Raises:
        DataError: A field has another shape than [B, S, ...], or the ends do not match the rows.
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
            # Tokens do not attend to other rows.
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
    """Check the ``attention_mask`` of a micro-batch, if it has one, and return the micro-batch.

    Raises:
        DataError: Its axes, dtype or shape are not those that ``Batch`` documents; Megatron's own
            masks differ.
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
    """Return B and S of a micro-batch, from its first field with both axes that is not replicated.

    Raises:
        DataError: No field has both axes.
    """
    for name, tensor in batch.tensors.items():
        field = batch.fields.get(name, BatchField(axes=()))
        if field.axes[:2] == (BATCH_AXIS, SEQUENCE_AXIS) and not field.replicated:
            return tensor.shape[0], tensor.shape[1]
    raise DataError(
        f"no field of a micro-batch has the axes {BATCH_AXIS}, {SEQUENCE_AXIS}; its fields are "
        f"{', '.join(batch.tensors)}"
    )


def shard_sequence(batch: Batch, partition: SequencePartition, cp_rank: int, cp_size: int) -> Batch:
    """Return the shard of a micro-batch that one context-parallel rank keeps.

    Every field with a ``sequence`` axis is sharded along it, including position ids, so that
    positions can be read from the batch. Fields declared ``replicated`` are not sharded. Document
    ends still refer to the full sequence.
    """
    if cp_size == 1:
        return batch
    partition = partition_of(partition, batch.document_ends)
    tensors = {
        name: _shard(tensor, batch.fields[name], partition, cp_rank, cp_size)
        for name, tensor in batch.tensors.items()
    }
    return attrs.evolve(batch, tensors=tensors)


def _shard(
    tensor: Tensor, field: BatchField, partition: SequencePartition, cp_rank: int, cp_size: int
) -> Tensor:
    if field.replicated or SEQUENCE_AXIS not in field.axes:
        return tensor
    dim = field.axes.index(SEQUENCE_AXIS)
    chunks = partition.chunks(tensor.shape[dim], cp_rank, cp_size)
    parts = [tensor.narrow(dim, begin, end - begin) for begin, end in chunks]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device; return the same batch if it is already there."""
    if all(tensor.device == device for tensor in batch.tensors.values()):
        return batch
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}
    return attrs.evolve(batch, tensors=moved)
