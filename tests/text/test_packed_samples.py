"""Samples made of encoded documents: their order, their rows, and pairs that stay together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.text.encoding import Encoded, Reading
from ascend_run.text.packed_samples import PackedSamples
from ascend_run.text.packing import pack

LENGTHS = (5, 3, 9, 4, 2, 7, 6)


def encoded(lengths: Sequence[int]) -> Encoded:
    """Return documents whose ids are 100 times their index and up; the second half is trained."""
    parts = [np.arange(length) for length in lengths]
    return Encoded(
        ids=np.concatenate([part + 100 * i for i, part in enumerate(parts)]).astype(np.int32),
        trained=np.concatenate([part >= len(part) // 2 for part in parts]),
        ends=np.cumsum(lengths),
        report=Reading(conversations=len(lengths), samples=len(lengths), left_out={}),
    )


@pytest.mark.parametrize(
    ("packs", "epochs"),
    [
        (False, [[6, 4, 2, 3, 1, 0, 5], [2, 3, 4, 1, 0, 5, 6], [5, 0, 1, 4, 6, 3, 2]]),
        (True, [[3, 0, 1], [0, 1, 3], [0, 1, 3]]),
    ],
)
def test_the_order_of_epochs_is_that_of_earlier_releases(
    packs: bool, epochs: list[list[int]]
) -> None:
    """A resumed run reads the samples that the release which began it would have read."""
    samples = PackedSamples(
        encoded(LENGTHS), length=10, pad_id=7, num_samples=21, seed=42, packs=packs
    )
    size = len(epochs[0])
    read = [int(samples[index].tokens[0]) // 100 for index in range(3 * size)]
    assert [read[begin : begin + size] for begin in range(0, 3 * size, size)] == epochs
    with pytest.raises(IndexError, match="sample 21 of 21"):
        samples[21]


def test_a_row_holds_its_documents_one_after_another_then_padding() -> None:
    samples = PackedSamples(
        encoded((3, 4, 5, 2)), length=12, pad_id=7, num_samples=1, seed=None, packs=True, group=2
    )
    row = samples[0]
    assert row.tokens.tolist() == [0, 1, 100, 101, 102, 200, 201, 202, 203, 300, 7, 7]
    assert row.labels.tolist() == [1, 2, 101, 102, 103, 201, 202, 203, 204, 301, 7, 7]
    assert row.loss_mask.tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0]
    assert row.is_last.tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0]
    assert row.position_ids.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert row.documents.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert {name: str(getattr(row, name).dtype) for name in ("tokens", "loss_mask")} == {
        "tokens": "int64",
        "loss_mask": "float32",
    }


def test_without_a_shift_each_token_has_its_own_label() -> None:
    lengths = (2, 3, 4, 1)
    samples = PackedSamples(
        encoded(lengths),
        length=6,
        pad_id=7,
        num_samples=2,
        seed=None,
        packs=True,
        group=2,
        shift=0,
    )
    assert samples.packs == [[0, 1], [2, 3]]
    row = samples[0]
    assert row.tokens.tolist() == row.labels.tolist() == [0, 1, 100, 101, 102, 7]
    assert row.loss_mask.tolist() == [0, 1, 0, 1, 1, 0]
    assert row.is_last.tolist() == [0, 1, 0, 0, 1, 0]
    assert row.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert row.documents.tolist() == [0, 0, 1, 1, 1, 1]


def test_a_group_that_is_not_packed_is_a_sample() -> None:
    samples = PackedSamples(
        encoded((3, 4, 5, 2)), length=12, pad_id=7, num_samples=4, seed=None, group=2
    )
    assert samples.packs == [[0, 1], [2, 3]]
    documents = [[0, 0, *[1] * 10], [*[0] * 4, *[1] * 8]] * 2
    assert [samples[index].documents.tolist() for index in range(4)] == documents
    assert samples[3].tokens.tolist() == [200, 201, 202, 203, 300, *[7] * 7]


def test_packed_samples_keep_groups_that_would_fit_better_apart() -> None:
    lengths = (3, 4, 3, 6)
    assert pack(lengths, 7) == [[0, 3], [1, 2]]
    samples = PackedSamples(
        encoded(lengths), length=7, pad_id=7, num_samples=2, seed=None, packs=True, group=2
    )
    assert samples.packs == [[0, 1], [2, 3]]


@given(pairs=st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=30))
def test_pairs_stay_together_and_fill_what_is_tightest(pairs: list[tuple[int, int]]) -> None:
    lengths = [length for pair in pairs for length in pair]
    packs = pack(lengths, 16, group=2)
    assert sorted(number for held in packs for number in held) == [*range(len(lengths))]
    for held in packs:
        assert [number + 1 for number in held[::2]] == held[1::2]
        assert all(number % 2 == 0 for number in held[::2])
    # A pair of two documents takes what one document of as many positions would.
    alone = pack([a + b - 1 for a, b in pairs], 16)
    assert [[number // 2 for number in held[::2]] for held in packs] == alone
