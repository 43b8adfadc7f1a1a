"""Which rank reads which sample, wherever a run starts; and how a sequence is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.core.data.batches import (
    BatchPlan,
    join_rows,
    micro_batches,
    require_mask,
    require_samples,
    shard_sequence,
    to_device,
)
from ascend_run.plugin_api import Batch, BatchField, DataError

FIELDS = {"tokens": BatchField(axes=("batch", "sequence"))}


class Numbered:
    """Sample i holds nothing but i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        assert 0 <= index < self.length
        return {"tokens": torch.full((3,), index), "dataset_id": torch.tensor(0)}


def read(batches: Sequence[Batch]) -> list[list[int]]:
    return [batch.tensors["tokens"][:, 0].tolist() for batch in batches]


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))


@settings(deadline=None)
@given(sizes, st.integers(0, 30), st.integers(1, 4))
def test_the_ranks_together_read_the_next_samples_once_and_in_order(
    size: tuple[int, int, int], consumed: int, batches: int
) -> None:
    micro, dp_size, accumulation = size
    total = micro * dp_size * accumulation
    by_rank = []
    for dp_rank in range(dp_size):
        plan = BatchPlan(
            micro_batch_size=micro, global_batch_size=total, dp_rank=dp_rank, dp_size=dp_size
        )
        assert plan.num_microbatches == accumulation
        dataset = Numbered(consumed + batches * total)
        by_rank.append(read(list(micro_batches(dataset, FIELDS, plan, consumed))))
    seen = [sample for turn in zip(*by_rank, strict=True) for part in turn for sample in part]
    assert seen == list(range(consumed, consumed + batches * total))


@settings(deadline=None)
@given(sizes)
def test_a_run_resumes_exactly_wherever_it_stopped(size: tuple[int, int, int]) -> None:
    micro, dp_size, accumulation = size
    total = micro * dp_size * accumulation
    dataset = Numbered(6 * total)
    for dp_rank in range(dp_size):
        plan = BatchPlan(
            micro_batch_size=micro, global_batch_size=total, dp_rank=dp_rank, dp_size=dp_size
        )
        whole = read(list(micro_batches(dataset, FIELDS, plan)))
        for steps in range(7):
            rest = read(list(micro_batches(dataset, FIELDS, plan, consumed_samples=steps * total)))
            assert rest == whole[steps * accumulation :]


def test_the_global_batch_is_the_same_samples_whatever_the_layout() -> None:
    def global_batches(micro: int, dp_size: int) -> list[set[int]]:
        found: list[set[int]] = [set() for _ in range(3)]
        for dp_rank in range(dp_size):
            plan = BatchPlan(
                micro_batch_size=micro, global_batch_size=8, dp_rank=dp_rank, dp_size=dp_size
            )
            turns = read(list(micro_batches(Numbered(24), FIELDS, plan)))
            for number, part in enumerate(turns):
                found[number // plan.num_microbatches].update(part)
        return found

    want = [set(range(8)), set(range(8, 16)), set(range(16, 24))]
    for micro, dp_size in ((1, 1), (8, 1), (2, 4), (1, 8), (4, 2)):
        assert global_batches(micro, dp_size) == want


def test_every_evaluation_reads_the_same_number_of_equal_samples() -> None:
    plan = BatchPlan(micro_batch_size=2, global_batch_size=4)

    def evaluation() -> list[list[int]]:
        return read(list(micro_batches(Numbered(9), FIELDS, plan)))

    assert evaluation() == evaluation() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_dataset_that_ends_too_soon_is_refused_with_the_numbers() -> None:
    plan = BatchPlan(micro_batch_size=2, global_batch_size=4)
    with pytest.raises(DataError, match="has 9 samples, expected 12"):
        require_samples(Numbered(9), plan, 4, 2, "the dataset")
    assert len(list(micro_batches(Numbered(9), FIELDS, plan))) == 4


def test_only_declared_fields_are_kept_and_missing_ones_are_named() -> None:
    plan = BatchPlan(micro_batch_size=2, global_batch_size=2)
    batch = next(micro_batches(Numbered(2), FIELDS, plan))
    assert list(batch.tensors) == ["tokens"]
    assert batch.fields is FIELDS
    wanted = {**FIELDS, "labels": BatchField(axes=("batch", "sequence"))}
    with pytest.raises(DataError, match=r"lack labels.*they have dataset_id, tokens"):
        next(micro_batches(Numbered(2), wanted, plan))


def test_samples_of_another_shape_than_declared_are_refused() -> None:
    plan = BatchPlan(micro_batch_size=1, global_batch_size=1)
    for axes in (("batch",), ("sequence", "batch"), ("batch", "sequence", "width")):
        with pytest.raises(DataError, match="declared with axes"):
            next(micro_batches(Numbered(1), {"tokens": BatchField(axes=axes)}, plan))


@attrs.frozen
class Partition:
    """Rank r of P holds every P-th of ``pieces * P`` pieces; zig-zag where asked."""

    pieces: int
    zigzag: bool
    multiple: int = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        width = seq_length // (self.pieces * size)
        rounds = range(self.pieces)
        turned = [size - 1 - rank if self.zigzag and turn % 2 else rank for turn in rounds]
        firsts = [(turn * size + place) * width for turn, place in zip(rounds, turned, strict=True)]
        return tuple((first, first + width) for first in firsts)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(1, 5))
