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

from ascend_run.core.data.epochs import EpochSettings, TokenStream, sample_starts
from ascend_run.core.data.index_cache import IndexCache
from ascend_run.core.data.samples import BlendedSamples, build_datasets
from ascend_run.plugin_api import (
    DataError,
    Datasets,
    HookError,
    PlatformError,
    RunConfig,
    TokenBlend,
)
from tests.support.token_files import WriteDataset

from .reference import samples_in_order

MakeConfig = Callable[..., RunConfig]
SAME_FOLDER = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

corpora = st.lists(st.lists(st.integers(0, 99), max_size=15), min_size=1, max_size=10).filter(
    lambda documents: sum(map(len, documents)) > 12
)


def stream_of(prefix: str, folder: Path, seq_length: int = 4, seed: int = 1) -> TokenStream:
    settings = EpochSettings(seq_length=seq_length, seed=seed, vocab_size=100)
    return TokenStream(prefix, IndexedDataset(prefix), settings, IndexCache(folder))


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
    )
    assert ours.samples_per_epoch == len(theirs)
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
    config = run_config(seq_length=4)
    for blend in (
        TokenBlend(prefixes=(first,)),
        TokenBlend(prefixes=(first, second), weights=(0.3, 0.7)),
    ):
        short, long = (
            build_datasets(config, Datasets(blend, None), samples, 0).train for samples in (50, 200)
        )
        assert (len(short), len(long)) == (50, 200)
        assert [window(short[i]) for i in range(50)] == [window(long[i]) for i in range(50)]


def test_the_order_depends_on_the_seed_alone(
    write_dataset: WriteDataset, run_config: MakeConfig, tmp_path: Path
) -> None:
    prefix = write_dataset([list(range(n, n + 9)) for n in range(20)])

    def order(seed: int, cache: str) -> list[list[int]]:
        config = run_config(seed=seed, seq_length=4, cache_dir=str(tmp_path / cache))
        datasets = Datasets(TokenBlend(prefixes=(prefix,)), None)
        train = build_datasets(config, datasets, 100, 0).train
        return [window(train[i]) for i in range(100)]

    assert order(3, "one") == order(3, "two")
    assert order(3, "one") != order(4, "one")


@SAME_FOLDER
@given(
    st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5),
    st.integers(1, 400),
)
def test_a_blend_keeps_its_shares_to_within_one_sample_at_every_point(
    write_dataset: WriteDataset, tmp_path: Path, weights: list[float], samples: int
) -> None:
    sources = [
        stream_of(write_dataset([[n] * 30], f"source{n}"), tmp_path / "cache")
        for n in range(len(weights))
    ]
    blend = BlendedSamples(sources, weights, samples, IndexCache(tmp_path / "cache"))
    drawn = np.zeros(len(weights))
    share = np.array(weights) / np.sum(weights)
    for index in range(samples):
        source = window(blend[index])[0]
        drawn[source] += 1
        assert np.all(np.abs(drawn - share * (index + 1)) < len(weights))


