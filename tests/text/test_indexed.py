"""Token files against Megatron's writer and reader and a reader in plain Python."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import DataError
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import dtype_for, read_index
from tests.core.data.reference import read_documents
from tests.support.token_files import WriteDataset

SAME_FOLDER = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A vocabulary on either side of the switch of dtypes, and documents; some are empty."""
    vocab_size = draw(st.sampled_from([2, 4096, 65499, 65500, 65536, 200_000]))
    token = st.integers(0, vocab_size - 1)
    return vocab_size, draw(st.lists(st.lists(token, max_size=20), max_size=12))


@SAME_FOLDER
@given(corpora())
def test_files_equal_megatrons_byte_for_byte_and_both_readers_agree(
    write_dataset: WriteDataset, tmp_path: Path, corpus: tuple[int, list[list[int]]]
) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import (
        DType,
        IndexedDataset,
        IndexedDatasetBuilder,
    )

    vocab_size, documents = corpus
    ours = write_dataset(documents, "ours", vocab_size)
    theirs = str(tmp_path / "theirs")
    builder = IndexedDatasetBuilder(f"{theirs}.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{theirs}.idx")

    assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()
    assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
    assert read_documents(Path(ours)) == documents
    if any(documents):  # Megatron cannot map an empty .bin
        megatron = IndexedDataset(ours)
        assert [megatron[i].tolist() for i in range(len(megatron))] == documents
    index = read_index(ours)
    assert index.documents == len(documents)
    assert index.tokens == sum(map(len, documents))
    assert index.dtype.name == ("uint16" if vocab_size < 65500 else "int32")


def test_an_id_that_does_not_fit_is_an_error_and_not_wrapped(write_dataset: WriteDataset) -> None:
    with pytest.raises(OverflowError):
        write_dataset([[65536]], vocab_size=100)
    assert dtype_for(65500).itemsize == 4


@pytest.fixture
def dataset(write_dataset: WriteDataset) -> str:
    return write_dataset([[1, 2, 3], [4], [], [5, 6]])


def test_every_truncation_of_either_file_is_refused(dataset: str) -> None:
    for path in (idx_path(dataset), bin_path(dataset)):
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(DataError, match=r"truncated|not Megatron's") as refusal:
                read_index(dataset)
            assert str(path) in str(refusal.value)
        path.write_bytes(content)
    assert read_index(dataset).tokens == 6


def test_bytes_after_the_end_of_either_file_are_refused(dataset: str) -> None:
    for path in (idx_path(dataset), bin_path(dataset)):
        content = path.read_bytes()
        path.write_bytes(content + b"\x00\x00")
        with pytest.raises(DataError, match="not Megatron's") as refusal:
            read_index(dataset)
        assert str(path) in str(refusal.value)
        path.write_bytes(content)


def test_every_flipped_byte_of_the_index_is_refused(dataset: str) -> None:
    path = idx_path(dataset)
    content = bytearray(path.read_bytes())
    chance = random.Random(0)
    for place in range(len(content)):
        changed = content.copy()
        changed[place] ^= chance.randrange(1, 256)
        # A dtype of the same width is another dataset, not a broken one.
        changed[17] = 99 if place == 17 else changed[17]
        path.write_bytes(changed)
        with pytest.raises(DataError):
            read_index(dataset)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 some archive", b"MMIDIDX\x00\x01" + b"0" * 60]
)
def test_a_foreign_index_is_refused_with_what_was_expected(dataset: str, content: bytes) -> None:
    idx_path(dataset).write_bytes(content)
    with pytest.raises(DataError, match="MMIDIDX"):
        read_index(dataset)


def test_missing_files_are_named_together_and_a_suffix_is_pointed_out(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        read_index(tmp_path / "none")
    assert "none.bin and" in str(refusal.value)
    assert "none.idx not found" in str(refusal.value)
    with pytest.raises(DataError, match=r"named by its prefix: .*/none;"):
        read_index(tmp_path / "none.bin")


def test_a_multimodal_dataset_is_refused_by_its_table_of_modes(dataset: str) -> None:
    path = idx_path(dataset)
    path.write_bytes(path.read_bytes() + np.zeros(4, dtype=np.int8).tobytes())
    with pytest.raises(DataError, match="which only multimodal datasets have"):
        read_index(dataset)
