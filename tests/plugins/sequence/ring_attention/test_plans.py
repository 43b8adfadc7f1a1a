"""Runs that are rejected before anything starts, each with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.plugin_api import AscendRunError
from ascend_run.prepare.prepare import prepare

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
def test_two_context_parallel_plugins_are_rejected_with_alternatives(
    file: Path,
) -> None:
    """The message has the reason."""
    text = refusal(file, enable=["ulysses", "ring-attention"])
    assert "'ring-attention' and 'ulysses' both claim 'context-parallel'" in text
    assert "which only one plugin can own; enable one of them" in text


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


def test_the_plan_shows_the_owner_of_the_partition_and_the_attention(file: Path) -> None:
    prepared = prepare(file)
    assert prepared.resolution.owners["context-parallel"] == "ring-attention"  # type: ignore[index]