def test_a_blend_goes_by_its_weights_or_without_them_by_tokens(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    large, small = write_dataset([[1] * 300], "large"), write_dataset([[2] * 100], "small")
    for weights, expected in (((), 300), ((1.0, 9.0), 40)):
        blend = TokenBlend(prefixes=(large, small), weights=weights)
        train = build_datasets(run_config(seq_length=4), Datasets(blend, None), 400, 0).train
        assert sum(window(train[i])[0] == 1 for i in range(400)) == pytest.approx(expected, abs=1)


def test_every_sample_of_a_source_is_drawn_before_one_comes_again(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    documents = [list(range(40)), list(range(50, 90))]
    blend = TokenBlend(prefixes=(write_dataset(documents), write_dataset([[99] * 30], "other")))
    train = build_datasets(run_config(seq_length=8), Datasets(blend, None), 60, 0).train
    windows = [tuple(window(train[i])) for i in range(60)]
    mine = [seen for seen in windows if seen[0] != 99]
    per_epoch = 79 // 8
    assert len(mine) > 2 * per_epoch
    assert len(set(mine[:per_epoch])) == per_epoch
    assert len(set(mine[per_epoch : 2 * per_epoch])) == per_epoch


def test_a_rebuilt_dataset_is_not_read_with_the_old_index(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    config = run_config(seq_length=4)
    for documents in ([[1] * 50], [[2, 3] * 5, [4] * 90]):
        prefix = write_dataset(documents)
        blend = Datasets(TokenBlend(prefixes=(prefix,)), None)
        train = build_datasets(config, blend, 8, 0).train
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
        config = run_config(seq_length=8, tokenizer=str(tokenizer), eod_mask_loss=masked)
        blend = Datasets(TokenBlend(prefixes=(prefix,)), None)
        sample = build_datasets(config, blend, 4, 0).train[0]
        ends = sample["tokens"] == 0
        assert ends.sum() == 2
        assert torch.equal(sample["loss_mask"] == 0, ends & masked)


def test_a_tasks_own_dataset_passes_through(run_config: MakeConfig) -> None:
    own = [{"tokens": torch.zeros(4)}]
    built = build_datasets(run_config(), Datasets(own, None), 1, 0)
    assert built.train is own
    assert built.validation is None


def test_a_task_without_training_data_is_refused_where_steps_are_left(
    run_config: MakeConfig,
) -> None:
    nothing = Datasets(train=None, validation=None)
    with pytest.raises(HookError, match=r"'pretrain' returned no training dataset.* 10 samples"):
        build_datasets(run_config(), nothing, 10, 0)
    assert build_datasets(run_config(), nothing, 0, 0).train is None


def test_too_little_text_for_one_sample_is_refused_with_both_numbers(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    for tokens in (0, 1, 8):
        prefix = write_dataset([[1] * tokens, [1]])
        blend = Datasets(TokenBlend(prefixes=(prefix,)), None)
        if tokens == 8:
            assert len(build_datasets(run_config(seq_length=8), blend, 3, 0).train) == 3
        else:
            with pytest.raises(DataError, match=r"seq_length \+ 1 = 9"):
                build_datasets(run_config(seq_length=8), blend, 3, 0)


def test_a_token_that_the_model_has_no_row_for_is_refused_when_read(
    write_dataset: WriteDataset, run_config: MakeConfig
) -> None:
    prefix = write_dataset([[50, 60, 70] * 10])
    blend = Datasets(TokenBlend(prefixes=(prefix,)), None)
    train = build_datasets(run_config(seq_length=8, vocab_size=70), blend, 3, 0).train
    with pytest.raises(DataError, match=r"token id 70, but model\.vocab_size is 70"):
        train[0]
    assert build_datasets(run_config(seq_length=8, vocab_size=71), blend, 3, 0).train[0]


def test_blending_without_the_compiled_helpers_is_rejected(
    write_dataset: WriteDataset, run_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to install."""
    import sys

    import megatron.core.datasets

    monkeypatch.delattr(megatron.core.datasets, "helpers", raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers", None)
    one, two = write_dataset([[1] * 30], "one"), write_dataset([[2] * 30], "two")
    blend = Datasets(TokenBlend(prefixes=(one, two)), None)
    with pytest.raises(PlatformError, match="compiled helpers"):
        build_datasets(run_config(seq_length=4), blend, 5, 0)
    alone = Datasets(TokenBlend(prefixes=(one,)), None)
    assert build_datasets(run_config(seq_length=4), alone, 5, 0).train[4]


def test_building_says_nothing_to_the_user(
    write_dataset: WriteDataset, run_config: MakeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    blend = Datasets(TokenBlend(prefixes=(write_dataset([[1] * 30]),)), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_datasets(run_config(seq_length=4), blend, 5, 0).train[0]
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
