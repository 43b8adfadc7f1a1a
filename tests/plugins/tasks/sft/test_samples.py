"""Samples and batches: which are dropped, in which order they come, how they are padded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from structlog.testing import capture_logs

from ascend_run.core.data.index_cache import IndexCache
from ascend_run.plugin_api import (
    Batch,
    DataError,
    Layout,
    NoCache,
    RunConfig,
    RunContext,
)
from ascend_run.plugins.tasks.sft import Sft, SftConfig, pads_to_longest
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.preprocess.samples import SampleOptions, preprocess_samples
from ascend_run.tools.report.page import write_report
from ascend_run.types.config import DataSection, RunSection
from tests.support.chats import SHORT, write_lines, write_tokenizer
from tests.support.tiny_configs import model_fields, parallel_fields
from tests.tools.report.run_folders import write_run

LENGTH = 32


def chat(result: str, question: str = "one two?") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question},
                         {"role": "assistant", "content": result}]}  # fmt: skip


def context_of(folder: Path, train: str, length: int = LENGTH, **run: Any) -> RunContext:
    config = RunConfig(
        run=RunSection(output_dir=str(folder / "run"), **run),
        model=model_fields({"vocab_size": 1000}),
        parallel=parallel_fields(),
        data=DataSection(
            train=(train,), tokenizer=str(write_tokenizer(folder / "t")), seq_length=length
        ),
    )
    cache = IndexCache.of_run(config)
    return RunContext(config=config, layout=Layout(), device=None, groups=None, cache=cache)


def train_set(context: RunContext, samples: int = 10, **options: Any) -> Any:
    return Sft(SftConfig(**options)).ascend_task().datasets(context, samples, 0).train


def test_a_sample_is_shifted_padded_and_masked(tmp_path: Path) -> None:
    context = context_of(tmp_path, write_lines(tmp_path / "a.jsonl", [chat("hello")]))
    sample = train_set(context)[0]
    backend_ids = sample["tokens"].tolist()
    used = int(sample["loss_mask"].nonzero()[-1]) + 1
    assert sample["labels"][: used - 1].tolist() == backend_ids[1:used]
    assert sample["loss_mask"].sum() >= 2
    assert not sample["loss_mask"][used:].any()
    assert {tuple(tensor.shape) for tensor in sample.values()} == {(LENGTH,)}
    assert sample["position_ids"].tolist() == [*range(LENGTH)]
    assert {name: str(t.dtype) for name, t in sample.items()} == {
        "tokens": "torch.int64",
        "labels": "torch.int64",
        "loss_mask": "torch.float32",
        "position_ids": "torch.int64",
    }
    end = sample["labels"][used - 1]
    assert backend_ids[used:] == backend_ids[-1:] * (LENGTH - used)
    assert end != sample["labels"][-1], "the closing token, not padding, is the last label"


def test_every_epoch_reads_every_conversation_in_an_order_of_its_own(tmp_path: Path) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    lines = write_lines(tmp_path / "a.jsonl", [chat(word) for word in words])
    context = context_of(tmp_path, lines)
    data = train_set(context, 21)
    epochs = [[tuple(data[e * 7 + i]["labels"].tolist()) for i in range(7)] for e in range(3)]
    assert len({frozenset(epoch) for epoch in epochs}) == 1
    assert len({*epochs[0]}) == 7
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = train_set(context, 9)
    assert torch.equal(again[8]["labels"], data[8]["labels"]), "the length of a run is no matter"
    other = train_set(context_of(tmp_path, lines, seed=7), 7)
    assert [tuple(other[i]["labels"].tolist()) for i in range(7)] != epochs[0]
    in_order = train_set(context, 7, shuffle=False)
    first = train_set(context_of(tmp_path, write_lines(tmp_path / "b.jsonl", [chat("one")])), 1)
    assert torch.equal(in_order[0]["labels"], first[0]["labels"])
    with pytest.raises(IndexError):
        data[21]


def left_out(folder: Path) -> dict[str, Any]:
    (report,) = (folder / "run/index-cache").glob("*/report.npy")
    content: dict[str, Any] = json.loads(np.load(report).tobytes())
    return content


def test_what_cannot_be_trained_on_is_left_out_and_listed(tmp_path: Path) -> None:
    long = chat("four five six seven eight nine ten " * 20)
    too_long_prompt = chat("yes", question="one two three " * 60)
    path = write_lines(
        tmp_path / "a.jsonl",
        [chat("hello"), chat(" "), long, chat("a<|im_end|>b"), too_long_prompt, chat("six")],
    )
    data = train_set(context_of(tmp_path, path), 2)
    report = left_out(tmp_path)
    assert (report["conversations"], report["samples"]) == (6, 2)
    assert report["left_out"] == {
        "nothing to train on": {"count": 1, "first": [f"{path}:2"]},
        "spells a special token": {"count": 1, "first": [f"{path}:4"]},
        "too long": {"count": 2, "first": [f"{path}:3", f"{path}:5"]},
    }
    assert len({tuple(data[i]["tokens"].tolist()) for i in range(2)}) == 2


def test_long_conversations_are_cut_where_asked(tmp_path: Path) -> None:
    long = chat("four five six seven eight nine ten " * 20)
    path = write_lines(tmp_path / "a.jsonl", [long, chat("yes", question="one two three " * 60)])
    data = train_set(context_of(tmp_path, path), 1, too_long="truncate")
    assert left_out(tmp_path)["left_out"] == {
        "nothing to train on": {"count": 1, "first": [f"{path}:2"]},
        "truncated": {"count": 2, "first": [f"{path}:1", f"{path}:2"]},
    }
    assert data[0]["loss_mask"][-1] == 1


def test_turns_that_do_not_fit_are_cut_at_the_end_of_one(tmp_path: Path) -> None:
    first, long = chat("four five")["messages"], chat("six seven eight nine ten " * 20)["messages"]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [*first, *long]}, {"messages": long}])
    whole = train_set(context_of(tmp_path, write_lines(tmp_path / "b.jsonl", [chat("four five")])))
    data = train_set(context_of(tmp_path, path), 1, too_long="turns")
    reports = [json.loads(np.load(r).tobytes()) for r in tmp_path.glob("run/*/*/report.npy")]
    assert [report["left_out"] for report in reports if report["left_out"]] == [
        {
            "too long": {"count": 1, "first": [f"{path}:2"]},
            "truncated": {"count": 1, "first": [f"{path}:1"]},
        }
    ]
    for name, tensor in whole[0].items():
        assert torch.equal(data[0][name], tensor)


def test_a_folder_of_tables_gives_the_samples_of_its_lines(tmp_path: Path) -> None:
    words = ["one", "two three", "four", "five six seven"]
    lines = write_lines(tmp_path / "a.jsonl", [chat(word) for word in words])
    (tmp_path / "tables").mkdir()
    for half in range(2):
        rows = [
            {"dialog": [{"who": "human", "said": "one two?"}, {"who": "gpt", "said": word}]}
            for word in words[2 * half : 2 * half + 2]
        ]
        pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"tables/{half}.parquet")
    options = {
        "handler": "sharegpt",
        "map_keys": ("conversations=dialog", '{"role_tag": "who", "content_tag": "said"}'),
    }
    plain = train_set(context_of(tmp_path, lines), 8)
    tables = train_set(context_of(tmp_path, str(tmp_path / "tables")), 8, **options)
    for index in range(8):
        for name, tensor in plain[index].items():
            assert torch.equal(tables[index][name], tensor)


def test_special_tokens_in_text_are_kept_where_asked(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat("a<|im_end|>b")])
    with pytest.raises(DataError, match="spells a special token: 1"):
        train_set(context_of(tmp_path, path))
    assert len(train_set(context_of(tmp_path, path), 3, special_tokens="keep")) == 3


def test_conversations_that_the_template_refuses_are_all_named(tmp_path: Path) -> None:
    folder = write_tokenizer(
        tmp_path / "strict",
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
        "{{ messages[0].content }}",
    )
    answer_first = {"messages": [SHORT[1]]}
    path = write_lines(tmp_path / "a.jsonl", [answer_first, chat("x"), answer_first])
    context = context_of(tmp_path, path)
    config = context.config
    data = DataSection(train=config.data.train, tokenizer=str(folder), seq_length=LENGTH)
    context.config = RunConfig(
        run=config.run, model=config.model, parallel=config.parallel, data=data
    )
    with pytest.raises(DataError) as refused:
        train_set(context)
    assert [problem.split(": ")[0] for problem in refused.value.problems[:1]] == [f"{path}:1"]
    assert "begin with the user" in refused.value.problems[0]
    assert f"{path}:3" in "\n".join(refused.value.problems)


def test_a_changed_file_is_encoded_anew(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat("one")])
    first = train_set(context_of(tmp_path, path), 1)[0]
    again = train_set(context_of(tmp_path, path), 1)[0]
    assert torch.equal(first["labels"], again["labels"])
    assert len([*(tmp_path / "run/index-cache").glob("*/ids.npy")]) == 1
    write_lines(Path(path), [chat("two")])
    changed = train_set(context_of(tmp_path, path), 1)[0]
    assert not torch.equal(first["labels"], changed["labels"])


@pytest.mark.parametrize("name", ["ids", "trained", "ends", "report"])
def test_kept_samples_that_were_damaged_are_encoded_anew(tmp_path: Path, name: str) -> None:
    lines = [chat(word) for word in ("one", "two three", "four")]
    path = write_lines(tmp_path / "a.jsonl", lines)
    samples = train_set(context_of(tmp_path, path), 3)
    first = [samples[index] for index in range(3)]
    (kept,) = (tmp_path / "run/index-cache").glob(f"*/{name}.npy")
    np.save(kept, np.load(kept)[::-1])
    with capture_logs() as events:
        again = train_set(context_of(tmp_path, path), 3)
    assert "index_cache.damaged" in [event["event"] for event in events]
    for index in range(3):
        for key, tensor in first[index].items():
            assert torch.equal(again[index][key], tensor)


def test_without_a_cache_the_samples_are_the_same(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat("one"), chat("two")])
    context = context_of(tmp_path, path)
    kept = train_set(context, 2)
    context.cache = NoCache()
    for index, sample in enumerate(train_set(context, 2)[number] for number in range(2)):
        assert torch.equal(kept[index]["labels"], sample["labels"])


def shortened(masks: torch.Tensor, options: SftConfig, **sizes: int) -> Batch:
    parallel = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        **sizes,
    }
    config = RunConfig(
        model=model_fields({"num_moe_experts": None}), parallel=parallel_fields(parallel)
    )
    tensors = {"loss_mask": masks, "tokens": torch.arange(masks.numel()).view_as(masks)}
    wrap = Sft(options).ascend_batch(config)
    (batch,) = wrap(iter([Batch(tensors=tensors, fields={})]))
    return batch


def test_a_micro_batch_is_as_long_as_its_longest_sample() -> None:
    masks = torch.zeros(2, 64)
    masks[0, 3:9] = 1
    masks[1, 2:19] = 1
    assert shortened(masks, SftConfig(pad_to_multiple_of=1)).tensors["tokens"].shape == (2, 19)
    batch = shortened(masks, SftConfig())
    assert batch.tensors["tokens"].shape == (2, 24)
    assert torch.equal(batch.tensors["loss_mask"], masks[:, :24])
    assert batch.tensors["tokens"][1, 0] == 64
    wide = shortened(masks, SftConfig(pad_to_multiple_of=1), context_parallel_size=4)
    assert wide.tensors["tokens"].shape == (2, 24)
    assert shortened(masks, SftConfig(padding="seq_length")).tensors["tokens"].shape == (2, 64)


def test_ranks_that_hold_unequal_parts_are_given_whole_lengths() -> None:
    """A rank could not derive the length of a shorter sequence from its own part."""
    model = model_fields({"num_moe_experts": None})
    for length, longest in ((64, True), (65, False)):
        parallel = {"pipeline_model_parallel_size": 1, "context_parallel_size": 2}
        config = RunConfig(
            model=model, parallel=parallel_fields(parallel), data=DataSection(seq_length=length)
        )
        assert pads_to_longest(config, SftConfig()) is longest
        told = [p for p in Sft(SftConfig(padding="longest")).ascend_check(config) if "longest" in p]
        assert len(told) == (not longest)
        assert all("data.seq_length=65: 2 ranks hold unequal parts" in problem for problem in told)


@pytest.mark.parametrize(("scaling", "longest"), [("yarn", True), ("dynamic", False)])
def test_where_angles_follow_the_length_micro_batches_have_one(scaling: str, longest: bool) -> None:
    model = model_fields({"num_moe_experts": None, "rope_scaling_type": scaling})
    parallel = parallel_fields({"pipeline_model_parallel_size": 1})
    config = RunConfig(model=model, parallel=parallel)
    assert pads_to_longest(config, SftConfig()) is longest
    told = [p for p in Sft(SftConfig(padding="longest")).ascend_check(config) if "longest" in p]
    assert [f"model.rope_scaling_type={scaling}: RoPE angles" in p for p in told] == [True] * (
        not longest
    )


@pytest.mark.parametrize(
    ("experts", "stages", "longest"), [(None, 1, True), (4, 1, False), (None, 2, False)]
)
def test_auto_pads_to_the_longest_where_padding_is_seen_by_none(
    experts: int | None, stages: int, longest: bool
) -> None:
    config = RunConfig(
        model=model_fields({"num_moe_experts": experts}),
        parallel=parallel_fields({"pipeline_model_parallel_size": stages}),
    )
    assert pads_to_longest(config, SftConfig()) is longest


def test_a_report_says_what_each_set_of_a_blend_left_out(tmp_path: Path) -> None:
    """One set is a file with a conversation too long, the other token files that lack one."""
    lines = [chat("one"), chat("two " * LENGTH), chat("<|im_end|>"), chat("three")]
    context = context_of(tmp_path, write_lines(tmp_path / "long.jsonl", lines[:2]))
    prefix = tmp_path / "tokens"
    preprocess_samples(
        SampleOptions(
            inputs=(Path(write_lines(tmp_path / "spelled.jsonl", lines[2:])),),
            output_prefix=prefix,
            handler="messages",
            tokenizer=Path(context.config.data.tokenizer or ""),
        )
    )
    names = (context.config.data.train[0], str(prefix))
    data = attrs.evolve(context.config.data, train=names, train_weights=(3.0, 1.0))
    context.config = attrs.evolve(context.config, data=data)
    with capture_logs() as events:
        train_set(context)
    config = f"[data]\ntrain = {json.dumps(names)}\ntrain_weights = [3.0, 1.0]\nseq_length = 32\n"
    readings = [{"step": 1, "loss": 2.0, "consumed_samples": 8, "time": 1.0}]
    folder = write_run(tmp_path / "done", lines=readings, config=config, log=events)
    page = tmp_path / "page.html"
    (summary,) = write_report([read_run(folder)], page)
    drops = (
        f"too long: 1 ({names[0]}:2)",
        f"spells a special token: 1 ({tmp_path / 'spelled.jsonl'}:1)",
    )
    assert [each.left_out for each in summary.blend] == [(drop,) for drop in drops]
    assert [(each.samples, each.epochs) for each in summary.blend] == [(6, 6.0), (2, 2.0)]
    assert all(f"</code>: {drop}</li>" in page.read_text() for drop in drops)