def test_the_shards_joined_are_the_batch(
    cp_size: int, pieces: int, zigzag: bool, width: int
) -> None:
    length = cp_size * pieces * width
    fields = {
        "tokens": BatchField(axes=("batch", "sequence")),
        "weights": BatchField(axes=("batch", "width", "sequence")),
        "whole": BatchField(axes=("batch", "sequence"), replicated=True),
        "each": BatchField(axes=("batch",)),
        "position_ids": BatchField(axes=("batch", "sequence")),
    }
    tensors = {
        "tokens": torch.randint(0, 100, (2, length)),
        "weights": torch.rand(2, 3, length),
        "whole": torch.randint(0, 100, (2, length)),
        "each": torch.arange(2),
        "position_ids": torch.arange(length).expand(2, length),
    }
    batch = Batch(tensors=tensors, fields=fields)
    partition = Partition(pieces, zigzag)
    parts = [shard_sequence(batch, partition, rank, cp_size) for rank in range(cp_size)]
    for rank, part in enumerate(parts):
        chunks = partition.chunks(length, rank, cp_size)
        held_places = [place for begin, end in chunks for place in range(begin, end)]
        assert part.tensors["position_ids"][1].tolist() == held_places
        assert torch.equal(part.tensors["whole"], tensors["whole"])
        assert torch.equal(part.tensors["each"], tensors["each"])
        assert part.tensors["tokens"].shape == (2, length // cp_size)
        assert part.tensors["tokens"].is_contiguous()
    places = torch.cat([part.tensors["position_ids"][0] for part in parts])
    assert places.sort().values.tolist() == list(range(length))
    for name in ("tokens", "weights"):
        held = torch.cat([part.tensors[name] for part in parts], dim=-1)
        assert torch.equal(held, tensors[name][..., places])


@attrs.frozen
class OfDocuments(Partition):
    """Cuts each document as it would cut it alone."""

    document_ends: tuple[int, ...] = ()

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        documents = pairwise((0, *self.document_ends))
        return tuple(
            (start + first, start + end)
            for start, stop in documents
            for first, end in super(OfDocuments, self).chunks(stop - start, rank, size)
        )

    def of_documents(self, document_ends: tuple[int, ...]) -> OfDocuments:
        return attrs.evolve(self, document_ends=document_ends)


def test_a_partition_gets_the_documents_and_a_batch_keeps_them() -> None:
    ends = (4, 12)
    tensors = {"tokens": torch.arange(12)[None]}
    fields = {"tokens": BatchField(axes=("batch", "sequence"))}
    batch = Batch(tensors=tensors, fields=fields, document_ends=ends)
    part = shard_sequence(batch, OfDocuments(2, True), 0, 2)
    assert part.tensors["tokens"].tolist() == [[0, 3, 4, 5, 10, 11]]
    assert part.document_ends == ends
    assert to_device(part, torch.device("meta")).document_ends == ends
    by_position = shard_sequence(batch, Partition(1, False), 0, 2)
    assert by_position.tensors["tokens"].tolist() == [[0, 1, 2, 3, 4, 5]]


OF_ROWS = {
    "tokens": BatchField(axes=("batch", "sequence")),
    "weights": BatchField(axes=("batch", "sequence", "kind")),
    "each": BatchField(axes=("batch",)),
    "pairs": BatchField(axes=("batch", "query", "key")),
}


def test_rows_with_documents_of_their_own_are_joined() -> None:
    rows_BS = torch.arange(12).view(2, 6)
    pairs = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    weights = torch.stack((rows_BS, -rows_BS), dim=-1)
    tensors = {"tokens": rows_BS, "weights": weights, "pairs": pairs}
    batch = Batch(tensors=tensors, fields=OF_ROWS, row_ends=((2, 6), (3,)))
    joined = join_rows(batch)
    assert (joined.document_ends, joined.row_ends) == ((2, 6, 9, 12), None)
    assert joined.tensors["tokens"].tolist() == [[*range(12)]]
    assert joined.tensors["weights"].tolist() == [[[i, -i] for i in range(12)]]
    assert joined.tensors["pairs"].dtype is torch.bool
    assert joined.tensors["pairs"].nonzero().tolist() == [
        [0, row, key] for row in range(12) for key in range(row // 6 * 6, row + 1)
    ]
    assert join_rows(joined) is joined


@pytest.mark.parametrize(
    ("tensors", "ends", "message"),
    [
        (
            {"tokens": (2, 6), "each": (2,)},
            ((6,), (6,)),
            "field each has the axes batch and",
        ),
        ({"tokens": (2, 6), "weights": (2, 5, 1)}, ((6,), (6,)), r"field weights .*\(2, 5, 1\)"),
        ({"tokens": (2, 6)}, ((6,),), "one tuple for each of 2 rows"),
        ({"tokens": (2, 6)}, ((6,), (7,)), "with positions from 0 to 6"),
    ],
    ids=["no sequence", "another length", "too few", "beyond the row"],
)
def test_rows_that_cannot_be_joined_are_refused(
    tensors: dict[str, tuple[int, ...]], ends: tuple[tuple[int, ...], ...], message: str
) -> None:
    held = {name: torch.zeros(shape) for name, shape in tensors.items()}
    with pytest.raises(DataError, match=message):
        join_rows(Batch(tensors=held, fields=OF_ROWS, row_ends=ends))


def test_one_row_stays_as_it_is_with_its_documents() -> None:
    """Whatever its fields are."""
    tensors = {"each": torch.zeros(1), "tokens": torch.zeros(1, 6)}
    batch = Batch(tensors=tensors, fields=OF_ROWS, row_ends=((2,),))
    joined = join_rows(batch)
    assert joined.tensors is tensors
    assert (joined.document_ends, joined.row_ends) == ((2, 6), None)


@pytest.mark.parametrize(
    ("shape", "dtype", "axes"),
    [
        ((2, 1, 6, 6), torch.bool, ("batch", "query", "key")),
        ((2, 6, 6), torch.float32, ("batch", "query", "key")),
        ((2, 6, 6), torch.bool, ("batch", "sequence", "key")),
        ((2, 6, 3), torch.bool, ("batch", "query", "key")),
    ],
    ids=["Megatron's", "numbers", "to be cut", "a part"],
)
def test_a_mask_of_another_form_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[str, ...]
) -> None:
    tensors = {"tokens": torch.zeros(2, 6), "attention_mask": torch.zeros(shape, dtype=dtype)}
    fields = {**OF_ROWS, "attention_mask": BatchField(axes=axes)}
    with pytest.raises(DataError, match=r"field attention_mask .* expected .* \(2, 6, 6\)"):
        require_mask(Batch(tensors=tensors, fields=fields))


def test_a_mask_of_every_pair_and_none_are_taken() -> None:
    tensors = {"tokens": torch.zeros(2, 6)}
    batch = Batch(tensors=tensors, fields=OF_ROWS)
    assert require_mask(batch) is batch
    mask = {**tensors, "attention_mask": torch.ones(2, 6, 6, dtype=torch.bool)}
    fields = {**OF_ROWS, "attention_mask": BatchField(axes=("batch", "query", "key"))}
    assert require_mask(Batch(tensors=mask, fields=fields)).tensors is mask


def test_one_context_parallel_rank_keeps_the_very_batch() -> None:
    batch = Batch(tensors={"tokens": torch.zeros(1, 4)}, fields=FIELDS)
    assert shard_sequence(batch, Partition(1, False), 0, 1) is batch


def test_moving_to_a_device_moves_every_field_and_nothing_twice() -> None:
    batch = Batch(tensors={"tokens": torch.zeros(1, 4)}, fields=FIELDS)
    assert to_device(batch, torch.device("cpu")) is batch
    moved = to_device(batch, torch.device("meta"))
    assert moved.tensors["tokens"].device.type == "meta"
