"""Samples against Megatron's GPTDataset and a plain Python stream; epochs, blends, caches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from structlog.testing import capture_logs

from ascend_run.core.data.index_cache import IndexCache
from ascend_run.core.data.samples import build_datasets
from ascend_run.plugin_api import DataError, Layout, RunConfig, RunContext
from ascend_run.plugins.tasks.pretrain.epochs import EpochSettings, TokenStream, sample_starts
from ascend_run.plugins.tasks.pretrain.token_files import token_datasets
from ascend_run.types.data import Samples
from tests.core.data.reference import samples_in_order
from tests.support.token_files import WriteDataset

MakeConfig = Callable[..., RunConfig]
SAME_FOLDER = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

corpora = st.lists(st.lists(st.integers(0, 99), max_size=15), min_size=1, max_size=10).filter(
    lambda documents: sum(map(len, documents)) > 12
)


def stream_of(prefix: str, folder: Path, seq_length: int = 4, seed: int = 1) -> TokenStream:
    settings = EpochSettings(seq_length=seq_length, seed=seed, vocab_size=100)
    return TokenStream(prefix, IndexedDataset(prefix), settings, IndexCache(folder), 10)


def train_samples(config: RunConfig, samples: int) -> Samples:
    """The training data of a run, as core blends what the task returns."""
    context = RunContext(
        config=config,
        layout=Layout(),
        device=None,
        groups=None,
        cache=IndexCache.of_run(config),
    )
    built = build_datasets(config, token_datasets(context, samples, 0), samples, 0).train
    assert built is not None
    return built


def window(sample: Any) -> list[int]:
    """Tokens and the last label: what was read."""
    assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


@SAME_FOLDER
@given(corpora, st.integers(1, 9), st.integers(0, 2**32))
def test_an_epoch_reads_every_window_of_the_shuffled_stream_once(
    write_dataset: WriteDataset,
    tmp_path: Path,
    documents: list[list[int]],
    seq_length: int,
    seed: int,
) -> None:
    stream = stream_of(write_dataset(documents), tmp_path / "cache", seq_length, seed)
    for epoch in range(3):
        order = stream._epoch(epoch).document_index.tolist()
        assert sorted(order) == list(range(len(documents)))
        count = stream.samples_per_epoch
        seen = [window(stream[epoch * count + i]) for i in range(count)]
        assert sorted(seen) == sorted(samples_in_order(documents, order, seq_length))


@SAME_FOLDER
@given(corpora, st.integers(1, 9), st.integers(0, 2**31))
def test_the_first_epoch_is_megatrons_sample_for_sample(
    write_dataset: WriteDataset,
    tmp_path: Path,
    documents: list[list[int]],
    seq_length: int,
    seed: int,
) -> None:
    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 7, -1, None, ("tokenizer",)

    prefix = write_dataset(documents)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
        path_to_cache=str(tmp_path / f"megatron-{seed}-{seq_length}-{hash(str(documents))}"),
    )
    everything = np.arange(len(documents), dtype=np.int32)
    theirs = GPTDataset(IndexedDataset(prefix), prefix, everything, None, Split.train, config)
    ours = TokenStream(
        prefix,
        IndexedDataset(prefix),
        EpochSettings(seq_length=seq_length, seed=seed, eod=7, eod_mask_loss=True),
        IndexCache(tmp_path / "cache"),
        len(theirs),
    )
    assert len(ours) == ours.samples_per_epoch == len(theirs)
    for index in range(len(theirs)):
        want = theirs[index]
        got = ours[index]
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name
            assert got[name].dtype == tensor.dtype


def test_every_epoch_has_its_own_seed_that_numpy_takes_whatever_the_runs() -> None:
    for seed in (0, 1234, 2**32, 2**60 + 1):
        seeds = [EpochSettings(seq_length=4, seed=seed).epoch_seed(epoch) for epoch in range(50)]
        assert len(set(seeds)) == 50
        for epoch_seed in seeds:
            np.random.RandomState(epoch_seed)


def test_positions_beyond_32_bits_are_counted_exactly() -> None:
    lengths = np.full(5, 2**31 - 1, dtype=np.int32)
    starts = sample_starts(lengths, 2**30)
    total = 5 * (2**31 - 1)
    assert len(starts) == (total - 1) // 2**30 + 1
    for number, (document, offset) in enumerate(starts.tolist()):
        assert divmod(number * 2**30, 2**31 - 1) == (document, offset)


def test_the_order_does_not_depend_on_how_many_samples_are_asked_for(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    first = write_dataset([list(range(n, n + 9)) for n in range(10)], "first")
    second = write_dataset([list(range(n, n + 5)) for n in range(30)], "second")
    for files, weights in (((first,), ()), ((first, second), (0.3, 0.7))):
        config = run_config(seq_length=4, train=files, train_weights=weights)
        short, long = (train_samples(config, samples) for samples in (50, 200))
        assert (len(short), len(long)) == (50, 200)
        assert [window(short[i]) for i in range(50)] == [window(long[i]) for i in range(50)]


def test_the_order_depends_on_the_seed_alone(
    write_dataset: WriteDataset, run_config: MakeConfig, tmp_path: Path
) -> None:
    prefix = write_dataset([list(range(n, n + 9)) for n in range(20)])

    def order(seed: int, cache: str) -> list[list[int]]:
        folder = str(tmp_path / cache)
        config = run_config(seed=seed, seq_length=4, cache_dir=folder, train=(prefix,))
        train = train_samples(config, 100)
        return [window(train[i]) for i in range(100)]

    assert order(3, "one") == order(3, "two")
    assert order(3, "one") != order(4, "one")


def test_a_blend_goes_by_its_weights_or_without_them_by_tokens(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    large, small = write_dataset([[1] * 300], "large"), write_dataset([[2] * 100], "small")
    for weights, expected in (((), 300), ((1.0, 9.0), 40)):
        config = run_config(seq_length=4, train=(large, small), train_weights=weights)
        train = train_samples(config, 400)
        assert sum(window(train[i])[0] == 1 for i in range(400)) == pytest.approx(expected, abs=1)


def test_every_sample_of_a_source_is_drawn_before_one_comes_again(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    documents = [list(range(40)), list(range(50, 90))]
    files = (write_dataset(documents), write_dataset([[99] * 30], "other"))
    train = train_samples(run_config(seq_length=8, train=files), 60)
    windows = [tuple(window(train[i])) for i in range(60)]
    mine = [seen for seen in windows if seen[0] != 99]
    per_epoch = 79 // 8
    assert len(mine) > 2 * per_epoch
    assert len(set(mine[:per_epoch])) == per_epoch
    assert len(set(mine[per_epoch : 2 * per_epoch])) == per_epoch


def test_a_rebuilt_dataset_is_not_read_with_the_old_index(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    for documents in ([[1] * 50], [[2, 3] * 5, [4] * 90]):
        train = train_samples(run_config(seq_length=4, train=(write_dataset(documents),)), 8)
        stream = {token for document in documents for token in document}
        assert {token for i in range(8) for token in window(train[i])} <= stream


def test_loss_leaves_out_the_end_of_document_where_asked(
    write_dataset: WriteDataset, run_config: MakeConfig, tmp_path: Path
) -> None:
    from ascend_run.text.tokenizer import train_tokenizer

    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_tokenizer(["some text"], 260).to_json())
    prefix = write_dataset([[5, 6, 7, 0]] * 10)
    for masked in (True, False):
        keys = {"tokenizer": str(tokenizer), "eod_mask_loss": masked}
        sample = train_samples(run_config(seq_length=8, train=(prefix,), **keys), 4)[0]
        ends = sample["tokens"] == 0
        assert ends.sum() == 2
        assert torch.equal(sample["loss_mask"] == 0, ends & masked)


def test_too_little_text_for_one_sample_is_refused_with_both_numbers(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    for tokens in (0, 1, 8):
        prefix = write_dataset([[1] * tokens, [1]])
        config = run_config(seq_length=8, train=(prefix,))
        if tokens == 8:
            assert len(train_samples(config, 3)) == 3
        else:
            with pytest.raises(DataError, match=r"seq_length \+ 1 = 9"):
                train_samples(config, 3)


def test_a_token_that_the_model_has_no_row_for_is_refused_when_read(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    prefix = write_dataset([[50, 60, 70] * 10])
    train = train_samples(run_config(seq_length=8, vocab_size=70, train=(prefix,)), 3)
    with pytest.raises(DataError, match=r"token id 70, but model\.vocab_size is 70"):
        train[0]
    assert train_samples(run_config(seq_length=8, vocab_size=71, train=(prefix,)), 3)[0]


def test_building_says_the_size_of_an_epoch_and_nothing_else(
    write_dataset: WriteDataset, run_config: MakeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    prefix = write_dataset([[1] * 30])
    with warnings.catch_warnings(), capture_logs() as events:
        warnings.simplefilter("error")
        train_samples(run_config(seq_length=4, train=(prefix,)), 5)[0]
    (said,) = events
    size = {"files": [prefix], "samples": 7, "tokens": 30}
    assert said == {"event": "data.read", "log_level": "info", **size}
    assert capfd.readouterr() == ("", "")


def test_a_permuted_index_gives_the_samples_of_the_valid_one(
    write_dataset: WriteDataset, tmp_path: Path
) -> None:
    prefix = write_dataset([[*range(number, number + 7)] for number in range(20)])
    order = [window(stream_of(prefix, tmp_path / "cache")[index]) for index in range(30)]
    for name in ("document", "sample", "shuffle"):
        (path,) = (tmp_path / "cache").glob(f"*/{name}.npy")
        np.save(path, np.load(path)[::-1])
        with capture_logs() as events:
            stream = stream_of(prefix, tmp_path / "cache")
            assert [window(stream[index]) for index in range(30)] == order
        assert [event["event"] for event in events] == ["index_cache.damaged"]
