"""Plugins for experts on the platform of the tests, against the plain model in float64 on the CPU.

On a GPU the models have no code in common there but the router's; the tests beside it compare runs
of one platform.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

import pytest
import torch

from ascend_run.testing.models import MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.testing.tensors import full_tensors

BOUNDS: Final = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 6e-2}
"""Of all gradients together, and of the loss. bfloat16 rounds to 4e-3, in every layer."""
UNLIKE: Final = {"run.seed": 18}
"""No token's routing is so close that rounding changes it."""
RECOMPUTED: Final = {"plugins.moe-adaptive-recompute.scale": 0.0}


def gradients(
    pool: GlooPool, plugins: tuple[str, ...], dtype: torch.dtype, **config: Any
) -> tuple[float, Mapping[str, torch.Tensor]]:
    values = {**MOE, **UNLIKE, **config}
    trial = Trial(plugins=plugins, config=values, dtype=str(dtype).removeprefix("torch."))
    outcomes = pool.run(run_trial, 1, trial)
    found = full_tensors(outcomes).tensors
    return outcomes[0].losses[0], {name: tensor.cpu().double() for name, tensor in found.items()}


def sets() -> list[Any]:
    """Alone, and with the grouped GEMM, whose token counts may stay on the device."""
    alone: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [
        (("moe-permute-fusion",), {}),
        (("moe-alltoall",), {}),
        (("moe-allgather",), {"model.moe_token_dispatcher_type": "allgather"}),
        (("moe-zero-memory",), {"plugins.moe-zero-memory.level": 0}),
        (("moe-zero-memory",), {"plugins.moe-zero-memory.level": 1}),
        (("moe-adaptive-recompute",), RECOMPUTED),
    ]
    grouped = [(("gmm", *plugins), config) for plugins, config in alone]
    return [
        pytest.param(plugins, config, marks=pytest.mark.needs_plugins(*plugins))
        for plugins, config in [(("gmm",), {}), *alone, *grouped]
    ]


@pytest.fixture(scope="module")
def plain(gloo_pool: GlooPool) -> tuple[float, Mapping[str, torch.Tensor]]:
    return gradients(gloo_pool, (), torch.float64, platform="cpu")


def shown(
    plugins: tuple[str, ...], config: Mapping[str, Any], dtype: torch.dtype
) -> list[Hashable]:
    """Return what the suite must show: each set in float64, and each other dtype."""
    return [(plugins, *config.items()) if dtype is torch.float64 else dtype]


@pytest.mark.exhaustive(by=shown)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("plugins", "config"), sets())
def test_loss_and_gradients_are_those_of_the_plain_model_on_the_cpu(
    gloo_pool: GlooPool,
    plain: tuple[float, Mapping[str, torch.Tensor]],
    plugins: tuple[str, ...],
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> None:
    loss, expected = plain
    found_loss, found = gradients(gloo_pool, plugins, dtype, **config)
    assert abs(found_loss - loss) <= BOUNDS[dtype] * loss
    assert found.keys() == expected.keys()
    apart = sum((found[name] - value).square().sum() for name, value in expected.items())
    size = sum(value.square().sum() for value in expected.values())
    assert apart <= BOUNDS[dtype] ** 2 * size
