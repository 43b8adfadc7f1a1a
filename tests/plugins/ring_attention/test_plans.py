"""Runs that are refused before anything starts, each with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.entrypoints.planning import prepare
from ascend_run.plugin_api import AscendRunError

CONFIG = """
enable = ["ring-attention"]

[run]
nproc = 4

[model]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
vocab_size = 1000

[parallel]
context_parallel_size = 4

[data]
train = ["corpus"]
seq_length = 64

[train]
global_batch_size = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def refusal(file: Path, *overrides: str, **options: object) -> str:
    with pytest.raises(AscendRunError) as refused:
        prepare(file, overrides, **options)  # type: ignore[arg-type]
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_sizes_that_divide_are_accepted_and_heads_need_not(file: Path) -> None:
    prepare(file)
    prepare(file, ["model.num_attention_heads=2"])


def test_a_length_that_does_not_divide_is_refused_with_its_neighbours(file: Path) -> None:
    text = refusal(file, "data.seq_length=60")
    assert "data.seq_length=60" in text
    assert "parallel.context_parallel_size=4" in text
    assert "56 or 64" in text


def test_contiguous_parts_need_only_as_many_as_there_are_ranks(file: Path) -> None:
    prepare(file, ["data.seq_length=60", "plugins.ring-attention.cut=contiguous"])


@pytest.mark.needs_plugins("ulysses")
def test_two_owners_of_the_sequence_are_refused_with_the_reason_and_the_way_out(
    file: Path,
) -> None:
    text = refusal(file, enable=["ulysses", "ring-attention"])
    assert "'ring-attention' and 'ulysses' both claim 'sequence-exchange'" in text
    assert "which one plugin owns alone; enable one of them" in text


@pytest.mark.parametrize(
    ("option", "expected"),
    [("cut=stripes", "zig-zag"), ("kv_cache=values", "none"), ("kv_cache_every=0", "1")],
)
def test_an_option_out_of_range_is_refused_with_what_there_is(
    file: Path, option: str, expected: str
) -> None:
    text = refusal(file, f"plugins.ring-attention.{option}")
    name, _, value = option.partition("=")
    assert f"plugins.ring-attention.{name}" in text
    assert value in text
    assert expected in text


def test_the_plan_shows_who_cuts_and_who_exchanges(file: Path) -> None:
    prepared = prepare(file)
    assert prepared.resolution.owners["sequence-exchange"] == "ring-attention"  # type: ignore[index]
