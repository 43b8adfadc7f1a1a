"""The peak of a step with adapters of experts, measured on storages, against the plan."""

from __future__ import annotations

from typing import Any, Final

import pytest

from ascend_run.testing.pool import GlooPool
from benchmarks.memory_case import EP, Case
from benchmarks.memory_prediction import TOLERANCE, compare, is_exact
from tests.support.needed_plugins import names_of

FULL: Final = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
SELECTIVE: Final = {
    "model.recompute_granularity": "selective",
    "model.recompute_modules": ["moe"],
}
TWO_RANKS: Final = {
    **EP,
    "train.global_batch_size": 8,
    "model.moe_router_force_load_balancing": True,
}
REPEATED: Final = {"plugins.moe-zero-memory.level": 1}
CASES: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "plain": ((), {}),
    "layers recomputed": ((), FULL),
    "experts recomputed": ((), SELECTIVE),
    "moe-zero-memory": (("moe-zero-memory",), {}),
    "moe-zero-memory, dispatched again": (("moe-zero-memory",), REPEATED),
}
OF_ALL: Final = {
    **CASES,
    "experts recomputed, ep=2": ((), {**SELECTIVE, **TWO_RANKS}),
    "moe-zero-memory, ep=2": (("moe-zero-memory",), TWO_RANKS),
    "gmm": (("gmm",), {}),
    "gmm, experts recomputed": (("gmm",), SELECTIVE),
    "gmm, moe-zero-memory": (("gmm", "moe-zero-memory"), {}),
}


def assert_expected(
    pool: GlooPool, targets: list[str], plugins: tuple[str, ...], values: dict[str, Any]
) -> None:
    ranks = 2 if values.keys() >= EP.keys() else 1
    given = {**values, "plugins.lora.target_modules": targets}
    case = Case(name="", model="moe", ranks=ranks, plugins=("lora", *plugins), values=given)
    for row in compare(case, pool):
        assert is_exact(row), row
        assert abs(row["off"]) <= TOLERANCE, row


@pytest.mark.exhaustive(by=lambda case: [case.startswith("moe")])
@pytest.mark.parametrize("case", names_of(OF_ALL, lambda case: case[0]))
def test_a_step_takes_the_memory_that_was_expected(gloo_pool: GlooPool, case: str) -> None:
    assert_expected(gloo_pool, ["all-linear", "experts"], *OF_ALL[case])


@pytest.mark.exhaustive(by=lambda part: [part])
@pytest.mark.parametrize("case", names_of(CASES, lambda case: case[0]))
@pytest.mark.parametrize("part", ["experts_fc1", "experts_fc2", "linear_proj"])
def test_frozen_experts_have_no_gradients(gloo_pool: GlooPool, part: str, case: str) -> None:
    """Neither activations nor gradients for weights without an adapter; what experts are
    recomputed from is kept all the same."""
    assert_expected(gloo_pool, [part], *CASES[case])
