"""Declarations and errors of Ulysses, before torch is imported."""

from __future__ import annotations

from typing import Any

from ascend_run.plugin_api import Layout, RunConfig
from ascend_run.plugins.sequence.ulysses import Ulysses, UlyssesConfig
from ascend_run.types.config import DataSection
from tests.support.tiny_configs import model_fields, parallel_fields


def config(
    *, heads: int = 8, tp: int = 1, cp: int = 1, seq_length: int = 64, groups: int | None = None
) -> RunConfig:
    parallel: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
    }
    return RunConfig(
        model=model_fields(
            {"num_attention_heads": heads, "num_query_groups": groups, "num_layers": 2}
        ),
        parallel=parallel_fields(parallel),
        data=DataSection(seq_length=seq_length),
    )


def problems(run: RunConfig, plugin: Ulysses | None = None) -> list[str]:
    parallel = run.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    layout = Layout(world_size=tp * cp, tp=tp, cp=cp)
    plugin = plugin or Ulysses(UlyssesConfig())
    return list(plugin.ascend_check(config=run, layout=layout))


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_would() -> None:
    (problem,) = problems(config(heads=10, cp=4))
    assert "10 heads" in problem
    assert "cp=4" in problem
    assert "use a parallel.context_parallel_size of 1, 2, 5 or 10" in problem
    assert "--enable unaligned-ulysses" in problem


def test_the_sizes_that_would_work_take_tensor_parallelism_into_account() -> None:
    (problem,) = problems(config(heads=12, tp=2, cp=4))
    assert "1, 2, 3 or 6" in problem


def test_what_core_says_already_is_not_said_again() -> None:
    assert problems(config(cp=4, seq_length=66)) == []
    assert problems(config(heads=9, tp=2, cp=2)) == []
