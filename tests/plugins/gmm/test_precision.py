"""The products that half precision takes, in whole models: as near to float64 as the plain loop.

Float64, where parity is exact, has no grouped product in torch; so it is held against the plain
model in float64 by how far the plain loop in the same narrow dtype is from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from ascend_run.plugin_api.testing.models import MODELS
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import RankOutcome, Trial, run_trial
from ascend_run.plugin_api.testing.tensors import whole_of

LAYERS, MICRO_BATCHES = 2, 4
NO_WORSE = 1.05
"""Sums in another order round to other bits, by chance as often nearer as farther: over the forty
thousand numbers of the gradients the errors agree far more closely than that."""


def outcomes(
    pool: GlooPool, dtype: str, ranks: int, plugins: Sequence[str] = (), **options: Any
) -> list[RankOutcome]:
    layout = {"parallel.expert_model_parallel_size": ranks}
    trial = Trial(plugins=(*plugins,), config={**MODELS["moe"], **layout, **options}, dtype=dtype)
    return pool.run(run_trial, ranks, trial)


def error(result: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """Of all gradients together: the norm of the difference, over the norm."""
    assert result.keys() == exact.keys()
    apart = sum((result[name].double() - value).square().sum() for name, value in exact.items())
    whole = sum(value.square().sum() for value in exact.values())
    return float((apart / whole) ** 0.5)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("backend", "ranks"), [("grouped_mm", 2), ("bmm", 1), ("auto", 2)])
def test_its_gradients_are_as_near_to_float64_as_the_plain_loops(
    gloo_pool: GlooPool, backend: str, dtype: str, ranks: int
) -> None:
    # Seeds of which no token is so near to two experts that rounding chooses the other.
    seed = {"run.seed": 18}
    exact = whole_of(outcomes(gloo_pool, "float64", ranks, **seed))
    plain = whole_of(outcomes(gloo_pool, dtype, ranks, **seed))
    grouped = outcomes(gloo_pool, dtype, ranks, ["gmm"], **seed, **{"plugins.gmm.backend": backend})
    allowed = error(plain.tensors, exact.tensors)
    assert 0 < allowed < 16 * torch.finfo(getattr(torch, dtype)).eps
    assert error(whole_of(grouped).tensors, exact.tensors) <= NO_WORSE * allowed
    if backend == "grouped_mm" or (backend == "auto" and dtype == "bfloat16"):
        products = LAYERS * MICRO_BATCHES * 6 // ranks
        assert all(outcome.operations["_grouped_mm"] == products for outcome in grouped)
