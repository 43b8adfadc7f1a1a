"""Trials in any layout, and whether two of them came to the same numbers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ascend_run.plugin_api import Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from ascend_run.testing.tensors import differences, full_tensors

TOLERANCE = 1e-10
TRAINED = 1e-5
STEPS = 3
TP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
CP = {"parallel.context_parallel_size": 2}
EP = {"parallel.expert_model_parallel_size": 2}
ETP = {"parallel.expert_tensor_parallel_size": 2}
PP = {"parallel.pipeline_model_parallel_size": 2}
VPP = {**PP, "parallel.virtual_pipeline_model_parallel_size": 2}


def owner_of(claim: Claim) -> tuple[str, ...]:
    """Any built-in feature with a claim, for the kernel's tests."""
    catalogue = discover()
    ours = [n for n, found in catalogue.items() if found.first_party and found.kind is Kind.FEATURE]
    owners = [n for n, plugin in catalogue.load(ours).items() if claim in claims_of(plugin)]
    return tuple(owners[-1:])


EXCHANGE = owner_of(Claim.CONTEXT_PARALLEL)


def possible(*cases: tuple[Any, ...], ids: Sequence[str]) -> list[Any]:
    """Parameters of a test: cases with context parallelism only where a plugin exchanges it."""
    return [
        pytest.param(*case, id=name)
        for case, name in zip(cases, ids, strict=True)
        if EXCHANGE or not {*CP} & {*case[0]}
    ]


def outcomes(
    pool: GlooPool,
    values: Mapping[str, Any],
    world_size: int,
    plugins: tuple[str, ...] = (),
    steps: int = 0,
) -> list[RankOutcome]:
    """Loss and gradients in float64, or losses, norms and weights of steps in float32."""
    run = _alone if world_size == 1 else _run
    return run(pool, world_size, plugins, steps, json.dumps(values, sort_keys=True))


def _run(
    pool: GlooPool, world_size: int, plugins: tuple[str, ...], steps: int, values: str
) -> list[RankOutcome]:
    trial = Trial(plugins=plugins, config=json.loads(values), dtype="float64", steps=steps)
    return pool.run(run_trial, world_size, trial, timeout=100)


_alone = functools.cache(_run)
"""What many layouts are compared with is made once."""


def assert_same(several: list[RankOutcome], one: list[RankOutcome]) -> None:
    """Every rank's loss, and every gradient put together from the ranks' shards."""
    (loss,) = one[0].losses
    for outcome in several:
        assert outcome.losses == pytest.approx([loss], rel=TOLERANCE)
    got, want = full_tensors(several), full_tensors(one)
    assert got.problems(TOLERANCE) == want.problems() == []
    assert all(tensor.any() for tensor in want.tensors.values())
    assert list(differences(got.tensors, want.tensors, TOLERANCE)) == []


def assert_trained_alike(several: list[RankOutcome], one: list[RankOutcome]) -> None:
    """Losses, norms and weights of some float32 steps."""
    for outcome in several:
        assert outcome.losses == pytest.approx(one[0].losses, rel=TRAINED)
        assert outcome.grad_norms == pytest.approx(one[0].grad_norms, rel=TRAINED)
    got, want = full_tensors(several), full_tensors(one)
    assert got.problems() == want.problems() == []
    assert list(differences(got.tensors, want.tensors, TRAINED)) == []
