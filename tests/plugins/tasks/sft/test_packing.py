"""Several conversations in one sample, each independent of the others; and files by weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.core.data.samples import build_datasets
from ascend_run.plugins.tasks.sft import Sft, SftConfig
from ascend_run.testing.pool import GlooPool
from ascend_run.text.packing import pack
from tests.core.train.runs import Ended, whole_run
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.needed_plugins import names_of
from tests.support.task_runs import run_values
from tests.support.tiny_llama import write_llama

from .test_samples import chat, context_of
from .test_training import conversations

TOGETHER = 4
LONG = 448
"""Conversations that fit into one sample, and its length."""


@given(lengths=st.lists(st.integers(2, 17), min_size=1, max_size=40))
def test_every_conversation_is_in_one_sample_that_it_fits_into(lengths: list[int]) -> None:
    packs = pack(lengths, 16)
    assert sorted(number for held in packs for number in held) == [*range(len(lengths))]
    used = [sum(lengths[number] - 1 for number in held) for held in packs]
    assert max(used) <= 16
    # No two samples could be joined.
    assert sum(sorted(used)[:2]) > 16 or len(used) == 1


def test_the_longest_come_first_and_fill_what_is_tightest() -> None:
    # 10 alone; 8 and the remaining 2; 5 and 4.
    assert pack([6, 11, 5, 3, 9], 10) == [[0, 2], [1], [3, 4]]


def test_a_sample_is_its_conversations_with_positions_of_their_own(tmp_path: Path) -> None:
    words = ["one", "two three", "four", "five six seven", "eight", "nine ten", "one two"]
    context = context_of(tmp_path, write_lines(tmp_path / "a.jsonl", [chat(w) for w in words]), 64)
    options = Sft(SftConfig(shuffle=False)), Sft(SftConfig(shuffle=False, packing=True))
    alone, packed = (o.ascend_task().datasets(context, 7, 0).train for o in options)
    whole = {}
    for number in range(7):
        sample = alone[number]
        used = int(sample["loss_mask"].nonzero()[-1]) + 1
        whole[number] = [sample[name][:used] for name in ("tokens", "labels", "loss_mask")]
    seen = []
    for index in range(len(packed.samples.packs)):
        sample, begin = packed[index], 0
        for number in packed.samples.packs[index]:
            tokens, labels, mask = whole[number]
            end = begin + len(tokens)
            assert torch.equal(sample["tokens"][begin:end], tokens)
            assert torch.equal(sample["labels"][begin:end], labels)
            assert torch.equal(sample["loss_mask"][begin:end], mask)
            assert torch.equal(sample["position_ids"][begin:end], torch.arange(end - begin))
            begin = end
            seen.append(number)
        assert not sample["loss_mask"][begin:].any()
    assert sorted(seen) == [*range(7)]
    assert len(packed.samples.packs) < 7


def values(folder: Path, output: str, **changes: Any) -> dict[str, Any]:
    of_file = {
        "data__seq_length": 112,
        "train__train_iters": 4,
        "train__micro_batch_size": 1,
        "train__global_batch_size": TOGETHER,
    }
    return run_values("sft", folder, folder / output, **{**of_file, **changes})


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packing")
    write_llama(folder / "model", max_position_embeddings=LONG)
    write_tokenizer(folder / "tokenizer", CHATML)
    write_lines(folder / "train.jsonl", conversations(TOGETHER))
    return folder


@pytest.fixture(scope="module")
def apart(gloo_pool: GlooPool, workplace: Path) -> Ended:
    """Run every step on all conversations, each in a sample of its own."""
    (ended,) = gloo_pool.run(whole_run, 1, values(workplace, "apart"), timeout=100)
    return ended


CP = {"parallel__context_parallel_size": 2}
PP = {"parallel__pipeline_model_parallel_size": 2}
TWO_ROWS = {
    "data__seq_length": 96,
    "train__micro_batch_size": 2,
    "train__global_batch_size": 2,
}
"""All still in one micro-batch of rows with two each, of different lengths."""
KINDS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one": (1, {}, ()),
    "two rows, pp, recomputed": (
        2,
        {
            **PP,
            **TWO_ROWS,
            "model__recompute_granularity": "full",
            "model__recompute_method": "uniform",
            "model__recompute_num_layers": 1,
        },
        (),
    ),
    "attention recomputed, swapped": (
        1,
        {"model__recompute_granularity": "selective", "plugins__swap-attention__min_bytes": 1},
        ("swap-attention",),
    ),
    "compiled": (1, {}, ("compile",)),
    "heads exchanged": (2, CP, ("ulysses",)),
    "two rows in a ring": (2, CP | TWO_ROWS, ("ring-attention",)),
    "ring of contiguous parts": (
        2,
        {**CP, "plugins__ring-attention__cut": "contiguous"},
        ("ring-attention",),
    ),
    "double ring": (
        4,
        {"parallel__context_parallel_size": 4, "plugins__double-ring__kv_cache": "full"},
        ("double-ring",),
    ),
    "gathered": (2, CP, ("kv-allgather-cp",)),
    "shared by the documents": (2, CP, ("adaptive-cp",)),
    "ring and heads": (4, {"parallel__context_parallel_size": 4}, ("hybrid-cp",)),
}


@pytest.mark.exhaustive(
    by=lambda kind: [] if kind == "compiled" else [KINDS[kind][0] > 1, bool(KINDS[kind][2])]
)
@pytest.mark.parametrize("kind", names_of(KINDS, lambda kind: kind[2]))
def test_steps_on_a_packed_sample_are_steps_on_its_conversations(
    gloo_pool: GlooPool, workplace: Path, apart: Ended, kind: str
) -> None:
    ranks, changes, plugins = KINDS[kind]
    in_one = {"data__seq_length": LONG, "train__global_batch_size": 1}
    run = values(workplace, kind, plugins__sft__packing=True, **{**in_one, **changes})
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)[0]
    for line, want in zip(ended.readings, apart.readings, strict=True):
        assert line["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert len({line["loss"] for line in ended.readings}) == 4


def test_files_give_their_shares(tmp_path: Path) -> None:
    files = [
        write_lines(tmp_path / f"{name}.jsonl", [chat(word) for word in words])
        for name, words in (("few", ["one", "two"]), ("many", ["three", "four", "five"]))
    ]
    context = context_of(tmp_path, files[0])
    data = attrs.evolve(context.config.data, train=tuple(files), train_weights=(3.0, 1.0))
    context.config = attrs.evolve(context.config, data=data)
    wanted = Sft(SftConfig()).ascend_task().datasets(context, 40, 0)
    train = build_datasets(context.config, wanted, 40, 0).train
    alone = [
        {tuple(source[i]["labels"].tolist()) for i in range(len(source.samples.packs))}
        for source in wanted.train.datasets
    ]
    assert not alone[0] & alone[1]
    read = [tuple(train[i]["labels"].tolist()) for i in range(40)]
    assert Counter(labels in alone[0] for labels in read) == {True: 30, False: 10}
    for count in range(1, 41):
        given = sum(labels in alone[0] for labels in read[:count])
        assert abs(given - 0.75 * count) <= 1
    # Every conversation of a file is equally frequent.
    assert max(Counter(read[:8]).values()) == 3
