"""A resumed run with the ring is bitwise equal to an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Runs
from tests.support.needed_plugins import names_of

COMMON = {
    "model.attention_dropout": 0.1,
    "model.hidden_dropout": 0.1,
    "train.micro_batch_size": 2,
    "parallel.context_parallel_size": 2,
}
KINDS = {
    "experts, gmm and swap": (
        {
            **MOE,
            **COMMON,
            "parallel.expert_model_parallel_size": 2,
            "plugins.swap-attention.min_bytes": 1,
        },
        2,
        ("ring-attention", "gmm", "swap-attention"),
    ),
    "bf16, keys kept": (
        {**DENSE, **COMMON, "train.precision": "bf16", "plugins.ring-attention.kv_cache": "half"},
        2,
        ("ring-attention",),
    ),
}


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("kind", names_of(KINDS, lambda kind: kind[2]))
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, tmp_path: Path, kind: str
) -> None:
    Runs(gloo_pool, tmp_path, KINDS[kind]).assert_the_same_in_two_halves()
