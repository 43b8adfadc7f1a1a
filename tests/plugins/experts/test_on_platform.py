"""Plugins for experts on the platform of the tests, against the plain model in float64 on the CPU.

On a GPU the models have no code in common there but the router's; the tests beside it compare runs
of one platform. Two ranks share a device if there is only one: gloo is between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, TypeAlias

import pytest
import torch

from ascend_run.testing.gloo_on_device import SHARED_VARIABLE
from ascend_run.testing.models import MOE, trial_layout
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from ascend_run.testing.tensors import full_tensors

Config: TypeAlias = Mapping[str, Any]
Gradients: TypeAlias = tuple[float, Mapping[str, torch.Tensor]]
"""The loss, and the gradient of each parameter."""

BOUNDS: Final = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 6e-2}
"""Of all gradients together, and of the loss. bfloat16 rounds to 4e-3, in every layer."""
UNLIKE: Final = {"run.seed": 18}
"""No token's routing is so close that rounding changes it."""
RECOMPUTED: Final = {"plugins.moe-adaptive-recompute.scale": 0.0}
SHARED: Final = {"plugins.shared-experts.count": 2, "plugins.shared-experts.gate": True}
MODELS: Final[Mapping[str, Config]] = {"shared-experts": SHARED}
"""Plugins that the plain model has as well, since they change it, and their options there."""
OVERLAPPED: Final = {**SHARED, "plugins.shared-experts.overlap": True}
CHUNKS: Final = {"plugins.moe-alltoall.overlap_chunks": 2}
PADDED: Final = {
    "model.moe_expert_capacity_factor": 1.99,
    "model.moe_pad_expert_input_to_capacity": True,
}
"""To all tokens, so that none is dropped on any number of ranks."""
GATHER: Final = {"model.moe_token_dispatcher_type": "allgather"}
GATHERED: Final = {
    **GATHER,
    **SHARED,
    "plugins.moe-allgather.overlap_chunks": 3,
    "plugins.moe-allgather.overlap_shared_experts": True,
}
REPLICAS: Final = {"plugins.hot-experts.num_experts": 2}
EP: Final = {"dp": 2, "ep": 2}
EXTENDED: Final = {"tp": 2}
"""Whose ranks the experts are distributed over by the plugin."""


def on_shared_devices(trial: Trial) -> RankOutcome:
    """Run a trial whose ranks may use one device."""
    os.environ[SHARED_VARIABLE] = "1"  # the pool puts it back
    return run_trial(trial)


def gradients(
    pool: GlooPool, plugins: tuple[str, ...], dtype: torch.dtype, ranks: int = 1, **config: Any
) -> Gradients:
    values = {**MOE, **UNLIKE, **config}
    trial = Trial(plugins=plugins, config=values, dtype=str(dtype).removeprefix("torch."))
    outcomes = pool.run(on_shared_devices, ranks, trial, timeout=100)
    found = full_tensors(outcomes)
    assert not [*found.incomplete()]
    tensors = {name: tensor.cpu().double() for name, tensor in found.tensors.items()}
    return outcomes[0].losses[0], tensors


def sets() -> list[Any]:
    """Alone, and with the grouped GEMM, whose token counts may stay on the device."""
    alone: list[tuple[tuple[str, ...], Config]] = [
        (("moe-permute-fusion",), {}),
        (("moe-alltoall",), {}),
        (("moe-allgather",), GATHER),
        (("moe-zero-memory",), {"plugins.moe-zero-memory.level": 0}),
        (("moe-zero-memory",), {"plugins.moe-zero-memory.level": 1}),
        (("moe-adaptive-recompute",), RECOMPUTED),
        (("shared-experts",), SHARED),
    ]
    grouped = [(("gmm", *plugins), config) for plugins, config in alone]
    return [
        pytest.param(plugins, config, marks=pytest.mark.needs_plugins(*plugins))
        for plugins, config in [(("gmm",), {}), *alone, *grouped]
    ]


def exchanging() -> list[Any]:
    """Of several ranks: those that exchange tokens or experts, or distribute these."""
    cases: list[tuple[tuple[str, ...], Mapping[str, int], Config]] = [
        (("moe-alltoall",), EP, {}),
        (("moe-alltoall",), EP, CHUNKS),
        (("gmm", "moe-permute-fusion", "moe-alltoall"), EP, CHUNKS),
        (("moe-alltoall", "shared-experts"), EP, OVERLAPPED),
        (("moe-allgather", "shared-experts"), EP, GATHERED),
        (("hot-experts",), EP, REPLICAS),
        (("gmm", "hot-experts"), EP, REPLICAS),
        (("moe-bmm-fused",), EP, PADDED),
        (("moe-tp-extend-ep",), EXTENDED, {}),
        (("gmm", "moe-tp-extend-ep"), EXTENDED, {}),
    ]
    return [
        pytest.param(plugins, sizes, config, marks=pytest.mark.needs_plugins(*plugins))
        for plugins, sizes, config in cases
    ]


@pytest.fixture(scope="module")
def plain(gloo_pool: GlooPool) -> Callable[[tuple[str, ...]], Gradients]:
    """The plain model's gradients, of one rank of the CPU; each is computed once."""
    made: dict[tuple[str, ...], Gradients] = {}

    def of(plugins: tuple[str, ...]) -> Gradients:
        models = tuple(name for name in plugins if name in MODELS)
        if models not in made:
            options = {key: v for name in models for key, v in MODELS[name].items()}
            made[models] = gradients(gloo_pool, models, torch.float64, platform="cpu", **options)
        return made[models]

    return of


def assert_near(found: Gradients, expected: Gradients, bound: float) -> None:
    (found_loss, tensors), (loss, plain_tensors) = found, expected
    assert abs(found_loss - loss) <= bound * loss
    assert tensors.keys() == plain_tensors.keys()
    apart = sum((tensors[name] - value).square().sum() for name, value in plain_tensors.items())
    size = sum(value.square().sum() for value in plain_tensors.values())
    assert apart <= bound**2 * size


def shown(plugins: tuple[str, ...], config: Config, dtype: torch.dtype) -> list[Hashable]:
    """Return what the suite must show: each set in float64, and each other dtype."""
    return [(plugins, *config.items()) if dtype is torch.float64 else dtype]


@pytest.mark.exhaustive(by=shown)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("plugins", "config"), sets())
def test_loss_and_gradients_are_those_of_the_plain_model_on_the_cpu(
    gloo_pool: GlooPool,
    plain: Callable[[tuple[str, ...]], Gradients],
    plugins: tuple[str, ...],
    config: Config,
    dtype: torch.dtype,
) -> None:
    found = gradients(gloo_pool, plugins, dtype, **config)
    assert_near(found, plain(plugins), BOUNDS[dtype])


@pytest.mark.exhaustive(by=lambda plugins, dtype: plugins if dtype is torch.float64 else [dtype])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("plugins", "sizes", "config"), exchanging())
def test_several_ranks_compute_what_one_computes_on_the_cpu(
    gloo_pool: GlooPool,
    plain: Callable[[tuple[str, ...]], Gradients],
    plugins: tuple[str, ...],
    sizes: Mapping[str, int],
    config: Config,
    dtype: torch.dtype,
) -> None:
    found = gradients(gloo_pool, plugins, dtype, 2, **config, **trial_layout(sizes))
    assert_near(found, plain(plugins), BOUNDS[dtype])
