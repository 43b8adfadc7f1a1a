"""Steps that fail wherever memory can run out, beside plugins that treat what layers save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.fake_plugins import plugin
from tests.support.limited_memory import LimitedMemory
from tests.support.small_runs import training

PARTS: Final = 12
"""Tries of the last step: memory for one more part of its bytes each."""
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
CASES: Final[Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]]] = {
    "recompute": (DENSE, ("recompute",)),
    "discard": (DENSE, ("recompute-norm", "recompute-activation")),
    "swap": ({**DENSE, "plugins.swap-attention.min_bytes": 1}, ("swap-attention",)),
    "planned swap": (
        {
            **DENSE,
            "plugins.smart-swap.bandwidth_gb": 1e6,
            "plugins.smart-swap.min_bytes": 1,
            "plugins.smart-swap.warmup_steps": 0,
        },
        ("smart-swap",),
    ),
    "experts": ({**MOE, "plugins.moe-zero-memory.level": 1}, ("moe-zero-memory",)),
}


@attrs.define(kw_only=True)
class Tried:
    """Three steps."""

    losses: list[float]
    weights: dict[str, Tensor]
    failures: int
    begun: list[int]  #: Bytes of earlier tries and steps at the beginning of each try.


def tried(values: Mapping[str, Any], plugins: tuple[str, ...], fails: bool) -> Tried:
    """Train for three steps; in the last one memory may run out. A rank's job."""
    memory = LimitedMemory()

    def make_room() -> bool:
        parts = memory.failures + 1
        memory.limit = memory.peak * parts / PARTS if parts <= PARTS else float("inf")
        return True

    room = plugin("room-maker", {"ascend_out_of_memory": lambda self: make_room})()
    with training(values, plugins, memory.plugin(), room) as run:
        losses = [run.step_with_events().loss for _ in range(2)]
        if fails:
            memory.limit = memory.peak / PARTS
        losses.append(run.step_with_events().loss)
        weights = {name: weight.cpu().clone() for name, weight in run.parameters.items()}
    return Tried(losses=losses, weights=weights, failures=memory.failures, begun=memory.begun)


@pytest.mark.exhaustive(by=lambda case: ())
@pytest.mark.needs_plugins(*sorted({name for _, names in CASES.values() for name in names}))
@pytest.mark.parametrize("case", CASES)
def test_a_failed_try_leaves_nothing_and_changes_no_bit(gloo_pool: GlooPool, case: str) -> None:
    model, plugins = CASES[case]
    values = {**model, **DROPOUT}
    (plain,) = gloo_pool.run(tried, 1, values, plugins, False)
    (found,) = gloo_pool.run(tried, 1, values, plugins, True)
    assert found.failures >= PARTS - 1
    assert found.losses == plain.losses
    assert all(torch.equal(found.weights[name], plain.weights[name]) for name in plain.weights)
    first, *again = found.begun[2:]
    assert len(again) == found.failures
    assert max(again) <= first, "a failed try has left something behind"
