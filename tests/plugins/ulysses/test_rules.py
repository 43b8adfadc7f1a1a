"""What Ulysses declares and refuses, before torch is imported."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ascend_run.plugin_api import Claim, Layout, Numerics, RunConfig
from ascend_run.plugin_api.config import DataSection, FieldSection
from ascend_run.plugins.ulysses import Ulysses
from ascend_run.plugins.ulysses.partition import ContiguousPartition


def config(*, heads: int = 8, tp: int = 1, cp: int = 1, seq_length: int = 64) -> RunConfig:
    parallel: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
    }
    return RunConfig(
        model=FieldSection({"num_attention_heads": heads}),
        parallel=FieldSection(parallel),
        data=DataSection(seq_length=seq_length),
    )


def problems(run: RunConfig) -> list[str]:
    parallel = run.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    layout = Layout(world_size=tp * cp, tp=tp, cp=cp)
    return list(Ulysses().ascend_check(config=run, layout=layout))


def test_sizes_that_divide_are_accepted() -> None:
    assert problems(config(heads=8, tp=2, cp=4, seq_length=64)) == []


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_would() -> None:
    (problem,) = problems(config(heads=10, cp=4))
    assert "10 heads" in problem
    assert "cp=4" in problem
    assert "use a parallel.context_parallel_size of 1, 2, 5 or 10" in problem


def test_the_sizes_that_would_work_take_tensor_parallelism_into_account() -> None:
    (problem,) = problems(config(heads=12, tp=2, cp=4))
    assert "1, 2, 3 or 6" in problem


def test_what_core_says_already_is_not_said_again() -> None:
    assert problems(config(cp=4, seq_length=66)) == []
    assert problems(config(heads=9, tp=2, cp=2)) == []


def test_it_is_idle_exactly_where_no_sequence_is_split() -> None:
    plugin = Ulysses()
    assert plugin.manifest.idle is not None
    for size in (1, 2):
        run = config(cp=size)
        assert plugin.manifest.idle.holds(run) == (size == 1)
        assert (plugin.ascend_sequence_partition(config=run) is None) == (size == 1)


def test_it_owns_the_sequence_exchange_and_changes_rounding_only() -> None:
    assert Ulysses.manifest.claims == (Claim.SEQUENCE_EXCHANGE,)
    assert Ulysses.manifest.numerics is Numerics.ROUNDING


@given(size=st.integers(1, 16), part=st.integers(1, 64))
def test_the_ranks_chunks_are_the_sequence_once_and_in_order(size: int, part: int) -> None:
    chunks = [
        chunk
        for rank in range(size)
        for chunk in ContiguousPartition().chunks(size * part, rank, size)
    ]
    positions = [p for start, stop in chunks for p in range(start, stop)]
    assert positions == list(range(size * part))
