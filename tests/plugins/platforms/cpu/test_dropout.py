"""Dropout in a run on the CPU: the same numbers with each of Megatron's ways to compute it."""

from __future__ import annotations

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import TRIAL_SECONDS
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial

SEQUENCE_PARALLEL = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
}


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, SEQUENCE_PARALLEL)], ids=str)
def test_bias_dropout_fusion_changes_no_number(
    gloo_pool: GlooPool, ranks: int, layout: dict[str, object]
) -> None:
    def trained(*, fused: bool, hidden_dropout: float = 0.2) -> tuple[float, ...]:
        config = {
            **DENSE,
            **layout,
            "platform": "cpu",
            "model.hidden_dropout": hidden_dropout,
            "model.bias_dropout_fusion": fused,
        }
        trial = Trial(config=config, steps=2, counted=False)
        outcome = gloo_pool.run(run_trial, ranks, trial, timeout=TRIAL_SECONDS)[0]
        return (*outcome.losses, *outcome.grad_norms)

    plain = trained(fused=False)
    assert trained(fused=True) == plain
    assert trained(fused=True, hidden_dropout=0.0) != plain
