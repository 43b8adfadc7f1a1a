"""Experts that exchange their tokens; ``test_routed_layer`` has them in layers, in float64."""

from __future__ import annotations

import pytest
import torch

from ascend_run.testing.pool import GlooPool

from . import exchanged_jobs as jobs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_precision_agrees_with_the_formula(gloo_pool: GlooPool, dtype: torch.dtype) -> None:
    """Matmuls round once each, on two ranks; their error stays below 4 eps of the dtype."""
    for errors in gloo_pool.run(jobs.relative_errors, 2, dtype):
        assert {*errors} == {"out", "x", "probs", "fc1", "fc2", "fc1_bias", "fc2_bias"}
        for name, error in errors.items():
            assert error <= 4 * torch.finfo(dtype).eps, (name, error)
